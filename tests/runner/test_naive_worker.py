"""transformers behind the engine's own seams: the same tokens, one request at a time, and nothing pretended."""

import pytest

from minivllm import LLM, BeamSearchParams, SamplingParams
from minivllm.config import EngineConfig
from minivllm.errors import ConfigError

TINY = {"model.path": "dummy:tiny", "model.dtype": "float32", "kv.num_blocks": 40, "executor.num_threads": 1}
PROMPTS = [[7, 8, 9], list(range(20, 60)), [300]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, logprobs=2, prompt_logprobs=1)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=5, n=3, max_tokens=14, ignore_eos=True, presence_penalty=0.5)


BEAMS = BeamSearchParams(beam_width=2, max_tokens=8)


def tokens(llm, params):
    return [list(c.token_ids) for o in llm.generate(PROMPTS, params, use_tqdm=False) for c in o.outputs]


@pytest.fixture(scope="module")
def wanted():
    with LLM(overrides=TINY) as llm:
        return [tokens(llm, params) for params in (GREEDY, SAMPLED, BEAMS)]


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"scheduler.max_num_seqs": 4, "debug.preempt_every": 3},
        {"scheduler.kind": "unified", "scheduler.chunked_prefill": True, "scheduler.max_num_batched_tokens": 7},
        {"scheduler.kind": "phased", "scheduler.max_num_seqs": 8, "runner.inputs": "persistent"},
    ],
    ids=str,
)
def test_tokens_are_those_of_the_engines_own_model(overrides, wanted):
    with LLM(preset="naive", overrides={**TINY, "debug.check": True, **overrides}) as llm:
        assert [tokens(llm, params) for params in (GREEDY, SAMPLED, BEAMS)] == wanted
        worker = llm._core.executor.worker
        llm._core.step()  # an empty step: the last ones leave
        assert not worker.runner.forward._caches, "a cache outlives its request"


def test_one_request_runs_at_a_time():
    running = []

    class Watch:
        def on_start(self, config, info): ...
        def on_add(self, req, step): ...
        def on_abort(self, req_id): ...
        def on_step(self, plan, out, deltas, times):
            running.append(len(plan.num_tokens))

        def close(self): ...

    with LLM(preset="naive", overrides=TINY, observers=[Watch()]) as llm:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert set(running) == {1} and len(running) == 3 * 14


def test_log_probabilities_are_near_those_of_the_engines_own_model():
    both = []
    for preset in ("naive", "v1"):
        with LLM(preset=preset, overrides=TINY) as llm:
            (output,) = llm.generate([PROMPTS[1]], GREEDY, use_tqdm=False)
            entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
            both.append([logprob.logprob for entry in entries for logprob in entry.values()])
    assert both[0] == pytest.approx(both[1], abs=1e-4)  # fp32 sums in another order


@pytest.mark.parametrize(
    "option",
    [
        {"kv.prefix": "hash"},
        {"kv.prefix": "radix"},
        {"kv.dtype": "int8"},
        {"kv.preemption": "swap"},
        {"kv.preemption": "auto"},
        {"kv.fork": "share", "scheduler.kind": "phased"},
        {"runner.attention": "sdpa"},
    ],
    ids=str,
)
def test_what_transformers_does_not_do_is_refused_by_name(option):
    with pytest.raises(ConfigError, match="executor=naive cannot be combined with .*transformers"):
        EngineConfig.build("naive", option)


@pytest.mark.model
def test_the_default_model_gives_the_same_tokens():
    prompts = ["The capital of Japan is", "2 + 2 =", "Once upon a time"]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = []
    for preset in ("naive", "v1"):
        with LLM(preset=preset, overrides={"model.dtype": "float32", "kv.memory": "64MiB"}) as llm:
            found.append([list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)])
    assert found[0] == found[1]
