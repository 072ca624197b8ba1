"""Rules: a model some of whose layers keep recurrent states gives transformers' tokens in an engine, whatever else is
on; what a state cannot do is refused. Each rule of states (attention/state.py) has a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from models.pairs import greedy_oracle, random_tokens, save_oracle
from models.test_granite_hybrid import CONFIGS as GRANITE
from models.test_granite_hybrid import save_random
from models.test_qwen3_5 import CONFIGS as QWEN
from models.test_qwen3_5 import one_by_one

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError

ENGINE = {"model.dtype": "float32", "kv.num_blocks": 120, "executor.num_threads": 1, "debug.check": True}
ENGINE |= {"engine.core": "inproc", "scheduler.max_num_seqs": 4, "kv.block_size": 4}
SHARED = random_tokens(2, 75)  # more than two blocks
PROMPTS = [random_tokens(1, 7), SHARED + random_tokens(7, 6), SHARED[:40] + random_tokens(8, 3)]
AGAIN = [SHARED, SHARED + random_tokens(9, 30)]
WAYS = {
    "chunks": {"runner.attention": "cpu", "scheduler.max_num_batched_tokens": 16},
    "reference": {"runner.attention": "reference", "runner.inputs": "rebuild"},
    "radix": {"runner.attention": "sdpa", "runner.inputs": "gather", "kv.prefix": "radix"},
    "pieces": {"runner.forward": "piecewise", "runner.compile": "off"},
    "graphs": {"runner.graphs": "full+piecewise", "runner.forward": "eager", "runner.attention": "reference"},
    "overlap": {"engine.overlap": 2},
    "preempted": {"scheduler.max_num_batched_tokens": 16, "debug.preempt_every": 5},
    "swapped": {"kv.preemption": "swap", "kv.swap_memory": "4MiB", "debug.preempt_every": 5},
    "preempted and overlap": {"debug.preempt_every": 5, "engine.overlap": 2},
    "phased": {"scheduler.kind": "phased", "scheduler.chunked_prefill": False, "kv.preemption": "swap"},
    "few blocks": {"kv.num_blocks": 50},
    "naive": {"executor.kind": "naive", "kv.prefix": "none"},
}


class Model(NamedTuple):
    folder: str
    oracle: Any
    block_size: int  # tokens that a state of its takes
    state_size: str  # as the table at start says it


@pytest.fixture(scope="module", params=["qwen3.5", "granite 4"])
def model(request, tmp_path_factory) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "_"))
    if request.param == "granite 4":
        yield Model(str(folder), save_random(GRANITE["dense"], folder), 32, "5.9 KiB")
        return
    with one_by_one():
        yield Model(str(folder), save_oracle(QWEN["as published"], folder), 16, "7.9 KiB")


def tokens_of(llm: LLM, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def wanted(model) -> list[list[int]]:
    """transformers' 64 tokens behind each of PROMPTS and AGAIN."""
    return [greedy_oracle(model.oracle, prompt, 64) for prompt in PROMPTS + AGAIN]


def test_an_engine_gives_64_tokens_of_transformers_and_says_how_it_runs(model, wanted):
    with LLM(model.folder, overrides=ENGINE) as llm:
        assert tokens_of(llm, PROMPTS, 64) + tokens_of(llm, AGAIN, 64) == wanted
        said = {decision.field: (str(decision.value), decision.reason) for decision in llm.decisions}
        assert llm.config.kv.block_size == model.block_size
    size, why = said["kv.block_size"]
    assert size == str(model.block_size) and f"recurrent state, which takes {model.state_size}" in why
    assert "layers in groups: 1 of all tokens, 1 of a state, 1 of a state, 1 of a state" in said["kv.num_blocks"][1]
    assert "3 of 4 layers have recurrent states" in said["runner.forward"][1]


def test_a_prefix_is_found_where_a_block_ends_and_costs_no_token(model, wanted):
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with LLM(model.folder, overrides=ENGINE) as llm:
        for prompt, tokens, num_found in ((PROMPTS[1], wanted[1], 0), (AGAIN[1], wanted[4], 64)):
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            assert (output.num_cached_tokens, list(output.outputs[0].token_ids)) == (num_found, tokens[:20])


@pytest.mark.parametrize("way", WAYS)
def test_whatever_else_is_on_the_tokens_are_those_of_transformers(way, model, wanted):
    with LLM(model.folder, overrides=ENGINE | WAYS[way]) as llm:
        found = tokens_of(llm, PROMPTS, 40) + tokens_of(llm, AGAIN, 40)  # the second time prefixes are found
    assert found == [tokens[:40] for tokens in wanted]


def test_samples_of_one_prompt_that_share_its_blocks_are_those_that_do_not(model):
    """V0's fork: a partly filled block, and the states in it, are copied."""
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
    texts = []
    for fork in ("share", "lookup"):
        options = {"scheduler.kind": "phased", "scheduler.chunked_prefill": False, "kv.fork": fork, "kv.prefix": "none"}
        with LLM(model.folder, overrides=ENGINE | options) as llm:
            (output,) = llm.generate([PROMPTS[1]], params, use_tqdm=False)
        texts.append([list(each.token_ids) for each in output.outputs])
    assert texts[0] == texts[1] and len({tuple(tokens) for tokens in texts[0]}) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spec_decode.method": "ngram"}, "a recurrent state, which this model's layers keep, cannot go back"),
        ({"kv.allocation": "max", "kv.prefix": "none"}, "kv.allocation=max gives a request one run"),
        ({"model.invariant": True}, "a state takes many tokens by products"),
    ],
)
def test_what_a_state_cannot_do_is_refused(options, message, model):
    with pytest.raises(ConfigError, match=message):
        LLM(model.folder, overrides=ENGINE | options)
