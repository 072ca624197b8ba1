"""Models that think, over a real socket with the `openai` package. A fake engine writes what the test says."""

from __future__ import annotations

import json
from contextlib import ExitStack
from types import SimpleNamespace

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion

from minivllm.serve.reasoning import REASONING_PARSERS
from tests.serve.conftest import FakeEngine, LetterTokenizer, serving

HELLO = [{"role": "user", "content": "Hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TEXT = "<think>Let me\nsee.</think>\n\nYes."
SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
HARMONY = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"


class Tokenizer(LetterTokenizer):
    """Its template ends the prompt as the test says, and reads what the test says."""

    ending = ""

    def apply_chat_template(self, messages, **kwargs):
        return super().apply_chat_template(messages, **kwargs) + self.ending


@pytest.fixture(scope="module")
def servers():
    """By the name of the parser; "none" has none."""
    with ExitStack() as stack:

        def start(name):
            engine = FakeEngine()
            engine.tokenizer = Tokenizer()
            parser = None if name == "none" else REASONING_PARSERS.get(name)
            return SimpleNamespace(engine=engine, url=stack.enter_context(serving(engine, reasoning_parser=parser)))

        yield {name: start(name) for name in ("none", "qwen3", "deepseek_r1", "openai_gptoss")}


@pytest.fixture
def ask(servers):
    def ask(script, name="qwen3", ending="", variables=(), **fields):
        engine = servers[name].engine
        engine.reset()
        engine.script = [script] if isinstance(script, str) else script
        engine.tokenizer.ending, engine.tokenizer.template_variables = ending, frozenset(variables)
        ask.engine = engine
        client = openai.OpenAI(base_url=f"{servers[name].url}/v1", api_key="x", max_retries=0)
        return client.chat.completions.create(**{"model": "fake", "messages": HELLO, **fields})

    return ask


def parts(message):
    """(thinking, content) as a client reads them."""
    assert message.model_extra["reasoning"] == message.model_extra["reasoning_content"]
    return message.model_extra["reasoning"], message.content


def add_up(chunks):
    """(thinking, content, names of calls, finish reason)."""
    thought, content, calls, reason = "", "", [], None
    for chunk in chunks:
        for choice in chunk.choices:
            more = choice.delta.model_extra or {}
            assert more.get("reasoning") == more.get("reasoning_content")
            thought, content = thought + (more.get("reasoning") or ""), content + (choice.delta.content or "")
            calls += [part.function.name for part in choice.delta.tool_calls or () if part.id]
            reason = choice.finish_reason or reason
    return thought, content, calls, reason


def structured(ask, **fields):
    ask("x", **fields)
    return ask.engine.calls[-1].params.structured


def test_thinking_stands_beside_the_content(ask):
    reply = ask(TEXT)
    assert parts(reply.choices[0].message) == ("Let me\nsee.", "\n\nYes.")
    assert reply.choices[0].finish_reason == "stop"
    ChatCompletion.model_validate(reply.model_dump())


def test_a_stream_adds_up_to_the_whole_and_shows_no_marker(ask):
    chunks = list(ask(list(TEXT), stream=True))
    assert add_up(chunks) == ("Let me\nsee.", "\n\nYes.", [], "stop")
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.model_extra for chunk in chunks[1:10])


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_ends_inside_the_thinking_has_no_content(ask, stream):
    reply = ask(list("<think>Let me</th"), stream=stream)
    if stream:
        assert add_up(reply) == ("Let me</th", "", [], "stop")
    else:
        assert parts(reply.choices[0].message) == ("Let me</th", None)


def test_an_answer_without_thinking_says_so(ask):
    assert parts(ask("Yes.").choices[0].message) == (None, "Yes.")


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_may_be_left_out(ask, stream):
    reply = ask(list(TEXT), stream=stream, extra_body={"include_reasoning": False})
    if stream:
        assert add_up(reply)[:2] == ("", "\n\nYes.")
    else:
        message = reply.choices[0].message
        assert (message.content, message.model_extra) == ("\n\nYes.", {})
        assert reply.usage.completion_tokens_details.reasoning_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_comes_behind_the_thinking_and_never_out_of_it(ask, stream):
    text = f"<think>{CALL}</think>\n\n{CALL}"
    reply = ask(list(text), tools=TOOLS, stream=stream)
    if stream:
        assert add_up(reply) == (CALL, "", ["weather"], "tool_calls")
    else:
        choice = reply.choices[0]
        assert parts(choice.message) == (CALL, None) and choice.finish_reason == "tool_calls"
        assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"city": "Paris"}]


