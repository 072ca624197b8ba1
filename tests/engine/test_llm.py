import pytest

from minivllm import LLM, SamplingParams
from minivllm.config import PRESETS
from minivllm.errors import BadRequest, NeverFits, UserError

SMALL = {"kv.num_blocks": 60, "kv.block_size": 8, "executor.num_threads": 1, "debug.check": True}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with LLM("dummy:tiny", dtype="float32", max_num_seqs=8, overrides=SMALL) as llm:
        yield llm


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_prompts_may_be_text_ids_or_dictionaries(llm):
    ids = llm.get_tokenizer().encode("hello there")
    forms = ["hello there", {"prompt": "hello there"}, {"prompt_token_ids": ids}, ids]
    outputs = [llm.generate(form, GREEDY, use_tqdm=False)[0] for form in forms]
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    assert all(o.prompt_token_ids == ids for o in outputs)
    assert [o.prompt for o in outputs] == ["hello there", "hello there", None, None]


def test_a_chat_tells_the_model_of_its_tools(llm):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    messages = [{"role": "user", "content": "Hi"}]
    plain, told = (llm.chat(messages, GREEDY, use_tqdm=False, **kwargs)[0] for kwargs in ({}, {"tools": tools}))
    decode = llm.get_tokenizer().decode
    assert '"name": "f"' in decode(told.prompt_token_ids) and '"f"' not in decode(plain.prompt_token_ids)


def test_a_list_of_ids_is_one_prompt_and_a_list_of_lists_is_several(llm):
    assert len(llm.generate([5, 6, 7], GREEDY, use_tqdm=False)) == 1
    assert len(llm.generate([[5, 6, 7], [5, 6]], GREEDY, use_tqdm=False)) == 2
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = [[i + 1] * (30 - i) for i in range(20)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + i % 7, ignore_eos=True) for i in range(20)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(t) for t in tokens(outputs)] == [1 + i % 7 for i in range(20)]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)


def test_a_batch_gives_what_each_prompt_gives_alone(llm):
    prompts = [[i + 1, 2, 3] for i in range(6)]
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=8) for i in range(6)]
    together = tokens(llm.generate(prompts, params, use_tqdm=False))
    alone = [tokens(llm.generate([p], s, use_tqdm=False))[0] for p, s in zip(prompts, params, strict=True)]
    assert together == alone


def test_n_gives_n_different_choices_that_repeat_with_the_seed(llm):
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    first, second = (llm.generate([[9, 8, 7]], params, use_tqdm=False)[0].outputs for _ in range(2))
    assert [o.index for o in first] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in first}) == 3
    assert [o.token_ids for o in first] == [o.token_ids for o in second]


def test_one_bad_prompt_refuses_the_call_and_leaves_nothing_behind(llm):
    for prompts, error in (([[1], []], BadRequest), ([[1], [2] * 5000], NeverFits), ([[1], [10**6]], BadRequest)):
        with pytest.raises(error):
            llm.generate(prompts, GREEDY, use_tqdm=False)
    with pytest.raises(BadRequest, match="2 prompts, but 1 of sampling_params"):
        llm.generate([[1], [2]], [GREEDY], use_tqdm=False)
    assert not llm._core.has_work and not len(llm._front.processor)
    assert len(llm.generate([[1]], GREEDY, use_tqdm=False)) == 1


def test_an_interrupt_leaves_nothing_behind(llm, monkeypatch):
    step, calls = llm._core.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(type(llm._core), "step", lambda self: interrupted())
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2], [3, 4]], GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert not llm._core.has_work and llm._core.scheduler.base.kv.usage.num_free == 60


def test_chat_renders_the_template_and_continues_a_message(llm):
    messages = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert len(llm.chat([messages, messages], GREEDY, use_tqdm=False)) == 2
    text = llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True)
    assert one.prompt_token_ids == llm.get_tokenizer().encode(text, add_special_tokens=False)
    begun = [*messages, {"role": "assistant", "content": "well"}]
    (going_on,) = llm.chat(begun, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert llm.get_tokenizer().decode(going_on.prompt_token_ids).endswith("well")


def test_logprobs_agree_with_prompt_logprobs_of_the_same_text(llm):
    """Two ways to the same numbers: as they were drawn, and scored afterwards, in chunks."""
    drawn = llm.generate([[4, 5, 6]], GREEDY.replace(logprobs=0), use_tqdm=False)[0]
    text = drawn.prompt_token_ids + list(drawn.outputs[0].token_ids)
    scored = llm.generate([text], GREEDY.replace(max_tokens=1, prompt_logprobs=2), use_tqdm=False)[0]
    assert scored.prompt_logprobs[0] is None and len(scored.prompt_logprobs) == len(text)
    for token, a, b in zip(text[3:], drawn.outputs[0].logprobs, scored.prompt_logprobs[3:], strict=True):
        # fp32 in another order of summation: a few units in the last place of logits of order 1
        assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-4)


