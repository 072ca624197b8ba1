"""What a simulated engine says and how long it takes, by itself."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from functools import partial

import pytest

from minivllm import LLM, SamplingParams, StructuredParams
from minivllm.config import EngineConfig
from minivllm.engine import build as building
from minivllm.engine.build import engine as composition
from minivllm.engine.build.simulated import SimulatedWorkerBuilder
from minivllm.errors import BadRequest, ConfigError, ModelError
from minivllm.plan import StepPlan
from minivllm.request import EngineRequest
from minivllm.serve.generation import raise_if_failed
from minivllm.simulate.clock import RealClock, VirtualClock
from minivllm.simulate.devices import find_device

# A fast device and a tiny model: steps are as short as they get.
TINY = {"model.path": "dummy:tiny", "executor.kind": "simulated", "executor.device": "b200", "debug.check": True}
TINY["kv.num_blocks"] = 400
LLAMA = {**TINY, "model.path": "dummy:llama-3.1-8b", "executor.device": "h100"}
TO_THE_END = SamplingParams(max_tokens=40, ignore_eos=True, seed=5)


def say(params: SamplingParams, prompts=("one", "another", "a third, longer than the others"), **overrides):
    with LLM(overrides={**TINY, **overrides}) as llm:
        return [out.outputs[0] for out in llm.generate(list(prompts), params, use_tqdm=False)]


def test_a_simulated_model_is_built_and_run_without_torch():
    code = f"""if 1:
        import sys
        from minivllm import LLM, SamplingParams
        with LLM(overrides={TINY!r}) as llm:
            print(len(llm.generate("hello", SamplingParams(max_tokens=9, ignore_eos=True))[0].outputs[0].token_ids))
        print("torch" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["9", "False"], done.stderr


@pytest.mark.parametrize(
    "way",
    [
        {"scheduler.max_num_batched_tokens": 5},
        {"debug.preempt_every": 3},
        {"kv.num_blocks": 12, "model.max_model_len": 100, "kv.preemption": "swap"},
        {"spec_decode.method": "ngram"},
        {"spec_decode.method": "suffix", "spec_decode.adaptive": False, "executor.acceptance": 0.2},
        {"engine.overlap": 2, "runner.inputs": "rebuild"},
        {"executor.device": "2xrtx-4090", "model.quantization": "int4"},
    ],
    ids=str,
)
def test_what_is_said_is_a_function_of_prompt_and_seed(way):
    assert [out.token_ids for out in say(TO_THE_END, **way)] == [out.token_ids for out in say(TO_THE_END)]


def test_answers_end_by_chance_and_not_before_min_tokens():
    params = SamplingParams(max_tokens=None, min_tokens=3)
    overrides = {"model.max_model_len": 200, "executor.answer_tokens": 10}
    outs = say(params, prompts=map(str, range(150)), **overrides)
    lengths = [len(out.token_ids) for out in outs]
    assert all(out.finish_reason == "stop" and out.token_ids[-1] == 2 for out in outs if len(out.token_ids) < 150)
    assert min(lengths) >= 4 and 9 < sum(lengths) / len(lengths) < 17  # 3, and 10 in the mean


def test_log_probabilities_are_those_of_what_is_drawn_from():
    outs = say(SamplingParams(max_tokens=3, logprobs=512, prompt_logprobs=1), **{"engine.max_logprobs": -1})
    position = outs[0].logprobs[0]
    assert len(position) == 512 and math.isclose(sum(math.exp(entry.logprob) for entry in position.values()), 1)
    assert position[2].rank == 1  # the end of sequence: once in executor.answer_tokens
    assert math.isclose(math.exp(position[2].logprob), 1 / 256, rel_tol=0.5)


def test_a_request_whose_output_must_look_like_something_is_refused_and_others_go_on():
    params = [SamplingParams(max_tokens=4, structured=StructuredParams(regex="[a-z]{3}")), TO_THE_END]
    with LLM(overrides=TINY) as llm:
        refused, answered = llm.generate(["one", "two"], params, use_tqdm=False)
    assert refused.outputs[0].finish_reason == "error" and "no logits, so nothing that structured" in refused.error
    with pytest.raises(BadRequest, match="structured"):
        raise_if_failed(refused, params[0])
    assert len(answered.outputs[0].token_ids) == 40


def test_guesses_are_right_by_the_given_chance():
    with LLM(overrides={**TINY, "spec_decode.method": "ngram", "executor.acceptance": 0.8, "spec_decode.k": 1}) as llm:
        llm.generate(["one", "two"], SamplingParams(max_tokens=1000, ignore_eos=True), use_tqdm=False)
        stats = llm.stats
    assert stats.num_drafted > 500 and abs(stats.num_accepted / stats.num_drafted - 0.8) < 0.06


# ------------------------------------------------------------------------------------------------------------- time


def engine_of(monkeypatch, clock, **overrides):
    make = partial(SimulatedWorkerBuilder, clock=clock)
    monkeypatch.setattr(composition, "build_worker", lambda config: make(config).build())
    engine = building.build(EngineConfig.build("v1", {**LLAMA, **overrides}))
    engine.core.clock = clock
    return engine


def run(engine, num_requests: int, num_tokens: int) -> list:
    for i in range(num_requests):
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=i)
        engine.core.add(EngineRequest(f"r{i}", [1 + i] * 100, params))
    log = []
    while engine.core.has_work:
        deltas = engine.core.step()
        log.append((engine.core.clock(), [(delta.req_id, delta.token_ids) for delta in deltas]))
    return log


