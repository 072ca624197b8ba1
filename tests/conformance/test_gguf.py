"""Every pair of options that reach a model's layers, on a GGUF file whose blocks are multiplied as they are stored."""

from __future__ import annotations

import pytest
from conformance.cover import all_pairs, label
from conformance.test_tiny_model import AXES, assert_equal, generate, skip_without_compiler, wanted_of
from gguf import GGMLQuantizationType as Type
from loading.gguf_fixture import WIDE, write_gguf

NAMES = ("forward", "compile", "graphs", "quantization", "dense_copy", "activation_bits", "inputs")
LAYERS = [axis for axis in AXES if axis.name in NAMES]
KINDS = {"ffn_down": Type.Q6_K, "ffn_gate": Type.Q8_0, "ffn_up": Type.Q4_1, "attn_v": Type.Q5_0}
CHUNKED = {"scheduler.max_num_batched_tokens": 24, "kv.num_blocks": 40}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Of several kinds of blocks, in fp32: without bits weights are de-quantised and nothing is rounded."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, "qwen3", lambda name: KINDS.get(name.split(".")[-2], Type.Q4_K), decode=False, **WIDE)
    return {"model.path": str(path)}


@pytest.mark.parametrize("config", all_pairs(LAYERS), ids=label)
def test_every_pair_of_options_gives_the_same_tokens(config, model):
    skip_without_compiler(config)
    is_exact = config["model.quantization"] == config["quantization.activation_bits"] == "auto"
    plain = {"runner.attention": "auto"} | config | ({"model.quantization": "none"} if is_exact else {})
    assert_equal(generate(model | config), wanted_of(plain, model | CHUNKED), config)


def test_eight_bits_give_other_tokens(model):
    """Else the comparisons above would compare nothing."""
    skip_without_compiler(config := {"runner.attention": "cpu", "runner.forward": "eager"})
    eight, sixteen = (wanted_of(config | {"quantization.activation_bits": bits}, model) for bits in (8, 16))
    assert sum(a != b for a, b in zip(eight, sixteen, strict=True)) > 2
