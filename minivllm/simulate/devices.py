"""Devices as data: what a data sheet promises, and how much of it kernels were measured to reach.

Rates and memory are of one device: bytes and operations a second, without sparsity. What is reached of them is fitted
to tables of kernels that others measured (fitted.py), and so are a Link's figures. An error is the mean of
|predicted / measured - 1|.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from minivllm.errors import ConfigError
from minivllm.registry import did_you_mean
from minivllm.simulate.fitted import FITTED, Reached
from minivllm.simulate.operations import ABSORBED, DECODE, ELEMENTWISE, EXPANDED, EXPERTS, EXPERTS_FP8, PREFILL, PRODUCT
from minivllm.simulate.weights import FP8

GB, GIB, TERA = 1e9, 2**30, 1e12

AICONFIGURATOR = "tables of vLLM's kernels in ai-dynamo/aiconfigurator 095f58a"
LLMSERVINGSIM = "layer tables of vLLM in casys-kaist/LLMServingSim 5daddb2"
# Of kinds that were not measured: whose rates stand for theirs. Elsewhere those of products.
_NEAREST = {EXPERTS_FP8: EXPERTS, ABSORBED: DECODE, EXPANDED: PREFILL}
_MOSTLY = (PRODUCT, PREFILL, DECODE)  # what nearly all of a step is
_ELEMENTWISE_SECONDS = 3e-6  # of a small kernel, as of the RTX 4090's in LLMServingSim's tables
PCIE_4, PCIE_5 = 32 * GB, 64 * GB  # 16 lanes, one way


@dataclass(frozen=True, slots=True)
class Link:
    """All-reduces among the devices of one machine: seconds of an empty one, and bytes of the message a second."""

    by_count: Mapping[int, tuple[float, float]]
    error: float | None  # as Reached's
    source: str

    @property
    def most(self) -> int:
        return max(self.by_count)

    def all_reduce_seconds(self, count: int, size: float) -> float:
        """Of counts between measured ones in proportion."""
        counts = sorted(self.by_count)
        seconds = [latency + size / rate for latency, rate in map(self.by_count.__getitem__, counts)]
        return float(np.interp(count, counts, seconds))


@dataclass(frozen=True, slots=True)
class Device:
    what: str
    memory: int  # bytes
    bandwidth: float  # of that memory
    flops: Mapping[str, float]  # by dtype; a multiplication and an addition are two
    host_link: float  # bytes a second from the host's memory, one way
    reached: Mapping[str, Reached]  # by kind of operation (operations.py): at least products
    reached_source: str
    source: str
    link: Link | None = None  # None: none that is modelled
    is_cpu: bool = False
    count: int = 1  # of them that share a model, each with its part of every layer (tensor parallelism)
    num_stages: int = 1  # of a pipeline, each so many devices with some of the layers
    split: tuple[int, ...] = ()  # layers of each stage; (): as even as can be, the first ones having more
    spreads_experts: bool = False  # a mixture's over `count`, each whole on one (expert parallelism); else all are cut
    num_contexts: int = 1  # that share equal K and V, each with those of some tokens (decode context parallelism)
    has_ranks: bool = False  # each has requests of its own, and of the model all but its part of the experts (DP + EP)

    @property
    def worst_error(self) -> float:
        return max((reached.error for reached in self.reached.values() if reached.error is not None), default=0.0)

    @property
    def dtype(self) -> str:
        """That a model computes in, if nothing else is asked for."""
        return "bfloat16"

    @property
    def error(self) -> float | None:
        """Of a step's time, relative: of the kernels that are most of it, the worst. None: nobody has measured it."""
        errors = [self.reached[kind].error for kind in _MOSTLY if kind in self.reached]
        return max((error for error in errors if error is not None), default=None)

    @property
    def reason(self) -> str:
        """For whoever reads what was decided."""
        reached = self.reached_by(PRODUCT)
        error = "" if reached.error is None else f"; its kernels are {self.worst_error:.0%} off in the mean, or less"
        rates = f"products reach {reached.compute:.0%} of its FLOP/s and {reached.memory:.0%} of its bandwidth"
        return f"simulated: {self.what}; {rates} ({self.reached_source}{error})"

    def reached_by(self, kind: str) -> Reached:
        """Of what was not measured: as by the nearest that was."""
        if (own := self.reached.get(kind)) is not None:
            return own
        products = self.reached[PRODUCT]
        if kind == ELEMENTWISE:
            return products._replace(constant=_ELEMENTWISE_SECONDS)
        return self.reached.get(_NEAREST.get(kind, PRODUCT), products)


