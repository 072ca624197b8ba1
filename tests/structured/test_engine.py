"""Structured output through the engine: every kind, under every scheduler, cache and interruption."""

from __future__ import annotations

import asyncio
import json
import re

import jsonschema
import pytest
from grammar_driver import BACKENDS
from json_schemas import SCHEMAS

from minivllm import LLM, AsyncLLM, SamplingParams, StructuredParams
from minivllm.errors import BadRequest, ConfigError
from minivllm.structured.params import MAX_WHITESPACE

SMALL = {"model.path": "dummy:tiny", "model.dtype": "float32", "kv.num_blocks": 400, "executor.num_threads": 1}
SMALL["debug.check"] = True
SETTINGS = {
    "v1": {},
    "v0": {"preset": "v0"},
    "preempted": {"debug.preempt_every": 3, "kv.num_blocks": 60},
    "chunked": {"scheduler.max_num_batched_tokens": 7},
    "radix": {"kv.prefix": "radix", "debug.evict_all": True},
    "rebuilt": {"runner.inputs": "rebuild"},
}
KINDS = {
    "regex": (StructuredParams(regex=r"[a-c]{3}-\d{2,4}"), lambda t: re.fullmatch(r"[a-c]{3}-\d{2,4}", t)),
    "choice": (StructuredParams(choice=["yes", "no", "maybe"]), lambda t: t in ("yes", "no", "maybe")),
    "json": (
        StructuredParams(json={"type": "object", "properties": {"a": {"enum": ["x", 1]}}, "required": ["a"]}),
        lambda t: json.loads(t)["a"] in ("x", 1),
    ),
}


def engine(backend="auto", **overrides):
    preset = overrides.pop("preset", "v1")
    return LLM(preset=preset, overrides={**SMALL, "structured.backend": backend, **overrides})


def sampling(structured, seed=0, **more):
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 80, "structured": structured, **more})


@pytest.fixture(scope="module")
def llm():
    with engine() as llm:
        yield llm


def generate(llm, params, prompts=None):
    outputs = llm.generate(prompts or ["The sea"] * len(params), params, use_tqdm=False)
    return [choice for output in outputs for choice in output.outputs]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("backend", ["auto", "dfa"])
def test_no_way_of_scheduling_changes_a_structured_output(setting, backend, llm):
    params = [sampling(structured, seed) for seed in range(4) for structured, _ in KINDS.values()]
    prompts = [f"{'word ' * i}is" for i in range(len(params))]
    wanted = [choice.token_ids for choice in generate(llm, params, prompts)]
    with engine(backend, **SETTINGS[setting]) as other:
        choices = generate(other, params, prompts)
    assert [choice.token_ids for choice in choices] == wanted
    for choice, (_, is_right) in zip(choices, list(KINDS.values()) * 4, strict=True):
        assert choice.finish_reason == "length" or is_right(choice.text), choice.text
    assert sum(choice.finish_reason == "stop" for choice in choices) > len(choices) // 2


@pytest.mark.parametrize("kind", KINDS)
def test_each_choice_of_n_follows_its_own_grammar_beside_penalties_and_free_requests(kind, llm):
    structured, is_right = KINDS[kind]
    with_penalties = sampling(structured, n=6, presence_penalty=1.5, repetition_penalty=1.4, min_p=0.01, top_p=0.9)
    *choices, free = generate(llm, [with_penalties, sampling(None)])
    assert all(is_right(choice.text) for choice in choices if choice.finish_reason == "stop")
    assert free.token_ids == generate(llm, [sampling(None)])[0].token_ids


def test_greedy_and_log_probabilities(llm):
    structured, is_right = KINDS["regex"]
    choice = generate(llm, [sampling(structured, temperature=0.0, logprobs=2)])[0]
    assert is_right(choice.text) and len(choice.logprobs) == len(choice.token_ids)


