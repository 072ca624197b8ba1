"""MXFP4 as gpt-oss is published in it: experts alone, all of a layer in one tensor.

    mlp.experts.{gate_up_proj, down_proj}_blocks  uint8 [experts, n_out, n_in / 32, 16]
    mlp.experts.{gate_up_proj, down_proj}_scales  uint8 [experts, n_out, n_in / 32]

A byte of blocks is two e2m1, the first in the low nibble; a scale is an exponent, 127 too large. Outputs of gate_up are
gate's and up's in turns. A scheme is one matrix's, so whoever reads such a file hands the loader each expert's part as
{expert}.{projection}.blocks and .scales (`by_expert` makes these names); what it gives is [n_out, n_in], where
transformers has the transpose. In compressed-tensors the same numbers have other names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from minivllm.quantization.floats import MXFP4
from minivllm.quantization.modules import ByModule, Rule, Settings, unconverted

EXPERTS = ".experts."
PART = re.compile(r"(?P<experts>.*\.experts)\.(?P<projection>\w+_proj)_(?P<part>blocks|scales)")


def by_expert(tensors: Iterable[tuple[str, Any, Path]]) -> Iterator[tuple[str, Any, Path]]:
    """Tensors (torch's, or StoredTensor's) of all experts apart, under the names that the scheme declares."""
    for name, tensor, file in tensors:
        if found := PART.fullmatch(name):
            for e in range(tensor.shape[0]):
                yield f"{found['experts']}.{e}.{found['projection']}.{found['part']}", tensor.select(0, e), file
        else:
            yield name, tensor, file


def from_config(config: Mapping[str, Any], where: str) -> ByModule:
    settings = Settings(config, where, "MXFP4")
    settings.only("dequantize", False, True)  # to de-quantise is what is done anyway, where nothing multiplies it
    left = unconverted(settings.texts("modules_to_not_convert"))
    others = Rule(lambda module: EXPERTS not in module, None)
    return ByModule("MXFP4", [left, others], MXFP4("blocks", "scales", in_groups=True))