def test_two_runs_on_a_virtual_clock_are_equal_to_the_last_bit(monkeypatch):
    options = {"kv.num_blocks": 60, "model.max_model_len": 500, "spec_decode.method": "ngram"}
    first, second = (run(engine_of(monkeypatch, VirtualClock(), **options), 12, 60) for _ in range(2))
    assert first == second and first[-1][0] > 0.3


def test_a_step_on_the_real_clock_takes_as_long_as_on_the_virtual_one(monkeypatch):
    virtual = run(engine_of(monkeypatch, VirtualClock(), **{"executor.device": "a100-80"}), 2, 10)[-1][0]
    engine = engine_of(monkeypatch, RealClock(), **{"executor.device": "a100-80"})
    begin = time.monotonic()
    run(engine, 2, 10)
    assert virtual <= time.monotonic() - begin  # a busy machine may take longer, never less


def test_a_step_that_moves_blocks_takes_longer(monkeypatch):
    worker = engine_of(monkeypatch, VirtualClock(), **{"kv.preemption": "swap"}).executor.worker
    before = worker.clock()
    worker.execute(StepPlan(step=0, swap_out=[(i, i) for i in range(100)]))
    cost = worker.measure_costs()
    assert math.isclose(worker.clock() - before, 100 * cost["seconds_per_block"])
    assert cost["seconds_per_token"] < cost["seconds_per_block"] * 10


def test_a_block_of_a_group_of_layers_has_no_more_than_theirs(monkeypatch):
    """Gemma 3's 62 layers, 10 of which see all, are groups of 10: so a block has 10 layers' K and V."""
    model = {"model.path": "gemma-3-27b", "kv.preemption": "swap", "kv.prefix": "none"}
    engine = engine_of(monkeypatch, VirtualClock(), **model)
    worker, num_layers = engine.executor.worker, 10
    device, shape = find_device("h100"), worker.cost.shape
    size = worker.cost.kv_bytes_per_token / shape.num_attention_layers * num_layers * engine.info["block_size"]
    assert math.isclose(worker.measure_costs()["seconds_per_block"], size / device.host_link)


# ---------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "overrides, says",
    [
        ({"executor.device": "h10"}, 'no device "h10". Did you mean "h100"'),
        ({"executor.device": "3xh100"}, "3 devices cannot have equal parts of 4 attention heads"),
        ({"executor.device": "16xh100"}, "1 to 8 of h100 can share a model"),
        ({"executor.device": "2xxeon-8480"}, "1 to 1 of xeon-8480"),
        ({"executor.device": "rtx-4090", "model.path": "dummy:qwen3-30b-a3b"}, "4xrtx-4090 would hold it"),
        ({"executor.kind": "uni"}, "needs executor.kind=simulated"),
        ({"model.device": "cpu"}, "executor.device"),
        ({"spec_decode.method": "draft"}, "no cost yet for guesses"),
        ({"executor.acceptance": 1.5}, "at most 1"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_a_sentence(overrides, says):
    with pytest.raises(ConfigError, match=says):
        LLM(overrides={**TINY, **overrides})


def test_a_name_is_a_model_in_any_letters():
    options = {"model.path": "Llama-3.3-70B", "executor.device": "4xh100"}
    out = say(SamplingParams(max_tokens=2, ignore_eos=True, seed=1), **options)[0]
    assert len(out.token_ids) == 2
    with pytest.raises(ModelError, match='Did you mean "llama-3.3-70b".*one of llama-3.1-8b, .*opt-175b'):
        say(TO_THE_END, **{"model.path": "llama3.3-70b"})


def test_a_folder_with_nothing_but_a_config_is_a_model(tmp_path):
    config = {"model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64}
    config |= {"num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256}
    config |= {"max_position_embeddings": 131072}
    folder = tmp_path / "llama-3.3-70b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    options = {"model.path": str(folder), "executor.device": "b200"}
    out = say(SamplingParams(max_tokens=5, ignore_eos=True, seed=1), **options)[0]
    assert len(out.token_ids) == 5 and out.text.strip()
    with pytest.raises(ModelError, match="no config.json"):
        say(TO_THE_END, **{"model.path": str(tmp_path)})