def _flops(half: float, single: float, quarter: float = 0) -> dict[str, float]:
    """quarter: of 8 bits with an exponent, where a device multiplies them."""
    own = {"bfloat16": half * TERA, "float16": half * TERA, "float32": single * TERA}
    return own | ({FP8: quarter * TERA} if quarter else {})


def _all_reduce(error: float, source: str, **by_count: tuple[float, float]) -> Link:
    """us and GB/s by "of2", "of4", "of8"."""
    own = {int(name[2:]): (latency * 1e-6, rate * GB) for name, (latency, rate) in by_count.items()}
    return Link(own, error, f"all-reduces of vLLM on {source}, captured, in ai-dynamo/aiconfigurator 095f58a")


def _ring(one_way: float) -> Link:
    """What a ring moves at four fifths of a link's rate, each device to the next (Patarasuk and Yuan, 2009)."""
    latencies = {2: 10e-6, 4: 15e-6, 8: 25e-6}
    own = {n: (latency, 0.8 * one_way * n / (2 * (n - 1))) for n, latency in latencies.items()}
    return Link(own, None, "assumed: a ring at 80 % of the link")


_NVLINK_3 = _all_reduce(0.124, "A100", of2=(5.02, 92.7), of4=(5.45, 62.5), of8=(6.29, 57.0))
_NVLINK_4 = _all_reduce(0.107, "H100", of2=(4.28, 132.3), of4=(4.73, 103.0), of8=(5.21, 99.3))
_NVLINK_4_H200 = _all_reduce(0.096, "H200", of2=(4.45, 134.6), of4=(4.72, 105.9), of8=(5.06, 105.5))
_NVLINK_5 = _all_reduce(0.144, "B200", of2=(6.99, 245.1), of4=(7.18, 193.0), of8=(8.05, 160.9))

_ASSUMED = "assumed"


def _with_a100s(own: Mapping[str, Reached]) -> dict[str, Reached]:
    """Kinds that were not measured as on the A100, whose kernels (FlashAttention 2, Triton) such GPUs run too."""
    return _unmeasured(FITTED["a100-80"]) | dict(own)


def _unmeasured(like: Mapping[str, Reached]) -> dict[str, Reached]:
    return {kind: reached._replace(error=None, error_90=None) for kind, reached in like.items()}


_AMPERE_SHEET = "NVIDIA A100 data sheet, SXM4"
_CPU = {PRODUCT: Reached(0.6, 0.8, 0.0, None, None), ELEMENTWISE: Reached(0.6, 0.8, 0.0, None, None)}