def test_prompt_logprobs_survive_chunks_and_preemption():
    prompt = list(range(1, 40))
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1)
    found = []
    for extra in ({}, {"scheduler.max_num_batched_tokens": 7, "debug.preempt_every": 3}):
        with LLM("dummy:tiny", dtype="float32", overrides={**SMALL, **extra}) as llm:
            output = llm.generate([prompt], params, use_tqdm=False)[0]
            found.append([[(t, round(x.logprob, 3)) for t, x in e.items()] for e in output.prompt_logprobs[1:]])
    assert found[0] == found[1] and len(found[0]) == 38


def test_broken_logits_end_one_request_and_no_other(llm):
    runner = llm._core.executor.worker.runner
    logits = runner.model.logits

    def poisoned(hidden):
        out = logits(hidden)
        out[0] = float("nan")
        return out

    runner.model.logits = poisoned
    try:
        bad, good = llm.generate([[1, 2], [3, 4]], GREEDY.replace(max_tokens=1), use_tqdm=False)
    finally:
        runner.model.logits = logits
    assert bad.outputs[0].finish_reason == "error" and "NaN" in bad.error
    assert good.outputs[0].finish_reason == "length" and good.error is None


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"model": "dummy:tny"}, "tiny"),
        ({"model": "/no/such/folder"}, "/no/such/folder"),
        ({"max_model_len": 10**6}, "at most"),
        ({"overrides": {"kv.num_blocks": 4}, "max_model_len": 1000}, "the KV pool holds"),
        ({"overrides": {"kv.memory": "10 bananas"}}, "no size"),
        ({"device": "cuda"}, "no CUDA device"),
        ({"enforce_egaer": True}, "enforce_egaer"),
    ],
)
def test_a_wrong_start_says_what_is_wrong(kwargs, message):
    with pytest.raises(UserError) as e:
        LLM(**{"model": "dummy:tiny", **kwargs})
    assert message in str(e.value)


def test_the_pool_bounds_the_length_and_says_so():
    with LLM("dummy:tiny", overrides={**SMALL, "kv.num_blocks": 5}) as llm:
        assert llm.max_model_len == 41
        (decision,) = [d for d in llm.decisions if d.field == "model.max_model_len"]
        assert "what the KV pool holds" in decision.reason
        (output,) = llm.generate([[1] * 30], GREEDY.replace(max_tokens=100), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 11 and output.outputs[0].finish_reason == "length"


def test_kv_waste_is_at_most_one_block_a_request(llm):
    seen = []
    on_step = type("Watch", (), {"on_step": lambda self, plan, *_: seen.append(plan.stats)})()
    for name in ("on_start", "on_add", "on_abort", "close"):
        setattr(type(on_step), name, lambda self, *_: None)
    llm._core.observers.append(on_step)
    llm.generate([[i + 1] * (i * 3 + 1) for i in range(8)], GREEDY.replace(max_tokens=20), use_tqdm=False)
    llm._core.observers.remove(on_step)
    for stats in seen:
        held = (stats.num_total_blocks - stats.num_free_blocks) * 8
        assert held - stats.num_used_slots < 8 * stats.num_running


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_gives_the_same_sequences(preset, llm):
    """n = 3 is a group that forks under V0's scheduler and three requests elsewhere; the tokens are the same."""
    params = SamplingParams(n=3, temperature=1.0, top_p=0.9, seed=11, max_tokens=9, ignore_eos=True)
    prompts = [[i + 1] * (5 + 3 * i) for i in range(4)]
    wanted = llm.generate(prompts, params, use_tqdm=False)
    with LLM("dummy:tiny", dtype="float32", max_num_seqs=8, preset=preset, overrides=SMALL) as other:
        got = other.generate(prompts, params, use_tqdm=False)
    for a, b in zip(wanted, got, strict=True):
        assert [c.token_ids for c in a.outputs] == [c.token_ids for c in b.outputs]
