"""How many bits a model's weights are kept in, from what is asked and what its config.json says of the checkpoint.

Embeddings and the LM head stay in the model's dtype. Weights in fewer bits are multiplied in that dtype, as by Marlin's
kernels (Frantar et al., 2024), but those in fp8 on a device that multiplies fp8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from minivllm.errors import ModelError

FP8 = "float8_e4m3fn"
PACKED = {"int8": 8.5 / 8, "int4": 5 / 8}  # bytes: for 32 weights a scale in 16 bits; with 4 bits a minimum too
MXFP4 = 4.25 / 8  # for 32 weights a scale in 8 bits


class WeightBytes(NamedTuple):
    linear: float  # of a weight of a linear layer
    expert: float  # of an expert's
    compute: str  # the dtype of products, one of Device.flops
    reason: str


def weight_bytes(config: Mapping[str, Any], asked: str, dtype: str, size: int, where: str) -> WeightBytes:
    """asked: model.quantization; dtype, size: of the model's numbers. Raises ModelError for what is not modelled."""
    if asked in PACKED:
        return WeightBytes(PACKED[asked], PACKED[asked], dtype, "rounded when loaded, with a scale for 32 weights")
    published = config.get("quantization_config") or {}
    if asked == "none" or not published:
        return WeightBytes(size, size, dtype, "as the model computes")
    match method := published.get("quant_method"):
        case "fp8":
            return WeightBytes(1, 1, FP8, "as published: fp8")
        case "mxfp4":
            return WeightBytes(size, MXFP4, dtype, "as published: experts in MXFP4")
        case "gptq" | "awq" if isinstance(published.get("bits"), int):
            each = published["bits"] / 8 + 2 / (published.get("group_size") or 128)
            return WeightBytes(each, each, dtype, f"as published: {method}, {published['bits']} bits")
    raise ModelError(f"{where}: weights as quantization_config has them (quant_method={method!r}) are not modelled yet")
