"""Whole engines on an emulated CUDA device (emulated_cuda.py): everything lies on its own side, captures hold what
they may, and tokens are those of the CPU. Run by test_emulated_card.py."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from minivllm import LLM, SamplingParams, StructuredParams
from minivllm.config import preset_overrides
from minivllm.kernels.triton.interpreted import INTERPRETED
from minivllm.request import BeamSearchParams
from minivllm.runner import forward_graphs
from tests.card.emulated_cuda import Card, OnDevice, card, torch_knows_cuda  # noqa: F401

assert INTERPRETED
SMALL = {"model.path": "dummy:tiny-short", "model.dtype": "float32", "kv.num_blocks": 40, "kv.block_size": 16}
SMALL |= {"executor.num_threads": 1, "scheduler.max_num_batched_tokens": 8, "scheduler.max_num_seqs": 3}
SMALL |= {"model.max_model_len": 32, "runner.kernels": "torch", "debug.check": True}

PLAIN = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.0, "max_tokens": 8}]
DRAFTS = {"spec_decode.method": "ngram", "spec_decode.k": 1, "spec_decode.adaptive": False}
SHALLOW = {"spec_decode.k": 2, "spec_decode.layers": 1}
SWAPS = {"kv.num_blocks": 6, "kv.preemption": "swap", "debug.preempt_every": 3}
# What was sampled, the oracle, and once for each two pools the addresses that blocks are moved between.
WAITED_FOR = "sampler.py", "logprobs.py", "reference.py", "x.data_ptr() for x"
KINDS = [
    {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 1.0, "n": 2, "logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 1, "min_tokens": 4},
    {"temperature": 0.7, "structured": StructuredParams(regex="([a-z ]{2,5}[0-9]){2,9}")},
]


def generate(kinds: list[dict], **options) -> tuple[list, dict[str, str], list[str]]:
    """Tokens and how each request ended; what was chosen; what was waited for in steps."""
    rng = random.Random(0)
    prompts = [[rng.randrange(200) for _ in range((3, 12, 7, 5)[i])] for i in range(len(kinds))]
    params = [SamplingParams(**{"seed": 1, "max_tokens": 5} | kind) for kind in kinds]
    with LLM(overrides=SMALL | options) as llm:
        started = len(Card.current.waits) if options["model.device"] == "cuda" else 0
        outputs = [list(o.outputs) for o in llm.generate(prompts, params, use_tqdm=False)]
        waits = Card.current.waits[started:] if options["model.device"] == "cuda" else []
        if kinds is KINDS:
            beams = BeamSearchParams(beam_width=2, max_tokens=3)
            outputs += [o.outputs for o in llm.beam_search([[1, 2, 3]], beams, use_tqdm=False)]
        decisions = {d.field: f"{d.value}: {d.reason}" for d in llm.decisions}
    of_requests = [[(list(o.token_ids), o.finish_reason) for o in request] for request in outputs]
    return of_requests, decisions, waits


@functools.cache
def wanted(all_kinds: bool, model: str = "dummy:tiny-short") -> list:
    options = {"model.device": "cpu", "runner.attention": "reference", "model.path": model}
    return generate(KINDS if all_kinds else PLAIN, **options)[0]


@pytest.mark.parametrize(
    "options",
    [
        {"runner.attention": "sdpa", "runner.graphs": "full+piecewise", "runner.kernels": "auto"},
        {"runner.attention": "sdpa", "runner.graphs": "piecewise", "runner.forward": "piecewise"},
        {"runner.attention": "triton", "runner.graphs": "full+piecewise"} | DRAFTS,
    ],
    ids=["breakable", "traced", "drafts"],
)
def test_captures_hold_what_they_may_and_replays_give_the_tokens(options, card, monkeypatch):  # noqa: F811
    monkeypatch.setattr(forward_graphs, "capture_sizes", lambda most: tuple(n for n in (8, 3) if n <= most))
    compile_off = {"runner.compile": "off"} if "runner.forward" in options else {}
    tokens, decisions, _ = generate(PLAIN, **{"model.device": "cuda"} | options | compile_off)
    assert tokens == wanted(False)
    assert card.num_replays > 5, decisions["runner.graphs"]


@pytest.mark.parametrize(
    "options",
    [
        {"runner.attention": "triton", "runner.kernels": "triton"} | SWAPS,
        {"runner.attention": "reference", "spec_decode.method": "self_draft"} | SHALLOW,
    ],
    ids=["swap", "drafts"],
)
def test_all_kinds_of_requests(options, card):  # noqa: F811
    tokens, _, waits = generate(KINDS, **{"model.device": "cuda"} | options)
    assert tokens == wanted(True)
    others = {why for why in waits if not any(part in why for part in WAITED_FOR)}
    assert not others, "only what was sampled is waited for"


@pytest.mark.parametrize(
    "options",
    [
        {"runner.attention": "triton", "runner.inputs": "gather"},
        {"runner.attention": "triton", "runner.inputs": "persistent", "debug.preempt_every": 3},
        {"runner.attention": "sdpa", "runner.kernels": "triton", "model.path": "dummy:tiny-moe"},
    ],
    ids=["on the device", "from the host", "experts"],
)
@pytest.mark.parametrize("all_kinds", [False, True], ids=["plain", "all kinds"])
def test_overlapped_steps_wait_for_nothing(options, all_kinds, card):  # noqa: F811
    kinds, overlapped = KINDS if all_kinds else PLAIN, {"model.device": "cuda", "engine.overlap": 2}
    tokens, _, waits = generate(kinds, **overlapped | options)
    assert waits == []
    assert tokens == wanted(all_kinds, options.get("model.path", "dummy:tiny-short"))


def test_the_preset_for_gpus_chooses_what_it_has_proven(card, monkeypatch):  # noqa: F811
    monkeypatch.setattr(forward_graphs, "capture_sizes", lambda most: tuple(n for n in (8, 3) if n <= most))
    options = preset_overrides("v1-gpu") | {"model.device": "cuda", "runner.kernels": "auto"}
    tokens, decisions, waits = generate(PLAIN, **options)
    assert tokens == wanted(False) and waits == []
    assert decisions["runner.attention"].startswith("triton: ") and "captured" in decisions["runner.graphs"]
    assert "on the device" in decisions["runner.inputs"] and "gather inputs" in decisions["runner.kernels"]


# ---------------------------------------------------------------- the emulation itself


def test_what_a_card_would_refuse_raises(card):  # noqa: F811
    here, there = torch.ones(3), torch.ones(3, device="cuda")
    assert type(there) is OnDevice and there.is_cuda and not here.is_cuda
    for wrong in (lambda: here + there, lambda: there[torch.tensor([0])], lambda: torch.cat([there, here])):
        with pytest.raises(AssertionError, match=r"on cuda:0 and on the CPU"):
            wrong()
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    assert there[1:].add_(1).cpu().tolist() == [2, 2] and there.cpu().tolist() == [1, 2, 2]


def test_whoever_waits_is_told(card):  # noqa: F811
    there = torch.ones(3, device="cuda")
    assert card.waits == []
    pinned = torch.empty(3, pin_memory=True)
    pinned.copy_(there, non_blocking=True)
    torch.ones(3).pin_memory().to("cuda", non_blocking=True)
    assert card.waits == [] and pinned.tolist() == [1, 1, 1]
    there.sum().item(), there[there > 0], torch.ones(3).to("cuda"), there.cpu(), there.nonzero()
    assert len(card.waits) == 5


def test_a_replay_does_what_was_captured_on_the_same_tensors(card):  # noqa: F811
    x, pinned, graph = torch.ones(3, device="cuda"), torch.ones(3).pin_memory(), torch.cuda.CUDAGraph()
    graph.capture_begin()
    y = x[1:] * 2
    with pytest.raises(AssertionError, match="waits within a capture"):
        y.sum().item()
    with pytest.raises(AssertionError, match="host within a capture"):
        pinned.to("cuda", non_blocking=True)
    with pytest.raises(AssertionError, match="pinned within a capture"):
        torch.ones(3).pin_memory()
    graph.capture_end()
    x.fill_(5)
    graph.replay()
    assert y.cpu().tolist() == [10, 10]
