"""FP8 as DeepSeek V3 is published in it, and transformers writes it: e4m3, with a scale for 128 x 128 weights.

    weight            float8_e4m3fn [n_out, n_in]
    weight_scale_inv  [n_out / 128, n_in / 128], rounded up: it multiplies, whatever its name says

`weight_block_size` has the block's sizes; null is one scale for a matrix, and where the field is missing the file is
AutoFP8's, whose scale is `weight_scale`. `scale_fmt` "ue8m0" are scales of 8 bits, powers of two. Activations are not
rounded: a server that rounds them to e4m3 too (`activation_scheme`) is further from the weights' own product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minivllm.quantization.floats import FP8, beside
from minivllm.quantization.modules import ByModule, Settings, head_unless, unconverted

NAME = "FP8 (activations are not rounded)"
ONE: tuple[int, ...] = ()  # the shape of a matrix's one scale


def from_config(config: Mapping[str, Any], where: str) -> ByModule:
    settings = Settings(config, where, "FP8")
    settings.only("activation_scheme", "dynamic", "static")
    settings.only("fmt", "e4m3")
    settings.only("scale_fmt", "float", "ue8m0", None)
    settings.only("expert_dtype", "fp8")
    settings.only("modules_to_convert", None)
    settings.only("dequantize", False, True)  # what is done anyway
    left = unconverted((*settings.texts("modules_to_not_convert"), *settings.texts("ignored_layers")))
    return ByModule(NAME, [left, *head_unless(False)], _scheme(settings))


def _scheme(settings: Settings) -> FP8:
    if "weight_block_size" not in settings.given:
        return FP8("weight_scale", scale_shape=ONE, others=beside("input_scale", shape=ONE))
    size, others = settings.given["weight_block_size"], beside("activation_scale", shape=ONE)
    if size is None:
        return FP8("weight_scale_inv", scale_shape=ONE, others=others)
    if not (isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        raise settings.unsupported(f"weight_block_size={size!r}")
    return FP8("weight_scale_inv", (size[0], size[1]), others=others)
