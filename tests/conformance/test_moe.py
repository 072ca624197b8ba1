"""Every pair of options that reach a model's layers, on a mixture of experts: equal greedy and equal sampled tokens."""

from __future__ import annotations

import pytest
from conformance.cover import all_pairs, label
from conformance.test_tiny_model import AXES, NOTHING_PACKED, assert_equal, generate, skip_without_compiler, wanted_of

from minivllm.features import CONFLICTS

NAMES = ("forward", "compile", "graphs", "quantization", "activation_bits")
LAYERS = [axis for axis in AXES if axis.name in NAMES]
MODEL = {"model.path": "dummy:tiny-moe"}
CHUNKED = {"scheduler.max_num_batched_tokens": 24, "kv.num_blocks": 40}


@pytest.mark.parametrize("config", all_pairs(LAYERS, CONFLICTS + NOTHING_PACKED), ids=label)
def test_every_pair_of_options_gives_the_same_tokens(config):
    skip_without_compiler(config)
    is_auto = config["model.quantization"] == "auto"
    plain = {"runner.attention": "auto"} | config | ({"model.quantization": "none"} if is_auto else {})
    assert_equal(generate(MODEL | config), wanted_of(plain, MODEL | CHUNKED), config)
