"""Rules: Qwen 3.5's text model, whose layers of linear attention keep recurrent states, computes what transformers
does (in an engine: test_hybrid.py); what has no place over ranks is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from models.pairs import (
    FP32_TOLERANCE,
    SMALL,
    check_in_bf16,
    check_in_fp32,
    oracle_logits,
    random_tokens,
    save_oracle,
)
from naive_attention import logits_of
from parallel.devices import Device, check_ranks
from parallel.threads import all_ranks
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_5 import Qwen3_5TextConfig, modeling_qwen3_5

from minivllm.errors import ModelError
from minivllm.kv_groups import StateSpec
from minivllm.loading import load_model
from minivllm.loading.dummy import dummy_spec, write_tokenizer
from minivllm.models import read_spec
from minivllm.parallel.placement import Placement

CPU = torch.device("cpu")
LINEAR, FULL = "linear_attention", "full_attention"
SHAPE = SMALL | {"num_hidden_layers": 4, "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 24}
SHAPE |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
CONFIGS = {
    "as published": Qwen3_5TextConfig(**SHAPE),  # the fourth layer is attention
    "odd": Qwen3_5TextConfig(
        **SHAPE | {"num_hidden_layers": 5, "linear_num_key_heads": 3, "linear_num_value_heads": 3},
        linear_conv_kernel_dim=2,
        tie_word_embeddings=True,
        attention_bias=True,
        layer_types=[FULL, LINEAR, LINEAR, FULL, LINEAR],
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ),
}


@contextmanager
def one_by_one() -> Iterator[None]:
    """transformers takes token by token: its products of chunks subtract sums of logarithms in float32, and err by
    3e-4 here."""
    with pytest.MonkeyPatch.context() as patch:
        rule = modeling_qwen3_5.torch_recurrent_gated_delta_rule
        patch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", rule)
        yield


@pytest.fixture(scope="module")
def oracles(tmp_path_factory) -> Iterator[dict[str, tuple[str, Any]]]:
    folders = {name: tmp_path_factory.mktemp(name.replace(" ", "_")) for name in CONFIGS}
    with one_by_one():
        yield {name: (str(folder), save_oracle(CONFIGS[name], folder)) for name, folder in folders.items()}


@pytest.fixture(params=CONFIGS)
def pair(request, oracles) -> tuple[str, Any]:
    """(folder, transformers' model in fp32)."""
    return oracles[request.param]


def test_logits_and_greedy_tokens_in_fp32_equal_transformers(pair):
    check_in_fp32(*pair)


def test_logits_in_bf16_are_as_near_to_fp32_as_those_of_transformers(pair):
    check_in_bf16(*pair)


# ---------------------------------------------------------------- over ranks


@pytest.mark.parametrize("placement", [Placement(pp=2, stages=(3, 2)), Placement(pp=2, stages=(2, 3))], ids=str)
def test_ranks_give_the_logits_of_one_device_and_of_transformers(placement, oracles):
    check_ranks(placement, *oracles["odd"])


@pytest.mark.parametrize(
    ("placement", "message"),
    [(Placement(tp=2), "tp must be 1"), (Placement(pp=2), "each stage must have a layer of attention")],
    ids=str,
)
def test_what_has_no_place_over_ranks_is_refused(placement, message, oracles):
    with pytest.raises(ModelError, match=message):
        Device(oracles["as published"][0], all_ranks(placement)[0])


# ---------------------------------------------------------------- files


def test_of_a_model_that_sees_the_text_decoder_is_read(oracles, tmp_path):
    """Qwen's own files: names below model.language_model, beside them what it sees with and what guesses tokens."""
    folder, oracle = oracles["as published"]
    tensors = load_file(Path(folder) / "model.safetensors")
    whole = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    for name in ("model.visual.patch_embed.proj.weight", "mtp.layers.0.input_layernorm.weight"):
        whole[name] = torch.zeros(3)
    save_file(whole, tmp_path / "model.safetensors")
    text = json.loads((Path(folder) / "config.json").read_text())
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vision_config": {}, "tie_word_embeddings": False}))
    write_tokenizer(tmp_path, SHAPE["vocab_size"])
    ids = random_tokens(length=20)
    found = logits_of(load_model(str(tmp_path), torch.float32, CPU).model, ids)
    torch.testing.assert_close(found, oracle_logits(oracle, ids), rtol=0, atol=FP32_TOLERANCE)


# ---------------------------------------------------------------- configs

BASE = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 64, "vocab_size": 100}
BASE |= {"num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 128}


def test_what_a_config_leaves_out_is_what_transformers_takes():
    assert read_spec(BASE) == read_spec(BASE | Qwen3_5TextConfig(**BASE).to_dict())
    assert read_spec(BASE).linear == (True, True, True, False) * 2
    assert read_spec(BASE | {"full_attention_interval": 2}).linear == (True, False) * 4
    assert read_spec(BASE).state == StateSpec(16, 32, 128, 128, 4, "gated_delta") and read_spec(BASE).rotary_size == 64
    assert read_spec(BASE | {"architectures": None}) == read_spec(BASE)


def test_qwens_smallest_has_as_many_parameters_as_its_name_says():
    """0.75 billion in the text decoder; what it sees with has the rest."""
    assert dummy_spec("qwen3.5-0.8b").num_parameters == pytest.approx(0.75e9, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, 'hidden_act "gelu" is not supported'),
        ({"layer_types": ["linear_attention"]}, "layer_types must name linear_attention or full_attention for 8"),
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types must name"),
        ({"layer_types": ["linear_attention"] * 8}, "a model of states alone is not supported"),
        ({"linear_num_key_heads": 3}, "32 value heads cannot share 3 key heads"),
        ({"linear_conv_kernel_dim": 0}, '"linear_conv_kernel_dim" must be a positive int'),
        ({"architectures": ["Qwen3_5ForConditionalGeneration"]}, "text_config is missing"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        read_spec(BASE | changes)