DEVICES: dict[str, Device] = {
    "a100-40": Device(
        "NVIDIA A100 SXM4 40 GB",
        40 * GIB,
        1.555e12,
        _flops(312, 19.5),
        PCIE_4,
        FITTED["a100-80"],
        f"A100-SXM4-80GB, {AICONFIGURATOR}",
        f"{_AMPERE_SHEET}, 40 GB",
        _NVLINK_3,
    ),
    "a100-80": Device(
        "NVIDIA A100 SXM4 80 GB",
        80 * GIB,
        2.039e12,
        _flops(312, 19.5),
        PCIE_4,
        FITTED["a100-80"],
        f"A100-SXM4-80GB, {AICONFIGURATOR}",
        f"{_AMPERE_SHEET}, 80 GB",
        _NVLINK_3,
    ),
    "h100": Device(
        "NVIDIA H100 SXM5 80 GB",
        80 * GIB,
        3.35e12,
        _flops(989, 67, 1979),
        PCIE_5,
        FITTED["h100"],
        f"H100 80GB HBM3, {AICONFIGURATOR}",
        "NVIDIA H100 data sheet, SXM",
        _NVLINK_4,
    ),
    "h200": Device(
        "NVIDIA H200 SXM 141 GB",
        141 * GIB,
        4.8e12,
        _flops(989, 67, 1979),
        PCIE_5,
        FITTED["h200"],
        f"H200, {AICONFIGURATOR}",
        "NVIDIA H200 data sheet, SXM",
        _NVLINK_4_H200,
    ),
    "b200": Device(
        "NVIDIA B200 SXM 180 GB",
        180 * GIB,
        7.7e12,
        _flops(2250, 75, 4500),
        PCIE_5,
        FITTED["b200"],
        f"B200, {AICONFIGURATOR}",
        "NVIDIA HGX B200 data sheet",
        _NVLINK_5,
    ),
    "b300": Device(
        "NVIDIA B300 SXM 288 GB",
        288 * GIB,
        8e12,
        _flops(2250, 75, 4500),
        PCIE_5,
        _unmeasured(FITTED["b200"]),
        "as the B200, which is of its generation",
        "NVIDIA HGX B300 data sheet",
        replace(_NVLINK_5, error=None, source="as the B200's: " + _NVLINK_5.source),
    ),
    "l40s": Device(
        "NVIDIA L40S 48 GB",
        48 * GIB,
        0.864e12,
        _flops(362, 91.6, 733),
        PCIE_4,
        _with_a100s(_unmeasured(FITTED["rtx-4090"])),
        "as the RTX 4090, which is of its generation",
        "NVIDIA L40S data sheet",
        _ring(PCIE_4),
    ),
    "rtx-4090": Device(
        "NVIDIA GeForce RTX 4090 24 GB",
        25_250_627_584,
        1.008e12,
        _flops(165.2, 82.6, 330.3),
        PCIE_4,
        _with_a100s(FITTED["rtx-4090"]),
        f"RTX 4090, {LLMSERVINGSIM}",
        "NVIDIA Ada GPU architecture white paper, bfloat16 with sums in float32",
        _ring(PCIE_4),
    ),
    "rtx-pro-6000": Device(
        "NVIDIA RTX PRO 6000 Blackwell 96 GB",
        96 * GIB,
        1.792e12,
        _flops(503.8, 125, 1007.6),
        PCIE_5,
        _with_a100s(FITTED["rtx-pro-6000"]),
        f"RTX PRO 6000, {LLMSERVINGSIM}",
        "NVIDIA RTX PRO 6000 Blackwell data sheet",
        _ring(PCIE_5),
    ),
    "mi300x": Device(
        "AMD Instinct MI300X 192 GB",
        192 * GIB,
        5.3e12,
        _flops(1307.4, 163.4, 2614.9),
        PCIE_5,
        _with_a100s({PRODUCT: Reached(0.6, 0.7, 5e-6, None, None)}),
        _ASSUMED,
        "AMD Instinct MI300X data sheet",
        _ring(448 * GB),
    ),
    "xeon-8480": Device(
        "Intel Xeon Platinum 8480+, 56 cores, 8 channels",
        512 * GIB,
        8 * 38.4 * GB,  # DDR5-4800
        _flops(229, 7.2),  # AMX 2048 and AVX-512 64 operations a cycle and core, at its base of 2.0 GHz
        8 * 38.4 * GB,
        _CPU,
        _ASSUMED,
        "Intel ARK; memory: 8 modules of 64 GiB",
        is_cpu=True,
    ),
    "epyc-9654": Device(
        "AMD EPYC 9654, 96 cores, 12 channels",
        768 * GIB,
        12 * 38.4 * GB,
        _flops(14.7, 7.4),  # 64 and 32 operations a cycle and core, at its base of 2.4 GHz
        12 * 38.4 * GB,
        _CPU,
        _ASSUMED,
        "AMD EPYC 9654 product page; memory: 12 modules of 64 GiB",
        is_cpu=True,
    ),
}

