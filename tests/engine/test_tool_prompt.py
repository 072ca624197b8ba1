"""Models whose templates know no tools are told of them in words; the others get them as they are."""

from __future__ import annotations

import json

import pytest
import tiny_tokenizers as tiny

from minivllm.engine.tokenizer import TextTokenizer
from minivllm.errors import BadRequest
from minivllm.serve.tools import TOOL_PARSERS, choose, find
from minivllm.serve.tools.answer import ToolAnswer

CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "Hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "ü"}'}}
PAST = [
    USER,
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "one", "tool_call_id": "1"},
    {"role": "tool", "content": "two", "tool_call_id": "1"},
    {"role": "assistant", "content": "Good."},
    USER,
]


def tokenizer(template: str) -> TextTokenizer:
    return TextTokenizer(tiny.byte_level()._tokenizer, {}, {"default": template}, ())


def render(template: str, messages: list, **kwargs) -> str:
    return tokenizer(template).apply_chat_template(messages, **kwargs)


def test_a_template_that_knows_tools_gets_them():
    assert render(WITH_TOOLS, [USER], tools=[TOOL]) == json.dumps([TOOL]) + "<|user|>Hi\n"


def test_tools_are_described_in_a_system_message():
    text = render(CHATML, [USER], tools=[TOOL])
    assert text.startswith("<|system|>You can call") and text.endswith("<|user|>Hi\n")
    assert json.dumps(TOOL) in text
    text = render(CHATML, [{"role": "system", "content": "Be brief."}, USER], tools=[TOOL])
    assert text.startswith("<|system|>Be brief.\n\nYou can call") and text.count("<|system|>") == 1


def test_a_template_without_system_messages_has_them_told_by_the_user():
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
    text = render(refuses, [USER], tools=[TOOL])
    assert text.startswith("<|user|>You can call") and text.endswith("\n\nHi\n")
    with pytest.raises(BadRequest, match="no system role"):
        render(refuses, [{"role": "system", "content": "x"}, USER], tools=[TOOL])


def test_without_tools_nothing_changes():
    assert render(CHATML, [USER]) == render(CHATML, [USER], tools=[]) == "<|user|>Hi\n"


def test_past_calls_and_their_results_are_told_even_when_no_tools_are_offered_any_more():
    call = '<tool_call>\n{"name": "f", "arguments": {"x": "ü"}}\n</tool_call>'
    results = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    assert render(CHATML, PAST) == (
        f"<|user|>Hi\n<|assistant|>Let me see.\n{call}\n{call}\n<|user|>{results}\n<|assistant|>Good.\n<|user|>Hi\n"
    )


def test_a_call_as_it_is_told_reads_as_a_call_again():
    text = render("{{ messages[1].content }}", PAST)
    message = ToolAnswer(TOOL_PARSERS.get("hermes")({"f": {}})).message(text)
    assert message.content == "Let me see."
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"x": "ü"}] * 2


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "hermes"),
        ("{{ tools }}<tool_call>\n{...}\n</tool_call>", "hermes"),
        ("{{ tools }}<tool_call>\n<function=f>\n<parameter=x>", "qwen3_coder"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ('{{ tools }}Environment: ipython {"name": function name, "parameters": dictionary}', "llama3_json"),
        ("{{ tools }}<|python_tag|>", "llama3_json"),
        ("{{ tools }}<minimax:tool_call>", None),
    ],
)
def test_the_parser_is_chosen_from_what_the_template_writes(template, name):
    assert find(template).name == (name or "none")
    if template is not None:
        choice = choose("auto", tokenizer(template))
        assert (choice.name, choice.parser) == (name or "none", name and TOOL_PARSERS.get(name))


def test_a_parser_that_is_named_is_taken():
    assert choose("mistral", tokenizer(CHATML)).parser is TOOL_PARSERS.get("mistral")
    assert choose("auto", tokenizer(CHATML)).name == "hermes"


@pytest.mark.model
def test_the_default_model_is_told_in_words():
    from minivllm.loading import resolve

    smollm2 = TextTokenizer.load(resolve("smollm2-135m").tokenizer_dir)
    assert smollm2.tool_template is None
    text = smollm2.apply_chat_template([USER], tools=[TOOL])
    assert text.startswith("<|im_start|>system\nYou can call") and text.endswith("<|im_start|>assistant\n")
