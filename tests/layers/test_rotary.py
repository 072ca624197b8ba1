"""Rule: every kind of rotary embedding has the frequencies of transformers, and its rotation is the textbook one."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from minivllm.layers.rotary import FREQUENCIES, MRotaryEmbedding, RotaryEmbedding
from minivllm.models import read_spec
from minivllm.models.spec import RopeSpec

ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    "yarn, all fields": {
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
}


@pytest.mark.parametrize("name", ROPES)
def test_cos_and_sin_equal_those_of_transformers(name):
    parameters = {"rope_type": name.split(",")[0], "rope_theta": 50_000.0, **ROPES[name]}
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=2048,
        rope_parameters=parameters,
        architectures=["LlamaForCausalLM"],
    )
    spec = read_spec(config.to_dict())
    positions = torch.arange(2048)
    q, k = torch.randn(2048, 2, 64), torch.randn(2048, 1, 64)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    expected = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    rotate = RotaryEmbedding(spec.rope, 64, spec.max_position, torch.float32)(positions)
    # Frequencies may differ by one fp32 step, 2^-24, which a position of 2047 multiplies: 1.2e-4 radians.
    torch.testing.assert_close(rotate(q), expected[0][0], rtol=0, atol=1e-3)
    torch.testing.assert_close(rotate(k), expected[1][0], rtol=0, atol=1e-3)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("sections", [(8, 12, 12), (16, 8, 8), (4, 4, 4, 6, 7, 7)])
def test_three_positions_a_token_turn_as_in_transformers(family, sections):
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}[family]
    config_module = import_module(f"transformers.models.{family}.configuration_{family}")
    config = getattr(config_module, f"{name}TextConfig")(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0, "mrope_section": list(sections)},
    )
    positions = torch.randint(512, (3, 40))
    q, k = torch.randn(40, 2, 64), torch.randn(40, 1, 64)
    cos, sin = getattr(module, f"{name}RotaryEmbedding")(config)(q, positions[:, None])
    expected = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    rotate = MRotaryEmbedding(RopeSpec(theta=50_000.0), 64, 512, torch.float32, sections)(positions)
    torch.testing.assert_close(rotate(q), expected[0][0], rtol=0, atol=1e-3)  # as above
    torch.testing.assert_close(rotate(k), expected[1][0], rtol=0, atol=1e-3)


def test_three_equal_positions_are_one():
    of_one = RotaryEmbedding(RopeSpec(), 16, 64, torch.float32)
    of_three = MRotaryEmbedding(RopeSpec(), 16, 64, torch.float32, (2, 3, 3))
    positions = torch.randperm(64)
    for found in (of_three(positions), of_three(positions.expand(3, -1))):
        assert all(map(torch.equal, found, of_one(positions)))


def test_position_zero_is_untouched_and_lengths_are_kept():
    rotary = RotaryEmbedding(RopeSpec(), 16, 64, torch.float32)
    x = torch.randn(64, 3, 16)
    y = rotary(torch.arange(64))(x)
    assert torch.equal(y[0], x[0])
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))


def test_scores_depend_on_the_distance_alone():
    rotary = RotaryEmbedding(RopeSpec(), 16, 64, torch.float32)
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(at_q, at_k):
        return float((rotary(torch.tensor([at_q]))(q) * rotary(torch.tensor([at_k]))(k)).sum())

    assert score(9, 4) == pytest.approx(score(45, 40), abs=1e-4)


def test_rows_are_taken_by_position_in_any_order():
    rotary = RotaryEmbedding(RopeSpec(), 16, 64, torch.float32)
    x = torch.randn(1, 2, 16)
    rows = rotary(torch.tensor([7, 0, 7]))(x.expand(3, 2, 16))
    assert torch.equal(rows[0], rows[2])
    assert not torch.allclose(rows[0], rows[1])


@pytest.mark.parametrize("kind", [kind for kind in FREQUENCIES if kind != "longrope"])  # whose factors say so
def test_only_position_interpolation_slows_the_fastest_pair(kind):
    fastest = float(FREQUENCIES[kind](RopeSpec(kind, 10_000.0, 2.0, 4096), 64).per_pair[0])
    assert fastest == (0.5 if kind == "linear" else 1.0)
