"""What runner.attention=auto asks of Triton's attention before it takes it, here of the interpreter: the kernels hold,
and each way to be wrong is seen. Run by test_interpreter.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention.batches import CPU, spec
from tolerances import ATTENTION

from minivllm import LLM
from minivllm.attention import select
from minivllm.attention import triton as backend
from minivllm.attention.base import KVSpec
from minivllm.attention.triton import TritonAttention
from minivllm.engine.build import worker
from minivllm.kernels.dispatch import Dispatch
from minivllm.kernels.triton import elementwise, paged
from minivllm.kernels.triton.interpreted import INTERPRETED
from minivllm.loading.dummy import SHAPES
from minivllm.runner import attention_proof
from minivllm.runner.attention_proof import gives_the_references_answer

assert INTERPRETED
LAYER = spec(2, 1, 16)


def holds(*layers, dtype=torch.float32, kv_dtype=None, block_size=16) -> bool:
    first = layers[0]
    cache = KVSpec(7, first.num_kv_heads, first.head_size, block_size, kv_dtype or dtype, beside=99)
    return gives_the_references_answer(TritonAttention, layers, cache, dtype, CPU)


def test_it_asks_for_what_the_tests_ask_for():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert attention_proof.tolerance(dtype) == ATTENTION[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_kernels_give_the_references_answer(dtype):
    assert holds(LAYER, dtype=dtype)


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_over_codes(codes):
    assert holds(LAYER, kv_dtype=codes, block_size=20)


def test_layers_that_differ_are_all_tried(monkeypatch):
    """Gemma's: windows and none, soft caps; each shape once."""
    seen, inner = [], attention_proof._agrees
    monkeypatch.setattr(attention_proof, "_agrees", lambda *args: seen.append(args[1]) or inner(*args))
    layers = spec(2, 1, 16, window=70, soft_cap=3.0), LAYER
    assert holds(*layers * 2) and seen == list(layers)


def test_decodes_are_computed_whole_and_in_splits(monkeypatch):
    splits, inner = set(), paged.decode

    def counted(*args):
        splits.add(args[8])
        inner(*args)

    monkeypatch.setattr(paged, "decode", counted)
    assert holds(LAYER) and 1 in splits and max(splits) > 1


def without_the_last_tile(kernel):
    def short(q, keys, values, requests, *rest):
        kernel(q, keys, values, requests._replace(seq_lens=(requests.seq_lens - 1).clamp(min=1)), *rest)

    return short


def in_another_order(kernel):
    def shuffled(q, keys, values, requests, *rest):
        kernel(q, keys, values, requests._replace(tables=requests.tables.flip(1).contiguous()), *rest)

    return shuffled


def with_one_split(kernel):
    """Reads what only the first of several wrote."""

    def half(*args):
        if args[8] > 1:
            args[5].zero_()
        else:
            kernel(*args)

    return half


@pytest.mark.parametrize(
    "name, broken",
    [
        ("decode", without_the_last_tile),
        ("prefill", without_the_last_tile),
        ("prefill", in_another_order),
        ("decode", with_one_split),
    ],
)
def test_a_kernel_that_is_wrong_is_seen(name, broken, monkeypatch):
    monkeypatch.setattr(paged, name, broken(getattr(paged, name)))
    assert not holds(LAYER)


def test_a_window_and_a_cap_that_are_ignored_are_seen(monkeypatch):
    inner = backend._head
    for forgotten in ({"sliding_window": None}, {"soft_cap": None}):
        monkeypatch.setattr(backend, "_head", lambda kind, layer, less=forgotten: inner(kind, replace(layer, **less)))
        assert not holds(spec(2, 1, 16, window=40, soft_cap=2.0))


def test_a_write_that_is_wrong_is_seen(monkeypatch):
    inner = elementwise.write
    monkeypatch.setattr(elementwise, "write", lambda k, v, *rest: inner(k, v.roll(1, 0), *rest))
    assert not holds(LAYER)


def test_what_a_compiler_says_is_the_reason(monkeypatch):
    def refuse(*args):
        raise RuntimeError("out of resource: shared memory\nand more")

    monkeypatch.setattr(paged, "prefill", refuse)
    kernels = Dispatch("triton", CPU)
    kernels._proves = True  # as auto does on a GPU
    verdict = kernels.verdict(("decode attention", "prefill attention"), lambda device: holds(LAYER))
    assert verdict == (False, "RuntimeError: out of resource: shared memory")


@pytest.fixture
def decisions(monkeypatch):
    """Of an engine that prefers and proves as on a GPU."""

    class Proving(Dispatch):
        def __init__(self, *args):
            super().__init__(*args)
            self._proves = True

    monkeypatch.setattr(worker, "Dispatch", Proving)
    monkeypatch.setattr(select, "PREFERENCES", {"cpu": select.PREFERENCES["cuda"]})

    def decide(**options):
        tiny = {"model.path": "dummy:tiny", "model.dtype": "float32", "kv.num_blocks": 20, "executor.num_threads": 1}
        with LLM(overrides=tiny | {"runner.forward": "eager"} | options) as llm:
            return {d.field: (str(d.value), d.reason) for d in llm.decisions}

    return decide


@pytest.mark.parametrize("kernels, chosen", [("triton", "triton"), ("torch", "sdpa")])
def test_auto_takes_what_has_proven_itself(kernels, chosen, decisions):
    found = decisions(**{"runner.kernels": kernels})
    value, reason = found["runner.attention"]
    assert value == chosen
    why = {
        "triton": "gave the answer of the reference on this device; pref",
        "torch": "triton off: runner.kernels=torch",
    }
    assert why[kernels] in reason
    assert ("decode attention, prefill attention, cache write" in found["runner.kernels"][1]) == (kernels == "triton")


@pytest.mark.parametrize("wrong, num_asked", [(16, 2), (32, 1)])
def test_the_layers_of_a_draft_model_must_hold_too(wrong, num_asked, decisions, monkeypatch):
    """Its heads have another size, and its cache another dtype. What is left reads int8 too."""
    seen = []

    def holds(kind, layers, cache, dtype, device):
        seen.append((layers[0].head_size, cache.head_size, cache.dtype))
        return cache.head_size != wrong

    monkeypatch.setitem(SHAPES, "tiny-draft", SHAPES["tiny"] | {"head_dim": 16})
    monkeypatch.setattr(worker, "gives_the_references_answer", holds)
    draft = {"spec_decode.method": "draft", "spec_decode.model": "dummy:tiny-draft", "kv.dtype": "int8"}
    value, reason = decisions(**draft, **{"runner.kernels": "triton"})["runner.attention"]
    assert value == "reference" and "triton off: it differs from the reference" in reason
    assert seen == [(32, 32, torch.int8), (16, 16, torch.float32)][:num_asked]
