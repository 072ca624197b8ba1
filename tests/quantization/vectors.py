"""The cases of data/*.safetensors: what a format's library made of a matrix (make_vectors.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from torch import Tensor

from minivllm.quantization.base import Scheme, read_format

FOLDER = Path(__file__).parent / "data"
MADE_BY = {
    "hqq": "hqq 0.2.8.post1",
    "bitsandbytes": "bitsandbytes 0.50.2",
    "auto_round": "auto-round 0.16.1",
    "awq": "auto-round 0.16.1",
    "fp8": "transformers 5.23.0",
    "gptq": "auto-round 0.16.1",
    "mxfp4": "transformers 5.23.0",
    "modelopt": "nvidia-modelopt 0.47.0",
    "llm_compressor": "compressed-tensors 0.20.0",
}

MODULE = "model.layers.0.mlp.experts.0.up_proj"


class Case(NamedTuple):
    config: Mapping[str, Any]  # quantization_config
    scheme: Scheme
    held: Mapping[str, Tensor]
    expected: Tensor


@cache
def vectors(format: str) -> dict[str, Case]:
    with safe_open(FOLDER / f"{format}.safetensors", "pt") as file:
        configs, names = json.loads(file.metadata()["configs"]), list(file.keys())
        assert file.metadata()["made_by"] == MADE_BY[format]
        found = {case: {} for case in configs}
        for name in names:
            case, key = name.split("/")
            found[case][key] = file.get_tensor(name)
    return {
        case: Case(config, read_format({"quantization_config": config}).scheme_for(MODULE), *rest)
        for case, config in configs.items()
        for rest in [(found[case], found[case].pop("expected"))]
    }


def names() -> list[tuple[str, str]]:
    """(format, case), read out of the files' headers alone."""
    found = []
    for format in MADE_BY:
        with safe_open(FOLDER / f"{format}.safetensors", "pt") as file:
            found += [(format, case) for case in json.loads(file.metadata()["configs"])]
    return found
