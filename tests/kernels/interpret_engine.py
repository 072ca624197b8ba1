"""The engine over the Triton backend gives the tokens of the reference, with chunks, decodes and shared blocks. Run by
test_interpreter.py."""

from __future__ import annotations

import functools
import random

import pytest

from minivllm import LLM, SamplingParams
from minivllm.kernels.cpu import build
from minivllm.kernels.dispatch import Dispatch
from minivllm.kernels.triton import elementwise, gather
from minivllm.kernels.triton.interpreted import INTERPRETED
from minivllm.runner import inputs_place
from minivllm.runner.forward_graphs import FullForward

assert INTERPRETED
QUANTISED = ["int8", "float8_e4m3fn"]
GATHERING = "staged writes", "gather inputs", "gather rows"
SMALL = {"model.path": "dummy:tiny-short", "model.dtype": "float32", "kv.num_blocks": 40, "kv.block_size": 8}
SMALL |= {"executor.num_threads": 1, "scheduler.max_num_batched_tokens": 24, "scheduler.max_num_seqs": 2}


def generate(
    attention: str, kv: str = "auto", graphs: str = "none", num_shared: int = 17, max_tokens: int = 4, **options
) -> list[list[int]]:
    rng = random.Random(0)
    shared = [rng.randrange(200) for _ in range(num_shared)]
    prompts = [shared + [rng.randrange(200) for _ in range(n)] for n in (1, 3 + num_shared)]
    params = [SamplingParams(temperature=t, seed=1, max_tokens=max_tokens) for t in (0.0, 0.8)]
    own = {"runner.attention": attention, "kv.dtype": kv, "runner.graphs": graphs, "debug.check": True} | options
    with LLM(overrides=SMALL | own) as llm:
        assert graphs in (decision := {d.field: str(d.value) for d in llm.decisions}).get("runner.graphs", "none"), (
            decision
        )
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


@functools.cache
def wanted(kv: str, **options) -> list[list[int]]:
    return generate("reference", kv, **options)


def test_tokens_equal_the_references():
    assert generate("triton") == wanted("auto")


def test_whole_decodes_are_recorded_with_numbers_that_hold_for_every_length():
    assert generate("triton", graphs="full") == wanted("auto")


def test_whole_steps_of_drafts_are_recorded(monkeypatch):
    """As many tokens of each request: a launch of the prefill's kernel, with numbers that hold for every length. The
    guesses are those of a model with the same weights, so right unless a token is drawn by chance."""
    queries, call, warmup = set(), FullForward.__call__, FullForward.warmup

    def watched(forward, batch):
        queries.add(batch.max_query if batch.whole else 0)
        return call(forward, batch)

    def warmed_up(*args):
        warmup(*args)
        queries.clear()

    expected = wanted("auto", max_tokens=10)
    monkeypatch.setattr(FullForward, "__call__", watched)
    monkeypatch.setattr(FullForward, "warmup", warmed_up)
    own = {"spec_decode.method": "draft", "spec_decode.model": "dummy:tiny-short", "spec_decode.k": 2}
    own |= {"spec_decode.adaptive": False}
    assert generate("triton", graphs="full", max_tokens=10, **own) == expected
    assert queries >= {0, 3}  # the prompts, which are called, and steps of drafts


@pytest.mark.parametrize("kv", QUANTISED)
def test_tokens_over_codes_equal_the_references(kv):
    """With chunks, a shared prefix, and requests that leave for the host and come back."""
    swaps = {"kv.preemption": "swap", "debug.preempt_every": 3}
    assert generate("triton", kv, **swaps) == wanted(kv) == wanted(kv, **{"kv.prefix": "none"})


@pytest.mark.skipif(build.unsupported_reason() is not None, reason=str(build.unsupported_reason()))
@pytest.mark.parametrize("kv", QUANTISED)
def test_tokens_over_codes_equal_those_of_the_cpus_kernels(kv):
    assert generate("triton", kv) == generate("cpu", kv)


@pytest.mark.parametrize("kv", ["auto", *QUANTISED])
def test_norm_rotation_and_cache_write_in_one_launch(kv, monkeypatch):
    """Every layer's, and the cache is written by nothing else. In captures and in traces:
    tests/compile/test_rope_in_attention.py."""
    num_launches, inner = 0, elementwise.rope_write

    def counted(*args):
        nonlocal num_launches
        num_launches += 1
        inner(*args)

    def refuse(*args):
        raise AssertionError("the cache was written apart")

    expected = wanted(kv, num_shared=5)
    monkeypatch.setattr(Dispatch, "uses", lambda self, name, proof: name.startswith("rope"))
    monkeypatch.setattr(elementwise, "rope_write", counted)
    for name in ("write", "write_quantised"):
        monkeypatch.setattr(elementwise, name, refuse)
    assert generate("triton", kv, num_shared=5, **{"runner.forward": "eager"}) == expected
    assert num_launches >= 2 * 4


def test_inputs_that_are_gathered_from_tables_on_the_device(monkeypatch):
    """What attention, its captures and the model read of a step comes from the kernels alone."""
    num_launches = dict.fromkeys(("write_rows", "gather_tokens", "gather_rows"), 0)

    def counted(name):
        inner = getattr(gather, name)

        def call(*args):
            num_launches[name] += 1
            return inner(*args)

        return call

    for name in num_launches:
        monkeypatch.setattr(gather, name, counted(name))
    monkeypatch.setattr(inputs_place, "is_apart", lambda device: True)
    monkeypatch.setattr(Dispatch, "uses", lambda self, name, proof: name in GATHERING)
    options = {"runner.inputs": "gather", "engine.overlap": 2}
    assert generate("triton", graphs="full", **options) == wanted("auto")
    assert num_launches["gather_tokens"] == num_launches["gather_rows"] > num_launches["write_rows"] > 2
