"""AutoRound (Cheng et al. 2023), as auto-round writes it: GPTQ's tensors or AWQ's, with settings layer by layer.

`packing_format` says whose tensors they are: "auto_round" (and ":gptqmodel") those of GPTQ's version 2, whose zero
points are stored as they are; ":auto_gptq" those of version 1; ":auto_awq" AWQ's. `extra_config` has other settings for
some modules, by their names or by patterns; 16 bits are a plain weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from minivllm.patterns import patterns
from minivllm.quantization import awq, gptq
from minivllm.quantization.base import Scheme
from minivllm.quantization.modules import ByModule, Rule, Settings

NAME = "AutoRound"
GPTQ_ADDED = {"auto_round": 0, "auto_round:gptqmodel": 0, "auto_round:auto_gptq": 1, "auto_round:gptq": 1}
AWQ_LIKE = ("auto_round:auto_awq", "auto_round:awq")
PLAIN_BITS = (16, 32)
META = re.compile(r"[*^$|()\[\]?+]")


def from_config(config: Mapping[str, Any], where: str) -> ByModule:
    settings = Settings(config, where, NAME)
    settings.only("rotation_config", None)
    extra = dict(config.get("extra_config") or {})
    schemes = {key: _scheme(Settings({**config, **extra[key]}, where, NAME)) for key in extra}
    listed = [key for key in extra if META.search(key)]
    rules = [Rule(key.__eq__, schemes[key]) for key in extra if key not in listed]  # a name before a pattern
    found = patterns(listed, may_follow_anything=True)
    rules += [Rule(names.begins, schemes[key]) for key, names in zip(listed, found, strict=True)]
    blocks = _blocks(config.get("block_name_to_quantize"))
    return ByModule(NAME, [*rules, Rule(lambda module: not module.startswith(blocks), None)], _scheme(settings))


def _blocks(given: Any) -> tuple[str, ...]:
    names = given.split(",") if isinstance(given, str) else list(given or ["model.layers"])
    return tuple(f"{name.strip().rstrip('.')}." for name in names)


def _scheme(settings: Settings) -> Scheme | None:
    if settings.given.get("bits") in PLAIN_BITS:
        return None
    settings.only("data_type", "int")
    settings.only("act_bits", None, *PLAIN_BITS)
    packing = settings.only("packing_format", *GPTQ_ADDED, *AWQ_LIKE)
    symmetric, size = settings.only("sym", True, False), settings.group_size(128)
    if packing in AWQ_LIKE:
        settings.only("bits", awq.BITS)
        return awq.AlongOutputs(size, symmetric)
    return gptq.AlongInputs(settings.only("bits", *gptq.BITS), size, symmetric, GPTQ_ADDED[packing])
