"""An attention backend that norms and rotates by itself (`rope_and_attend`) is called by whatever runs the forward, and
gives the tokens of the model as it is written. Here the reference stands in for Triton's: tests/kernels."""

from __future__ import annotations

import pytest
from conformance.test_tiny_model import SMALL

from minivllm import LLM, SamplingParams
from minivllm.attention.reference import ReferenceAttention
from minivllm.kernels.dispatch import Dispatch
from minivllm.kernels.reference import rms_norm, rotate

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [11] * 20, [12, 13]]


def tokens(**options) -> list[list[int]]:
    config = {"runner.attention": "reference", "scheduler.max_num_seqs": 3, "scheduler.max_num_batched_tokens": 16}
    with LLM(overrides={**SMALL, **config, "debug.check": True, **options}) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=9)
        return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def wanted():
    return tokens(**{"runner.forward": "eager"})


@pytest.fixture
def calls(monkeypatch, wanted) -> dict[str, int]:
    """Of rope_and_attend and of forward by anybody but it."""
    counted = {"rope": 0, "apart": 0}
    inner = ReferenceAttention.forward

    def rope_and_attend(self, qkv, rope, kv, meta, layer, out):
        counted["rope"] += 1
        q, k, v = qkv.split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], 1)
        cos, sin = (table[rope.positions][:, None] for table in (rope.cos, rope.sin))
        q, k = (rms_norm(x, w, rope.eps, q.dtype) for x, w in zip((q, k), rope.weight, strict=True))
        inner(self, rotate(q, cos, sin), rotate(k, cos, sin), v, kv, meta, layer, out)

    def forward(self, *args):
        counted["apart"] += 1
        inner(self, *args)

    monkeypatch.setattr(ReferenceAttention, "rope_and_attend", rope_and_attend, raising=False)
    monkeypatch.setattr(ReferenceAttention, "forward", forward)
    monkeypatch.setattr(ReferenceAttention, "graphs", "decode", raising=False)
    monkeypatch.setattr(Dispatch, "uses", lambda self, name, proof: name == "rope + norm + cache write")
    return counted


@pytest.mark.parametrize("forward", ["eager", "piecewise"])
@pytest.mark.parametrize("graphs", ["none", "piecewise", "full", "full+piecewise"])
def test_every_way_to_call_the_forward(forward, graphs, wanted, calls):
    assert tokens(**{"runner.forward": forward, "runner.graphs": graphs}) == wanted
    assert calls["rope"] >= 9 and not calls["apart"]


def test_the_first_layers_guess_by_it_too(wanted, calls):
    options = {"spec_decode.method": "self_draft", "spec_decode.layers": 1, "runner.forward": "eager"}
    assert tokens(**options) == wanted
    assert calls["rope"] >= 9 and not calls["apart"]
