"""An engine with runner.kernels=triton gives the tokens of one without, and each kernel was called in it. Run by
test_interpreter.py."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from lora.adapters import write_adapter
from torch.nn import functional

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError
from minivllm.kernels.dispatch import Dispatch
from minivllm.kernels.triton import draw, elementwise, gather, lora, moe, w4a16
from minivllm.kernels.triton import proofs as shared
from minivllm.kernels.triton.interpreted import INTERPRETED
from minivllm.lora import layer
from minivllm.quantization import packed
from minivllm.quantization.formats import dequantise
from minivllm.runner import block_copy
from minivllm.sampling import draws

assert INTERPRETED
SMALL = {"model.path": "dummy:tiny-short", "model.dtype": "float32", "kv.num_blocks": 40, "kv.block_size": 8}
SMALL |= {"executor.num_threads": 1, "scheduler.max_num_batched_tokens": 24, "scheduler.max_num_seqs": 4}
SMALL |= {"runner.attention": "reference", "runner.forward": "eager", "debug.check": True}
FILTERS = [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1, "top_k": 40, "top_p": 0.9}]


@pytest.fixture
def calls(monkeypatch) -> Counter:
    """How often each function was called that `watch` was told of."""
    counted: Counter = Counter()

    def watch(holder: object, name: str) -> None:
        inner = getattr(holder, name)

        def call(*args, **kwargs):
            counted[name] += 1
            return inner(*args, **kwargs)

        monkeypatch.setattr(holder, name, call)

    counted.watch = watch
    return counted


def generate(kernels: str, max_tokens: int = 4, lora_request=None, **options) -> list[list[int]]:
    rng = random.Random(0)
    prompts = [[rng.randrange(200) for _ in range(n)] for n in (1, 9, 6, 3)]
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=max_tokens, **f) for i, f in enumerate(FILTERS)]
    more = {} if lora_request is None else {"lora_request": lora_request}
    with LLM(overrides=SMALL | {"runner.kernels": kernels} | options) as llm:
        decided = {d.field: d for d in llm.decisions}
        assert decided["runner.kernels"].value == kernels, decided
        if (graphs := options.get("runner.graphs", "none")) != "none":
            assert decided["runner.graphs"].value == graphs, decided
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False, **more)]


def test_draws_and_filters(calls):
    calls.watch(draw, "draw")
    calls.watch(draw, "find_cuts")
    wanted = generate("torch")
    assert not calls
    assert generate("triton") == wanted
    assert calls["draw"] >= 4 and calls["find_cuts"] >= 4


def test_rejection_of_drafts(calls):
    """Of a draft model with other weights, so that some are refused; they are drawn by a kernel too."""
    calls.watch(draw, "reject")
    calls.watch(draw, "draw")
    options = {"spec_decode.method": "self_draft", "spec_decode.acceptance": "rejection", "spec_decode.k": 2}
    options["spec_decode.layers"] = 1
    options |= {"spec_decode.layers": 1, "spec_decode.adaptive": False}
    wanted = generate("torch", **options)
    assert not calls
    assert generate("triton", **options) == wanted
    assert calls["reject"] >= 2 and calls["draw"] >= 2


def test_adapters(calls, tmp_path):
    """Of two adapters of different ranks, the larger one later; one request has none."""
    calls.watch(lora.SlotTable, "add")
    calls.watch(lora.SlotTable, "grown")
    folders = {
        name: str(write_adapter(tmp_path / name, i, rank)) for i, (name, rank) in enumerate([("a", 8), ("b", 20)])
    }
    options = {"model.path": "dummy:tiny", "lora.enabled": True, "lora.max_loras": 2, "lora.adapters": folders}

    def with_adapters(kernels: str) -> list[list[int]]:
        return generate(kernels, lora_request=["a", "b", None, "a"], **options)

    wanted = with_adapters("torch")
    assert not calls
    assert with_adapters("triton") == wanted != generate("torch")
    assert calls["add"] > 10 and calls["grown"] > 0


def test_weights_in_4_bits(calls, monkeypatch):
    """Against the product with what the codes mean; the LM head stays dense."""

    class Reference:
        def __init__(self, packed, bias):
            self.weight, self.bias = dequantise(packed), bias

        def __call__(self, x, out_dtype):
            assert out_dtype in (None, x.dtype)
            return functional.linear(x, self.weight, self.bias)

    calls.watch(w4a16.Matrix, "multiply")
    options = {"model.quantization": "int4"}
    got = generate("triton", **options)
    assert calls["multiply"] > 10
    monkeypatch.setattr(w4a16, "Matrix", Reference)
    assert got == generate("triton", **options) != generate("torch")
    with pytest.raises(ConfigError, match="int4 or none"):
        generate("triton", **{"model.quantization": "int8"})


@pytest.mark.parametrize("forward, graphs", [("eager", "none"), ("eager", "full"), ("piecewise", "piecewise")])
def test_experts(calls, forward, graphs):
    """In captures too, of whole decodes as well: nothing asks the host."""
    calls.watch(moe, "moe")
    options = {"model.path": "dummy:tiny-moe", "scheduler.max_num_seqs": 2, "scheduler.max_num_batched_tokens": 16}
    options["model.max_model_len"] = 64  # fewer sizes to capture
    wanted = generate("torch", 3, **options)
    assert not calls
    options |= {"runner.graphs": graphs, "runner.forward": forward, "runner.compile": "off"}
    options["runner.attention"] = "triton" if graphs == "full" else "reference"
    assert generate("triton", 3, **options) == wanted
    assert calls["moe"] >= 3 * 3  # three layers of four have experts


def test_every_proof_holds_and_each_sees_a_kernel_that_is_wrong(monkeypatch):
    """runner.kernels=auto on a GPU asks for these; here the interpreter stands in for it."""
    cpu, dtype = torch.device("cpu"), torch.float32
    proofs = {
        "draw": draws.proves_draw,
        "top-k, top-p and min-p": draws.proves_filter,
        "rejection sampling": draws.proves_reject,
        "lora": lambda device: layer.proves_triton(device, dtype),
        "w4a16 linear": lambda device: packed.proves_triton(device, dtype),
        "block copy": block_copy._proof,
        "gather inputs": lambda device: shared.gather_tokens(device, 16),
        "gather rows": shared.gather_rows,
        "staged writes": shared.write_rows,
        "layer of experts": lambda device: shared.experts(device, dtype),
    }

    def outcomes() -> tuple[list[bool], Dispatch]:
        dispatch = Dispatch("triton", cpu)
        dispatch._proves = True  # as auto does on a GPU
        return [dispatch.uses(*proof) for proof in proofs.items()], dispatch

    used, dispatch = outcomes()
    assert all(used) and dispatch.decision[0] == "triton" and "each gave its reference's answer" in dispatch.decision[1]

    def first_token(probs, *args):
        return torch.zeros(len(probs), dtype=torch.int64), torch.ones(len(probs), dtype=torch.bool)

    monkeypatch.setattr(draw, "draw", first_token)
    monkeypatch.setattr(draw, "reject", first_token)
    monkeypatch.setattr(draw, "find_cuts", lambda probs, *args: probs.amax(-1))
    monkeypatch.setattr(lora.SlotTable, "add", lambda table, y, x, tasks: y.add_(0.01))
    monkeypatch.setattr(w4a16.Matrix, "multiply", lambda *args: 1 // 0)
    inner = elementwise.BlockCopier.__call__
    monkeypatch.setattr(elementwise.BlockCopier, "__call__", lambda copier, pairs: inner(copier, pairs[:1]))
    monkeypatch.setattr(gather, "gather_tokens", lambda *args, block_size, spare_block: args[-1])
    monkeypatch.setattr(gather, "gather_rows", lambda table, rows, out: out.zero_())
    monkeypatch.setattr(gather, "write_rows", lambda table, writes: None)
    monkeypatch.setattr(moe, "moe", lambda x, *args: x.clone())
    used, dispatch = outcomes()
    value, reason = dispatch.decision
    assert not any(used) and value == "torch" and reason.count("differs from its reference") == 9
    assert "w4a16 linear in torch (ZeroDivisionError" in reason