@pytest.mark.parametrize("backend", BACKENDS)
def test_json_ends_however_much_the_model_likes_blank_lines(backend):
    """As small models do at temperature 0: white space without an end is what they then fill max_tokens with."""
    properties = {"a": {"enum": ["x", 1]}, "b": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"]}
    with engine(backend) as llm:
        blank = {i: 100.0 for i in range(llm.info["vocab_size"]) if llm.tokenizer.token_text(i).strip(" \n\r\t") == ""}
        blank = {i: bias for i, bias in blank.items() if i not in llm.tokenizer.special_ids}
        params = sampling(StructuredParams(json=schema), temperature=0.0, max_tokens=300, logit_bias=blank)
        (choice,) = generate(llm, [params])
    assert blank and choice.finish_reason == "stop", repr(choice.text)
    jsonschema.validate(json.loads(choice.text), schema)
    assert max(map(len, re.findall(r"\s+", choice.text))) == MAX_WHITESPACE


def test_min_tokens_and_ignore_eos_add_no_text(llm):
    structured, is_right = KINDS["choice"]
    longer = generate(llm, [sampling(structured, min_tokens=12)])[0]
    assert is_right(longer.text) and len(longer.token_ids) == 12 and longer.finish_reason == "stop"
    longest = generate(llm, [sampling(structured, ignore_eos=True, max_tokens=20)])[0]
    assert is_right(longest.text) and len(longest.token_ids) == 20 and longest.finish_reason == "length"


def test_a_stop_token_and_a_stop_string_end_it_as_ever(llm):
    regex = StructuredParams(regex="[ab]{4,8}")
    assert generate(llm, [sampling(regex, stop=["a"], seed=5)])[0].text in ("", "b", "bb", "bbb", "bbbb")
    at_special = [generate(llm, [sampling(regex, stop_token_ids=[0], seed=seed)])[0] for seed in range(6)]
    assert all(re.fullmatch("[ab]{4,8}", choice.text) for choice in at_special)
    assert any(choice.stop_reason == 0 for choice in at_special)


@pytest.mark.parametrize("schema", SCHEMAS[::14], ids=lambda s: json.dumps(s)[:40])
def test_finished_outputs_of_a_random_model_are_instances(llm, schema):
    choices = generate(llm, [sampling(StructuredParams(json=schema), n=4, max_tokens=200, logit_bias={2: 5.0})])
    for choice in choices:
        if choice.finish_reason == "stop":
            jsonschema.Draft202012Validator(schema).validate(json.loads(choice.text))
        else:
            assert choice.finish_reason == "length"


def test_a_wrong_specification_leaves_nothing_behind(llm):
    with pytest.raises(BadRequest, match=r"structured: regex: .*position") as e:
        llm.generate(["a", "b"], [sampling(None), sampling(StructuredParams(regex="(a"))], use_tqdm=False)
    assert e.value.param == "structured"
    assert generate(llm, [sampling(KINDS["choice"][0])])[0].text in ("yes", "no", "maybe")
    with pytest.raises(BadRequest, match="StructuredParams"):
        sampling({"regex": "a"})


def test_streams_of_the_asynchronous_engine():
    async def one(llm, i, structured):
        return [o async for o in llm.generate("x", sampling(structured, i), f"r{i}", output_kind="delta")]

    async def main():
        llm = AsyncLLM(overrides=SMALL)
        try:
            streams = await asyncio.gather(*(one(llm, i, s) for i, (s, _) in enumerate(list(KINDS.values()) * 3)))
            with pytest.raises(BadRequest, match="position"):
                await one(llm, 99, StructuredParams(regex="(a"))
            return streams
        finally:
            await llm.shutdown()

    for stream, (_, is_right) in zip(asyncio.run(main()), list(KINDS.values()) * 3, strict=True):
        text = "".join(output.outputs[0].text for output in stream)
        assert stream[-1].outputs[0].finish_reason == "length" or is_right(text), text


def test_a_backend_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("minivllm.structured.compiler.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        engine("xgrammar")
    with engine("auto") as llm:
        assert list(llm._client._grammars.backends) == ["dfa"]
        assert generate(llm, [sampling(KINDS["regex"][0])])[0].finish_reason == "stop"


def test_nothing_is_compiled_in_the_step_loop(llm):
    """The worker finds what the front end has compiled: both have one compiler."""
    step = llm._core.executor.worker.runner.head.sampler.processors[0]
    assert step.compiler is llm._client._grammars
    assert set(BACKENDS) == set(step.compiler.backends)