def test_the_prompt_may_have_begun_the_thinking_or_ended_it(ask):
    assert parts(ask("a</think>b", ending="<think>\n").choices[0].message) == ("a", "b")
    assert parts(ask("a</think>b", ending="<think>\n\n</think>\n\n").choices[0].message) == (None, "a</think>b")
    assert parts(ask("a</think>b", "deepseek_r1").choices[0].message) == ("a", "b")
    begun = [*HELLO, {"role": "assistant", "content": "Well,"}]
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    message = ask(" yes", "deepseek_r1", messages=begun, extra_body=goes_on).choices[0].message
    assert parts(message) == (None, " yes")


def test_reasoning_tokens_are_counted_with_their_markers(ask):
    expected = len(">Let me\nsee.</think>")  # letters are tokens here, and the last one of <think> begins it
    usage = ask(TEXT).usage
    assert usage.completion_tokens_details.reasoning_tokens == expected
    assert usage.completion_tokens == len(TEXT)
    *_, last = ask(list(TEXT), stream=True, stream_options={"include_usage": True})
    assert last.usage == usage


def test_without_a_parser_nothing_is_different(ask):
    reply = ask(TEXT, "none")
    assert (reply.choices[0].message.content, reply.choices[0].message.model_extra) == (TEXT, {})
    assert reply.usage.completion_tokens_details is None
    assert add_up(ask(list(TEXT), "none", stream=True)) == ("", TEXT, [], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_harmonys_channels_become_thinking_and_content(ask, stream):
    reply = ask(list(HARMONY), "openai_gptoss", stream=stream)
    if stream:
        assert add_up(reply) == ("Hm.", "Yes.", [], "stop")
    else:
        assert parts(reply.choices[0].message) == ("Hm.", "Yes.")


def test_markers_that_are_special_tokens_are_shown_in_the_text_and_known_to_the_grammar(ask, monkeypatch):
    ids = {"<|channel|>": 1, "<|message|>": 2, "<|end|>": 3, "<|start|>": 4}
    monkeypatch.setattr(Tokenizer, "special_ids", frozenset(ids.values()))
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **_: [ids[text]] if text in ids else [9, 9])
    ask(HARMONY, "openai_gptoss", response_format=SCHEMA)
    params = ask.engine.calls[-1].params
    assert params.skip_special_tokens is False
    prelude = params.structured.prelude
    assert prelude.endings == ((1, "final", 2),) and prelude.farewell == prelude.before == (3, 4, "assistant")
    ask(HARMONY, "openai_gptoss", extra_body={"thinking_token_budget": 5})
    assert ask.engine.calls[-1].params.structured.prelude.leavings == ((1, "commentary"),)
    ask(TEXT)
    assert ask.engine.calls[-1].params.skip_special_tokens is True


def test_a_grammar_begins_behind_the_thinking(ask):
    held = structured(ask, response_format=SCHEMA, ending="<think>\n")
    assert held.kind == "json" and held.prelude.endings == (("</think>",),) and held.prelude.openings == ()
    assert structured(ask, response_format=SCHEMA).prelude.openings == (
        "<think>",
    )  # the model decides whether to think
    assert structured(ask, response_format=SCHEMA, ending="<think></think>").prelude is None
    assert structured(ask, response_format=SCHEMA, name="none").prelude is None
    assert structured(ask) is None
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        assert structured(ask, tools=TOOLS, tool_choice=choice, ending="<think>\n").prelude.endings
    auto = structured(ask, tools=TOOLS, response_format=SCHEMA, ending="<think>\n")
    assert auto.calls and auto.prelude.leavings == ()


