"""Rule: who else is in the batch, and what is loaded or unloaded meanwhile, changes no token of a request."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import pytest
from lora.adapters import write_adapter

from minivllm import LLM, AsyncLLM, LoRARequest, SamplingParams
from minivllm.errors import AdapterError, BadRequest, ConfigError, UnknownAdapter
from minivllm.request import BeamSearchParams

SMALL = {"model.path": "dummy:tiny", "model.dtype": "float32", "kv.num_blocks": 60, "kv.block_size": 8}
SMALL |= {"executor.num_threads": 1, "debug.check": True, "lora.enabled": True, "lora.max_loras": 2}
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
PROMPT = list(range(40, 73))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    ranks = {"a": 8, "b": 16, "c": 1, "d": 64}
    return {name: str(write_adapter(root / name, i, rank)) for i, (name, rank) in enumerate(ranks.items())}


@pytest.fixture(scope="module")
def alone(folders):
    """{adapter: its answer in an engine of its own}."""
    answers = {}
    for name in ("", *folders):
        with LLM(overrides={**SMALL, "lora.adapters": {name: folders[name]} if name else {}}) as llm:
            answers[name] = tokens(llm.generate(PROMPT, GREEDY, lora_request=name or None, use_tqdm=False))[0]
    assert len(set(map(tuple, answers.values()))) == 5
    return answers


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def llm(folders):
    with LLM(overrides=SMALL) as llm:
        for name, folder in folders.items():
            llm.load_lora(name, folder)
        yield llm


def ask(llm, names, params=GREEDY):
    return tokens(llm.generate([PROMPT] * len(names), params, lora_request=[n or None for n in names], use_tqdm=False))


def test_more_adapters_than_slots_take_turns(llm, alone):
    names = ["a", "", "b", "c", "d", "a", "", "d", "b", "c", "a", ""]
    assert ask(llm, names) == [alone[name] for name in names]
    assert [adapter.num_users for adapter in llm.list_loras()] == [0] * 4


def test_a_prefix_is_shared_within_an_adapter_only(llm, alone):
    for name in ("a", "b", "", "a", "b", ""):
        assert ask(llm, [name]) == [alone[name]]
    cached = [llm.generate(PROMPT, GREEDY, lora_request=name, use_tqdm=False)[0].num_cached_tokens for name in "ac"]
    assert cached == [32, 0]


def test_an_adapter_loaded_again_meets_no_kv_of_the_old_one(llm, folders, alone):
    assert ask(llm, ["a"]) == [alone["a"]]
    llm.unload_lora("a")
    llm.load_lora("a", folders["b"])
    output = llm.generate(PROMPT, GREEDY, lora_request="a", use_tqdm=False)[0]
    assert output.num_cached_tokens == 0 and tokens([output]) == [alone["b"]]


def test_requests_that_bring_their_adapter(folders, alone):
    with LLM("dummy:tiny", enable_lora=True, max_loras=1, max_lora_rank=64, max_cpu_loras=2, overrides=SMALL) as llm:
        for i, name in enumerate(("a", "b", "c", "a", "d")):
            lora = LoRARequest(name, "abcd".index(name) + 1, folders[name])
            assert tokens(llm.generate(PROMPT, GREEDY, lora_request=lora, use_tqdm=False)) == [alone[name]], i
        assert len(llm.list_loras()) == 2


def test_n_choices_chat_and_beams_use_the_adapter(llm, alone):
    sampled = SamplingParams(n=3, temperature=0.7, seed=5, max_tokens=6, ignore_eos=True)
    first, second = (llm.generate(PROMPT, sampled, lora_request=n, use_tqdm=False)[0].outputs for n in ("b", None))
    assert [c.token_ids for c in first] != [c.token_ids for c in second]
    beams = llm.beam_search(PROMPT, BeamSearchParams(beam_width=1, max_tokens=10, ignore_eos=True), lora_request="b")
    assert beams[0].outputs[0].token_ids == alone["b"]
    messages = [{"role": "user", "content": "hello"}]
    chats = [llm.chat(messages, GREEDY, lora_request=name, use_tqdm=False) for name in ("b", None)]
    assert tokens(chats[0]) != tokens(chats[1])


def test_what_is_not_loaded_is_refused_and_leaves_nothing(llm, folders):
    with pytest.raises(UnknownAdapter, match='"x" is loaded'):
        ask(llm, ["a", "x"])
    with pytest.raises(AdapterError, match="no such folder"):
        llm.load_lora("x", folders["a"] + "-not")
    with pytest.raises(BadRequest, match="2 prompts, but 1 of lora_request"):
        llm.generate([PROMPT, PROMPT], GREEDY, lora_request=["a"], use_tqdm=False)
    assert not llm._core.has_work and llm._core.scheduler.table.loaded["a"].num_users == 0


def test_without_lora_an_adapter_is_refused(folders):
    with LLM(overrides={**SMALL, "lora.enabled": False}) as llm:
        for lora in ("a", LoRARequest("a", 1, folders["a"])):
            with pytest.raises(BadRequest, match="LoRA is off"):
                llm.generate(PROMPT, GREEDY, lora_request=lora, use_tqdm=False)
    with pytest.raises(ConfigError, match="needs lora.enabled"):
        LLM(overrides={**SMALL, "lora.enabled": False, "lora.adapters": folders})
    with pytest.raises(ConfigError, match="lora.max_cpu_loras admits 3"):
        LLM(overrides={**SMALL, "lora.max_cpu_loras": 3, "lora.adapters": folders})


def test_loading_and_unloading_under_load(folders, alone):
    """Four clients ask without pause while another one loads and unloads what two of them use."""
    engine = AsyncLLM(overrides={**SMALL, "lora.adapters": {"a": folders["a"]}})
    served, refused, over = Counter(), Counter(), []

    async def client(name):
        for i in itertools.count():
            if over:
                return
            try:
                outputs = [o async for o in engine.generate(PROMPT, GREEDY, f"{name}{i}", lora_request=name)]
                assert list(outputs[-1].outputs[0].token_ids) == alone[name or ""]
                served[name] += 1
            except UnknownAdapter:
                refused[name] += 1
                await asyncio.sleep(0.01)

    async def both_are_more(counter):
        before = counter["b"], counter["c"]
        while not (counter["b"] > before[0] and counter["c"] > before[1]):
            await asyncio.sleep(0.005)

    async def operator():
        for _ in range(4):
            for name in ("b", "c"):
                await engine.load_lora(name, folders[name])
            await both_are_more(served)
            for name in ("b", "c"):
                await engine.unload_lora(name)  # requests that live go on
            await both_are_more(refused)
        over.append(True)
        with pytest.raises(UnknownAdapter):
            await engine.unload_lora("b")

    async def run():
        await asyncio.gather(*map(client, ("a", "b", "c", None)), operator())
        while engine._core.has_work:
            await asyncio.sleep(0.01)

    try:
        asyncio.run(run())
        assert engine.is_running and set(refused) == {"b", "c"} and served["a"] and served[None]
        assert [adapter.name for adapter in engine.list_loras()] == ["a"]
        assert list(engine._core.executor.worker.runner.adapters._loaded) == ["a#1"]
        engine._core.scheduler.table.check()
    finally:
        engine.close()


def test_unloading_while_in_use_lets_the_request_end(folders, alone):
    engine = AsyncLLM(overrides={**SMALL, "lora.adapters": {"a": folders["a"]}})

    async def run():
        outputs = []
        async for output in engine.generate(PROMPT, GREEDY, "1", lora_request="a"):
            if not outputs:
                await engine.unload_lora("a")
            outputs.append(output)
        with pytest.raises(UnknownAdapter):
            [o async for o in engine.generate(PROMPT, GREEDY, "2", lora_request="a")]
        return list(outputs[-1].outputs[0].token_ids)

    try:
        assert asyncio.run(run()) == alone["a"]
        assert engine._core.executor.worker.runner.adapters._loaded == {}
    finally:
        engine.close()