DEFAULT_DEVICE = "h100"
COUNTS = (1, 2, 4, 8)  # that are proposed


_ASKED = re.compile(
    r"(?:(?P<stages>\d+)x(?=\d+x))?(?:(?P<count>\d+)x)?(?P<name>[^:+]+)(?P<ep>\+ep)?(?:\+dcp(?P<dcp>\d+))?"
    r"(?P<dp>\+dp)?(?::(?P<split>\d+(?:,\d+)*))?"
)


def find_device(asked: str) -> Device:
    """By name; or as "4xh100", several that share each layer; or as "2x4xh100", two stages of such a pipeline, and
    "2x4xh100:41,39" with so many layers each; "8xh100+ep" spreads a mixture's experts, and "8xh100+dcp2" the tokens of
    K and V that two devices would have alike; "8xh100+dp" has data-parallel ranks that share the experts alone. Raises
    ConfigError."""
    parts = _ASKED.fullmatch(asked)
    name = parts["name"] if parts else asked
    if parts is None or name not in DEVICES:
        hint = did_you_mean(name, list(DEVICES))
        raise ConfigError(
            f'executor.device: no device "{name}".{hint} Devices: {", ".join(DEVICES)}; several: 4xh100, 2x4xh100'
        )
    count, num_stages = int(parts["count"] or 1), int(parts["stages"] or 1)
    split = tuple(map(int, parts["split"].split(","))) if parts["split"] else ()
    most = most_of(DEVICES[name])
    if not 1 <= count <= most:
        raise ConfigError(f"executor.device={asked}: 1 to {most} of {name} can share a model here")
    if num_stages < 1 or (split and len(split) != num_stages):
        raise ConfigError(f"executor.device={asked}: {num_stages} stages, and layers of {len(split)} of them are named")
    if num_stages > 1 and DEVICES[name].link is None:
        raise ConfigError(f"executor.device={asked}: what {name} sends to another is not modelled")
    if parts["ep"] and count == 1:
        raise ConfigError(f"executor.device={asked}: +ep spreads experts over the devices of a layer, and here is one")
    num_contexts = int(parts["dcp"] or 1)
    if num_contexts < 1 or count % num_contexts:
        raise ConfigError(f"executor.device={asked}: {num_contexts} parts of a context cannot lie on {count} devices")
    if parts["dp"] and count == 1:
        raise ConfigError(f"executor.device={asked}: +dp makes a rank of each of several devices, and here is one")
    if parts["dp"] and (num_stages > 1 or parts["ep"] or parts["dcp"]):
        raise ConfigError(f"executor.device={asked}: +dp spreads experts, and goes with no +ep, +dcp or stages")
    ways = {"spreads_experts": bool(parts["ep"]), "num_contexts": num_contexts, "has_ranks": bool(parts["dp"])}
    return replace(several(DEVICES[name], count, num_stages, split), **ways)


def several(device: Device, count: int, num_stages: int = 1, split: tuple[int, ...] = ()) -> Device:
    each = device.what if count == 1 else f"{count} x {device.what}"
    what = each if num_stages == 1 else f"{num_stages} stages of {each}"
    return replace(device, count=count, num_stages=num_stages, split=split, what=what)


def most_of(device: Device) -> int:
    return 1 if device.link is None else device.link.most


def find_larger(than: Device, holds: Callable[[Device], bool]) -> str | None:
    """The fewest of the same device that would do, else the least memory of any GPU; a name for find_device."""
    same = [name for name, one in DEVICES.items() if one.source == than.source and one.memory == than.memory]
    others = sorted((name for name, one in DEVICES.items() if not one.is_cpu), key=lambda name: DEVICES[name].memory)
    counted = [(name, count) for name in same for count in COUNTS if count > than.count]
    counted += [(name, count) for count in COUNTS for name in others]
    for name, count in counted:
        if count <= most_of(DEVICES[name]) and holds(several(DEVICES[name], count)):
            return name if count == 1 else f"{count}x{name}"
    return None