def test_a_forced_call_is_read_behind_the_thinking(ask):
    text = 'Hm.</think>[{"name": "weather", "parameters": {"city": "Rome"}}]'
    choice = ask(text, ending="<think>\n", tools=TOOLS, tool_choice="required").choices[0]
    assert parts(choice.message) == ("Hm.", None) and choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Rome"}'


def test_a_budget_is_a_prelude_of_so_many_tokens(ask):
    budget = structured(ask, extra_body={"thinking_token_budget": 7}, ending="<think>\n")
    assert (budget.kind, budget.prelude.max_tokens) == (None, 7)
    assert structured(ask, extra_body={"thinking_token_budget": -1}, ending="<think>\n") is None
    assert structured(ask, extra_body={"thinking_token_budget": 7}, ending="<think></think>") is None
    with pytest.raises(openai.BadRequestError, match="--reasoning-parser") as info:
        ask("x", "none", extra_body={"thinking_token_budget": 7})
    assert info.value.param == "thinking_token_budget"


def test_effort_goes_to_the_template_that_reads_it(ask):
    for variables, effort, told in (
        (["reasoning_effort"], "low", {"reasoning_effort": "low"}),
        (["enable_thinking", "x"], "high", {"enable_thinking": True}),
        (["enable_thinking"], "none", {"enable_thinking": False}),
        (["thinking", "messages"], "none", {"thinking": False}),
    ):
        ask("x", variables=variables, reasoning_effort=effort)
        rendered = ask.engine.tokenizer.rendered
        assert {key: rendered[key] for key in rendered if key not in ("messages", "tools", "template", "run")} == told
    ask("x", variables=["enable_thinking"], reasoning_effort="high",
        extra_body={"chat_template_kwargs": {"enable_thinking": False}})  # fmt: skip
    assert ask.engine.tokenizer.rendered["enable_thinking"] is False


def test_effort_that_no_template_reads_is_named_as_ignored(servers, ask):
    for name, effort, named in (("qwen3", "high", True), ("qwen3", "none", True), ("none", "none", False)):
        ask("x", name)
        body = {"messages": HELLO, "reasoning_effort": effort}
        reply = httpx.post(f"{servers[name].url}/v1/chat/completions", json=body)
        assert reply.headers.get("x-minivllm-ignored") == ("reasoning_effort" if named else None)


@pytest.fixture(scope="module")
def real():
    """A random model whose template opens the thinking."""
    from minivllm.engine.async_llm import AsyncLLM

    overrides = {"kv.num_blocks": 256, "model.dtype": "float32", "executor.num_threads": 1}
    engine = AsyncLLM("dummy:tiny", overrides=overrides, max_model_len=1024)
    engine.tokenizer.use_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}<think>\n")
    with serving(engine, reasoning_parser=REASONING_PARSERS.get("qwen3")) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
def test_a_real_engine_thinks_within_its_budget_and_then_follows_its_schema(real, stream):
    yes = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "yes", "schema": yes}}}
    asked = {"model": "fake", "messages": HELLO, "max_tokens": 150, "seed": 3, "stream": stream, **fields}
    reply = real.chat.completions.create(**asked, extra_body={"thinking_token_budget": 9})
    thought, content = add_up(reply)[:2] if stream else parts(reply.choices[0].message)
    assert thought and "</think>" not in thought and json.loads(content)["yes"] in (True, False)
    if not stream:
        assert 9 <= reply.usage.completion_tokens_details.reasoning_tokens <= 9 + len("</think>")
        assert reply.choices[0].finish_reason == "stop"


def test_a_real_engine_that_is_cut_off_while_it_thinks_says_so(real):
    choice = real.chat.completions.create(model="fake", messages=HELLO, max_tokens=5, seed=1).choices[0]
    assert choice.finish_reason == "length" and choice.message.content is None and parts(choice.message)[0]


def test_a_real_engine_calls_behind_its_thinking(real):
    tools = [{"type": "function", "function": {"name": "now"}}]
    choice = real.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=150, seed=2, tools=tools, tool_choice="required",
        parallel_tool_calls=False, extra_body={"thinking_token_budget": 4},
    ).choices[0]  # fmt: skip
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls[0].function.name == "now"
    assert parts(choice.message)[0]
