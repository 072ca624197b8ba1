"""A format is found by what the chat template writes. The snippets are ours, in each model's notation."""

from __future__ import annotations

import json

import pytest

from minivllm.serve.tools import TOOL_PARSERS, find
from minivllm.serve.tools.values import from_python, from_text, types_of

TEMPLATES = {
    "mistral": "{{ '[TOOL_CALLS]' + calls }}",
    "qwen3_coder": "<tool_call>\\n<function={{ call.name }}>\\n<parameter={{ key }}>",
    "glm45": "<tool_call>{{ call.name }}\\n<arg_key>{{ key }}</arg_key>\\n<arg_value>{{ value }}</arg_value>",
    "hermes": '<tool_call>\\n{"name": {{ call.name }}, "arguments": {{ call.arguments }}}\\n</tool_call>',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ call.type }}<｜tool▁sep｜>{{ call.name }}",
    "deepseek_v32": '<｜DSML｜function_calls>\\n<｜DSML｜invoke name="{{ call.name }}">',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>",
    "openai": "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>{}<|call|>",
    "cohere_command": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": {{ call.name }}, "parameters": {}}]',
    "phi4_mini_json": 'prefix calls with functools, as functools[{"name": ..., "arguments": ...}]',
    "granite": "respond with <|tool_call|> and a list. <|start_of_role|>assistant<|end_of_role|><|tool_call|>",
    "granite-20b-fc": "<|function_call_library|>{{ tools }} ASSISTANT: <function_call> {{ call | tojson }}",
    "internlm": "<|im_start|>assistant\\n<|action_start|><|plugin|>\\n{{ call }}<|action_end|>",
    "pythonic": "Environment: ipython. Answer as [func_name1(params_name1=params_value1), func_name2(params)]",
    "llama3_json": 'Environment: ipython {"name": function name, "parameters": dictionary} <|python_tag|>',
}
MORE = {
    "deepseek_v32": "{{ '<' + '｜DSML｜' + 'invoke name=' }}",
    "cohere_command": 'Write "Action:" and a list: {"tool_name": ..., "parameters": ...}',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>arguments<｜tool▁call▁end｜>",
    "llama3_json": 'Environment: ipython {"name": function name, "parameters": dictionary}',
}


@pytest.mark.parametrize(("name", "template"), [*TEMPLATES.items(), *MORE.items()])
def test_a_template_is_of_one_format(name, template):
    assert find("{{ tools }}" + template).name == name


def test_a_parser_is_found_by_a_template_or_is_another_name_of_one_that_is():
    found = {TOOL_PARSERS.get(name) for name in TEMPLATES}
    assert all(TOOL_PARSERS.get(name) in found for name in TOOL_PARSERS.names())
    firsts = dict.fromkeys(TOOL_PARSERS.get(name) for name in TOOL_PARSERS.names())
    assert len(firsts) == len(TEMPLATES)


def test_a_template_in_no_format_that_is_known_has_no_parser():
    assert (
        find("{{ tools }}<minimax:tool_call>").parser is find("{{ tools }}<seed:tool_call><function=f>").parser is None
    )


CIRCLE = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}, {"type": "integer"}]}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"type": "null"}]}]}, {"string", "null"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"const": True}, {"boolean"}),
        ({"$ref": "#/$defs/a"}, {"integer"}),
        ({"$ref": "#/$defs/none"}, set()),
        ({"type": 5, "anyOf": {}, "enum": 1}, set()),
        (True, set()),
    ],
)
def test_a_parameters_types_are_those_that_its_schema_allows(schema, types):
    assert types_of({"properties": {"x": schema}, "$defs": {"a": CIRCLE}}, "x") == types
    assert types_of({}, "x") == types_of({"properties": 5}, "x") == frozenset()


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"string"}, "5"),
        ("5", {"integer"}, 5),
        ("5", {"number"}, 5),
        ("5.0", {"integer"}, 5.0),
        ("5.5", {"integer"}, "5.5"),
        ("True", {"boolean"}, True),
        ("true", {"boolean"}, True),
        ("1", {"boolean"}, "1"),
        ("None", {"string", "null"}, None),
        ("null", {"null", "integer"}, None),
        ("nothing", {"string", "null"}, "nothing"),
        ("{'a': [True, 'x']}", {"object"}, {"a": [True, "x"]}),
        ('{"a": null}', {"object"}, {"a": None}),
        ("[1, 2", {"array"}, "[1, 2"),
        ("NaN", {"number"}, "NaN"),
        ("5", set(), 5),
        ("(1, 2)", set(), "(1, 2)"),
        ("Paris", set(), "Paris"),
    ],
)
def test_a_text_becomes_what_its_schema_allows_or_stays_a_text(text, types, value):
    assert json.loads(from_text(text, frozenset(types))) == value


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("'5'", {"integer"}, 5),
        ("'5'", {"string"}, "5"),
        ("'5'", set(), "5"),
        ("5", {"string"}, 5),
        ("true", set(), True),
        ("[None, {'a': (1,)}]", set(), [None, {"a": [1]}]),
    ],
)
def test_a_literal_is_what_it_is_unless_quotes_hide_another_type(text, types, value):
    assert json.loads(from_python(text, frozenset(types))) == value


@pytest.mark.parametrize("text", ["Paris", "{1}", "b'x'", "f()", "1e999", "'\\ud800'", "(" * 500, ""])
def test_what_is_no_literal_of_jsons_is_refused(text):
    with pytest.raises(ValueError):
        from_python(text, frozenset())
