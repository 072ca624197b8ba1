"""NVIDIA's ModelOpt, as its export to Hugging Face's folders writes it: FP8 by matrix, and NVFP4.

    FP8    weight float8_e4m3fn [n_out, n_in], weight_scale float32
    NVFP4  weight uint8 [n_out, n_in / 2], weight_scale float8_e4m3fn [n_out, n_in / 16], weight_scale_2 float32

All scales multiply (compressed-tensors' global scale divides). `ignore` has names with wildcards; of "MIXED_PRECISION",
`quantized_layers` has each module's own `quant_algo`. Activations are not rounded: an input_scale is read and left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minivllm.patterns import patterns, wildcards
from minivllm.quantization.base import Scheme
from minivllm.quantization.floats import FP8, NV, NVFP4, beside
from minivllm.quantization.modules import ByModule, Rule, Settings

NAME = "ModelOpt (activations are not rounded)"
ONE: tuple[int, ...] = ()
FOUR_BITS = ("NVFP4", "W4A16_NVFP4")


def from_config(config: Mapping[str, Any], where: str) -> ByModule:
    settings = Settings(config, where, "ModelOpt")
    settings.only("kv_cache_scheme", None)
    settings.only("kv_cache_quant_algo", None)
    listed = settings.texts("ignore") + settings.texts("exclude_modules")
    names, below = patterns(map(wildcards, listed)), tuple(f"{name}." for name in listed)
    left = Rule(lambda module: module.startswith(below) or any(name.matches(module) for name in names), None)
    if config.get("quant_algo") != "MIXED_PRECISION":
        return ByModule(NAME, [left], _scheme(settings))
    schemes = {name: _scheme(Settings(own, where, "ModelOpt")) for name, own in config["quantized_layers"].items()}
    return ByModule(NAME, [left, *(Rule(name.__eq__, scheme) for name, scheme in schemes.items())], None)


def _scheme(settings: Settings) -> Scheme:
    algorithm, others = settings.only("quant_algo", "FP8", *FOUR_BITS), beside("input_scale", shape=ONE)
    if "quant_algo" not in settings.given:
        raise settings.unsupported("no quant_algo")
    if algorithm == "FP8":
        return FP8("weight_scale", scale_shape=ONE, others=others)
    settings.only("group_size", NV, None)
    return NVFP4("weight", "weight_scale_2", ONE, divides=False, others=others)
