"""Every pair of options that reach a model's layers, on a mixture of experts: equal greedy and equal sampled tokens."""

from __future__ import annotations

import functools

import pytest
from conformance.cover import all_pairs, label
from conformance.test_tiny_model import AXES, generate, skip_without_compiler

LAYERS = [axis for axis in AXES if axis.name in ("forward", "compile", "graphs", "quantization")]
MODEL = {"model.path": "dummy:tiny-moe"}


@functools.cache
def wanted_of(quantization: str) -> list[list[int]]:
    """Of the model as it is written, its prompts in small chunks."""
    plain = {"runner.forward": "eager", "runner.attention": "reference", "scheduler.max_num_batched_tokens": 24}
    return generate(MODEL | plain | {"model.quantization": quantization})


@pytest.mark.parametrize("config", all_pairs(LAYERS), ids=label)
def test_every_pair_of_options_gives_the_same_tokens(config):
    skip_without_compiler(config)
    quantization = config["model.quantization"]
    assert generate(MODEL | config) == wanted_of("none" if quantization == "auto" else quantization)
