"""best_of: the n likeliest of more."""

from __future__ import annotations

import asyncio

import pytest

from minivllm import LLM, SamplingParams
from minivllm.engine.async_llm import AsyncLLM
from minivllm.errors import BadRequest

SMALL = {"kv.num_blocks": 60, "kv.block_size": 8, "executor.num_threads": 1, "debug.check": True}
PROMPT = list(range(20, 40))
SAMPLED = SamplingParams(temperature=1.0, seed=4, max_tokens=6)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def llm():
    with LLM("dummy:tiny", dtype="float32", max_num_seqs=8, overrides=SMALL) as llm:
        yield llm


def generate(llm, params):
    return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs


def of(outputs):
    return [(o.token_ids, o.text, o.finish_reason, o.cumulative_logprob) for o in outputs]


@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_the_n_likeliest_of_best_of_come_back_best_first(llm, n):
    everything = sorted(generate(llm, SAMPLED.replace(n=5, logprobs=0)), key=lambda o: -o.cumulative_logprob)
    chosen = generate(llm, SAMPLED.replace(n=n, best_of=5, logprobs=0 if n == 5 else None))
    chosen = sorted(chosen, key=lambda o: -o.cumulative_logprob) if n == 5 else chosen  # nothing to choose
    assert of(chosen) == of(everything[:n])
    if n < 5:
        assert [o.index for o in chosen] == list(range(n))
        assert all(o.logprobs is None for o in chosen), "they were not asked for"


def test_logprobs_that_are_asked_for_come_along(llm):
    (chosen,) = generate(llm, SAMPLED.replace(best_of=3, logprobs=2))
    assert len(chosen.logprobs) == len(chosen.token_ids)
    taken = [position[token].logprob for token, position in zip(chosen.token_ids, chosen.logprobs, strict=True)]
    assert chosen.cumulative_logprob == pytest.approx(sum(taken))


def test_best_of_works_for_the_groups_of_v0(llm):
    with LLM("dummy:tiny", dtype="float32", max_num_seqs=8, preset="v0", overrides=SMALL) as v0:
        mine, theirs = (generate(engine, SAMPLED.replace(n=2, best_of=4)) for engine in (v0, llm))
    assert [o.token_ids for o in mine] == [o.token_ids for o in theirs]


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final"])
def test_the_best_are_known_at_the_end(kind):
    engine = AsyncLLM("dummy:tiny", dtype="float32", overrides=SMALL)

    async def collect():
        params = SAMPLED.replace(n=2, best_of=4)
        return [output async for output in engine.generate(PROMPT, params, "r", output_kind=kind)]

    (output,) = asyncio.run(collect())
    engine.close()
    assert output.finished and [o.index for o in output.outputs] == [0, 1]
    assert all(len(o.token_ids) == 6 or o.finish_reason == "stop" for o in output.outputs)


@pytest.mark.parametrize("preset", ["v1", "v0", "static"])
def test_greedy_choices_are_as_many_as_asked_for_and_equal(llm, preset):
    """As OpenAI's API has it; vLLM refuses them."""
    (one,) = generate(llm, GREEDY)
    with LLM("dummy:tiny", dtype="float32", max_num_seqs=8, preset=preset, overrides=SMALL) as engine:
        for n, best_of in ((3, None), (2, 3), (1, 2)):
            found = generate(engine, GREEDY.replace(n=n, best_of=best_of))
            assert [(o.index, o.token_ids, o.text) for o in found] == [(i, one.token_ids, one.text) for i in range(n)]


def test_what_cannot_be_is_refused_by_name(llm):
    with pytest.raises(BadRequest, match="at least 3") as error:
        SamplingParams(n=3, best_of=2)
    assert error.value.param == "best_of"
