"""What kernels reach of a device's peak rates, by kind of operation, as bench/fit_devices.py printed it.

Fitted to tables of vLLM's kernels in ai-dynamo/aiconfigurator 095f58a (A100: vLLM 0.14; H100, H200, B200: 0.24; latent
attention: 0.14), in bfloat16 or fp8: products of at least 2M weights; attention with heads of 128, no window and no
cached prefix; experts on one device or with parts of each, drawn by a power law. A constant holds what a kernel takes
to start and end; latent attention's is mostly the host's launches, which were measured along.

The RTX cards' are fitted to layer times of vLLM in casys-kaist/LLMServingSim 5daddb2: of Llama-3.1-8B and of Qwen3-32B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Reached(NamedTuple):
    compute: float  # of the peak; 1: never the bound
    memory: float  # of the bandwidth
    constant: float  # seconds of each kernel besides
    error: float | None  # the mean of |predicted / measured - 1| on rows that it was not fitted to; None: not measured
    error_90: float | None  # its 90th percentile


FITTED: Mapping[str, Mapping[str, Reached]] = {
    "a100-80": {
        "product": Reached(0.785, 0.729, 6e-06, 0.12, 0.25),  # 5859 rows
        "prefill": Reached(0.513, 0.281, 1.13e-05, 0.18, 0.41),  # 5457 rows
        "decode": Reached(1, 0.694, 1.78e-05, 0.25, 0.62),  # 5431 rows
        "expanded": Reached(0.449, 0.259, 0.000256, 0.15, 0.31),  # 880 rows
        "absorbed": Reached(0.103, 0.581, 0.000321, 0.2, 0.6),  # 1365 rows
        "experts": Reached(0.307, 0.837, 3.79e-05, 0.22, 0.44),  # 1530 rows
    },
    "h100": {
        "product": Reached(0.803, 0.865, 3.52e-06, 0.083, 0.19),  # 23680 rows
        "product_fp8": Reached(0.456, 0.79, 6.55e-06, 0.22, 0.5),  # 23680 rows
        "prefill": Reached(0.56, 0.325, 1.23e-05, 0.14, 0.32),  # 5763 rows
        "decode": Reached(1, 0.871, 1.21e-05, 0.17, 0.58),  # 6770 rows
        "expanded": Reached(0.72, 0.346, 0.00014, 0.15, 0.32),  # 1650 rows
        "absorbed": Reached(1, 1, 0.000152, 0.14, 0.32),  # 2715 rows
        "experts": Reached(0.403, 0.949, 3.71e-05, 0.22, 0.52),  # 2592 rows
        "experts_fp8": Reached(0.221, 0.934, 4.72e-05, 0.16, 0.37),  # 1998 rows
    },
    "h200": {
        "product": Reached(0.799, 0.822, 3.85e-06, 0.087, 0.2),  # 23680 rows
        "product_fp8": Reached(0.497, 0.757, 7.12e-06, 0.25, 0.54),  # 23680 rows
        "prefill": Reached(0.553, 0.251, 1.24e-05, 0.14, 0.32),  # 5763 rows
        "decode": Reached(1, 0.815, 1.22e-05, 0.18, 0.62),  # 6770 rows
        "expanded": Reached(0.716, 0.267, 0.000135, 0.16, 0.34),  # 1650 rows
        "absorbed": Reached(0.747, 1, 0.000153, 0.14, 0.33),  # 2715 rows
        "experts": Reached(0.446, 0.956, 3.82e-05, 0.25, 0.58),  # 2592 rows
        "experts_fp8": Reached(0.22, 0.903, 4.62e-05, 0.18, 0.4),  # 1998 rows
    },
    "b200": {
        "product": Reached(0.704, 0.789, 3.25e-06, 0.12, 0.29),  # 23680 rows
        "product_fp8": Reached(0.436, 0.743, 7.19e-06, 0.28, 0.61),  # 23680 rows
        "prefill": Reached(0.473, 0.204, 1.1e-05, 0.19, 0.41),  # 5865 rows
        "decode": Reached(1, 0.902, 9.46e-06, 0.18, 0.5),  # 7306 rows
        "experts": Reached(0.336, 0.983, 1.76e-05, 0.21, 0.47),  # 1972 rows
        "experts_fp8": Reached(0.143, 0.982, 3.45e-05, 0.2, 0.43),  # 1998 rows
    },
    "rtx-4090": {
        "product": Reached(0.955, 0.962, 8.63e-06, 0.046, 0.09),  # 608 rows
        "prefill": Reached(0.696, 0.534, 8.76e-06, 0.24, 0.67),  # 96 rows
        "decode": Reached(1, 0.882, 1.31e-05, 0.11, 0.24),  # 99 rows
    },
    "rtx-pro-6000": {
        "product": Reached(0.726, 0.861, 1.46e-05, 0.071, 0.14),  # 608 rows
        "prefill": Reached(0.478, 0.196, 4.51e-06, 0.25, 0.45),  # 233 rows
        "decode": Reached(1, 0.797, 1.28e-05, 0.088, 0.18),  # 171 rows
    },
}
