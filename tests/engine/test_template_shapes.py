"""A message reaches a template in the shape that the template takes, role by role and branch by branch. What the rules
below are for: public reports of other engines, and the templates that models are published with (tests/templates)."""

from __future__ import annotations

import random
from itertools import product
from types import SimpleNamespace

import msgspec
import pytest
from engine.test_tokenizer import with_template
from templates.conversations import draw
from templates.judge import fitting, judge

from minivllm.engine import template_budget
from minivllm.errors import BadRequest
from minivllm.serve import chat
from minivllm.serve.control_tokens import AsTokens
from minivllm.serve.protocol import ChatRequest
from minivllm.serve.tools.ask import asked

CALL = {"id": "call_0000", "type": "function", "function": {"name": "tide", "arguments": '{"port":"Brest"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

EACH = "{% for m in messages %}{{ '<' ~ m.role ~ '>' }}%s{% endfor %}{%% if tools %%}{{ tools | tojson }}{%% endif %%}"
CALLS = "{%% for c in m.tool_calls or [] %%}{{ '<call>' }}%s{%% endfor %%}"


def each(content: str = "{{ m.content }}", call: str = "") -> str:
    return EACH.replace("%s", content + (CALLS.replace("%s", call) if call else "")).replace("%%", "%")


# What published templates do, each in a few words of our own.
CONSTRUCTS = {
    "prints": each(),
    "adds": each("{{ m.content + '|' }}"),
    "loops": each("{% for part in m.content %}[{{ part.text }}]{% endfor %}"),
    "asks": each("{% if m.content is string %}{{ m.content }}{% else %}{% for p in m['content'] %}({{ p['text'] }})"
                 "{% endfor %}{% endif %}"),
    "loops for a role": each("{% if m.role == 'tool' and m.content is not string %}{% for r in m.content %}{{ r.output "
                             "if r.output is defined else r }}{% endfor %}{% else %}{{ m.content }}{% endif %}"),
    "strings for a role": each("{% if m.role == 'user' %}{% for p in m.content %}{{ p.text }}{% endfor %}{% elif "
                               "m.content is string and m.content | trim %}{{ m.content }}{% endif %}"),
    "first part": each("{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}"),
    "json": each("{% if m.content is not string %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}"),
    "maps": each("{{ m.content | map(attribute='text') | join }}"),
    "splits": each("{{ m.content.split('</think>')[-1].lstrip('\\n') if m.content else '' }}"),
    "block": each("{% set text %}{{ m.content | trim }}{% endset %}{{ text.split('</think>') | last }}"),
    "macro": "{% macro say(c) %}{{ c.rsplit('</think>', 1)[-1] }}{% endmacro %}" + each("{{ say(m.content or '') }}"),
    "thinks": each("{% if m.reasoning_content %}<t>{{ m.reasoning_content }}</t>{% endif %}{{ m.content }}"),
    "thinking": each("{% if 'thinking' in m and not m.tool_calls %}<t>{{ m.thinking }}</t>{% endif %}{{ m.content }}"),
    "text": each(call="{{ c['function']['name'] + c['function']['arguments'] + '|' }}"),
    "object": each(call="{{ c.function.name }}{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};"
                        "{% endfor %}"),
    "items": each(call="{% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }};{% endfor %}"),
    "keys": each(call="{% for k in c.function.arguments %}{{ k }}={{ c.function.arguments[k] | tojson }};{% endfor %}"),
    "sorted": each(call="{% for k, v in c.function.arguments | dictsort %}{{ k }}={{ v | tojson }};{% endfor %}"),
    "as json": each(call="{{ c.function.arguments | tojson }}"),
    "whole": each(call="{{ c.function | tojson }}"),
    "string first": each(call="{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}"),
    "mapping first": each(call="{% set a = c.function.arguments %}{% if a is mapping %}{% for k in a %}{{ k }};"
                               "{% endfor %}{% elif a is string %}{{ a }}{% endif %}"),
    "must be mapping": each(call="{% set a = c.function.arguments or {} %}{% if a is not mapping %}"
                                 "{{ raise_exception('no mapping') }}{% endif %}{{ a | tojson }}"),
    "no such filter": each(call="{% set a = c.function.arguments %}{% if a is string %}{% set a = a | from_json %}"
                                "{% endif %}{{ a | tojson }}"),
    "null": each("{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}{{ c.function.name + "
                 "c.function.arguments }}{% endfor %}{% else %}{{ m.content.strip() }}{% endif %}"),
    "no calls": each("{% if m.role == 'tool' %}{{ '[result]' + m.content }}{% else %}{{ m.content }}{% endif %}"),
    "generation": each("{% generation %}{{ m.content }}{% endgeneration %}"),
    "markup": each("{{ '\\'<i>\\''|safe + m.role + '</i>'|safe }}{{ m.content }}"),
    "filters none": "{{ tools | selectattr('type') | list | length }}" + each(),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_a_template_makes_what_it_does_in_transformers(name):
    rng = random.Random(name)
    conversations = [fitting(CONSTRUCTS[name], draw(rng)) for _ in range(8)]
    verdicts = [judge(CONSTRUCTS[name], conversation) for conversation in conversations if conversation is not None]
    assert [verdict for verdict in verdicts if not verdict.ok] == []
    assert any(verdict.what != "refused" for verdict in verdicts)


def test_a_request_reaches_the_template_as_the_same_messages_do_from_python():
    rng = random.Random(1)
    template = CONSTRUCTS["asks"] + CONSTRUCTS["text"] + CONSTRUCTS["thinks"]
    tokenizer = with_template(template)
    for _ in range(50):
        conversation = draw(rng)
        named = {
            "messages": conversation.messages,
            "tools": conversation.tools,
            "chat_template_kwargs": conversation.variables,
            "continue_final_message": conversation.continued,
        }
        body = msgspec.convert({"model": "m", **named}, ChatRequest)
        service = SimpleNamespace(engine=SimpleNamespace(tokenizer=tokenizer), control_tokens=AsTokens())
        assert chat.render(body, asked(body), service) == tokenizer.apply_chat_template(  # type: ignore[arg-type]
            conversation.messages,
            not conversation.continued,
            conversation.continued,
            conversation.tools,
            variables=conversation.variables,
        )


def render(template: str, *messages, **kwargs) -> str:
    return with_template(template).apply_chat_template(messages, **kwargs)


# What each report was about


@pytest.mark.parametrize("method", ["split", "rsplit"])
@pytest.mark.parametrize("around", ["{% for m in messages %}CALL{% endfor %}", "{% set m = messages[0] %}"
                                    "{% block b scoped %}CALL{% endblock %}"])  # fmt: skip
def test_what_jinja_adds_to_a_call_within_a_loop_or_a_block_is_not_the_templates(method, around):
    call = f"{{{{ m.content.{method}()[0] ~ m.content.{method}('b')[-1] ~ m.content.{method}('b', 1)[0] }}}}"
    assert render(around.replace("CALL", call), {"role": "user", "content": "a b c"}) == "a ca "


def test_a_string_stays_one_where_the_template_takes_strings():
    template = CONSTRUCTS["loops for a role"]
    conversation = [{"role": "user", "content": "hi"}, CALLED, {"role": "tool", "content": "14:20"}]
    assert render(template, *conversation) == "<user>hi<assistant><tool>14:20"
    in_parts = {"role": "tool", "content": [{"type": "text", "text": "14:20"}]}
    assert render(template, *conversation[:2], in_parts) == "<user>hi<assistant><tool>14:20"


def test_arguments_are_the_text_that_was_sent_or_an_object_as_the_template_takes_them():
    assert render(CONSTRUCTS["text"], CALLED) == '<assistant><call>tide{"port":"Brest"}|'
    assert render(CONSTRUCTS["string first"], CALLED) == '<assistant><call>{"port":"Brest"}'
    assert render(CONSTRUCTS["as json"], CALLED) == '<assistant><call>{"port": "Brest"}'
    assert render(CONSTRUCTS["mapping first"], CALLED) == "<assistant><call>port;"


def test_arguments_from_python_may_be_an_object():
    call = {"function": {"name": "tide", "arguments": {"port": "Brest"}}}
    message = {"role": "assistant", "tool_calls": [call]}
    assert render(CONSTRUCTS["text"], message) == '<assistant><call>tide{"port": "Brest"}|'
    assert render(CONSTRUCTS["items"], message) == '<assistant><call>port="Brest";'


def test_arguments_that_are_not_json_are_the_one_argument_to_a_template_that_needs_an_object_and_to_no_other():
    call = {**CALL, "function": {"name": "tide", "arguments": '{"port":'}}
    message = {"role": "assistant", "tool_calls": [call]}
    assert render(CONSTRUCTS["text"], message) == '<assistant><call>tide{"port":|'
    assert render(CONSTRUCTS["items"], message) == '<assistant><call>arguments="{\\"port\\":";'


def test_calls_and_results_are_written_by_a_template_that_never_reads_tools():
    template = CONSTRUCTS["null"].replace("{% if tools %}{{ tools | tojson }}{% endif %}", "")
    assert "tools" not in template.replace("tool_calls", "")
    conversation = [{"role": "user", "content": "hi"}, CALLED, {"role": "tool", "content": "14:20"}]
    assert render(template, *conversation) == '<user>hi<assistant>tide{"port":"Brest"}<tool>14:20'


def test_calls_are_told_in_words_where_a_template_names_the_role_of_results_to_refuse_it():
    refuses = "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content }}"
    template = each(refuses).replace("{% if tools %}{{ tools | tojson }}{% endif %}", "")
    told = render(template, {"role": "user", "content": "hi"}, CALLED, {"role": "tool", "content": "14:20"})
    assert told.endswith("<user><tool_response>\n14:20\n</tool_response>") and "<tool_call>" in told


def test_a_part_of_a_content_that_a_template_would_pass_over_is_in_the_prompt():
    assert render(CONSTRUCTS["first part"], {"role": "user", "content": PARTS}) == "<user>a\nb"
    assert render(CONSTRUCTS["strings for a role"], {"role": "system", "content": PARTS}) == "<system>a\nb"


def test_a_developer_is_the_system_to_a_template_that_does_not_know_the_role():
    message = {"role": "developer", "content": "Be brief."}
    assert render(CONSTRUCTS["prints"], message) == "<system>Be brief."
    assert render("{% if 'developer' == messages[0].role %}D{% endif %}" + CONSTRUCTS["prints"], message)[0] == "D"


def test_thinking_has_the_name_that_the_template_has_for_it():
    message = {"role": "assistant", "content": "7", "reasoning_content": "hm"}
    for name, sent in product(("reasoning_content", "thinking"), ("reasoning_content", "reasoning")):
        template = each("{{ m." + name + " }}")
        assert render(template, {"role": "assistant", "content": "7", sent: "hm"}) == "<assistant>hm"
    assert (
        render(each("{{ m.reasoning }}"), {"role": "assistant", "content": "7", "reasoning": "hm"}) == "<assistant>hm"
    )
    both = "{% if m.thinking and m.content %}{{ raise_exception('one of both') }}{% endif %}{{ m.content }}"
    assert render(each(both), message) == "<assistant>7"


def test_a_content_that_is_null_is_not_there_and_writes_nothing():
    assert render(CONSTRUCTS["prints"], CALLED) == "<assistant>"
    assert render(CONSTRUCTS["adds"], CALLED) == "<assistant>|"
    assert render(each("{{ m.content is defined }}"), CALLED) == "<assistant>False"


def test_all_that_is_tried_of_one_conversation_shares_one_budget(monkeypatch):
    monkeypatch.setattr(template_budget, "MAX_STEPS", 100)
    template = "{% for i in range(60) %}{% endfor %}{{ messages[0].content.no.such }}"
    messages = [{"role": "user", "content": PARTS}, CALLED]
    with pytest.raises(BadRequest, match="no attribute|steps"):
        render(template, *messages)
    begun = []
    monkeypatch.setattr(template_budget.Budget, "step", lambda budget: begun.append(id(budget)))
    with pytest.raises(BadRequest, match="no attribute"):
        render(template, *messages)
    assert len(begun) > 60 and len(set(begun)) == 1


def test_the_option_decides_for_all_contents():
    tokenizer = with_template(CONSTRUCTS["loops"])
    tokenizer.use_content_format("string")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "<user>[][]"  # letters have no text
    tokenizer = with_template(each("{{ m.content[0].text }}"))
    tokenizer.use_content_format("openai")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "<user>hi"


def test_parts_are_continued_and_told_of_tools():
    tokenizer = with_template("{% for m in messages %}[{% for p in m.content %}<{{ p.text }}>{% endfor %}]{% endfor %}")
    messages = [{"role": "user", "content": PARTS}, {"role": "assistant", "content": PARTS[:1]}]
    assert tokenizer.apply_chat_template(messages, False, True) == "[<a><b>][<a"
    told = tokenizer.apply_chat_template(messages[:1], tools=[{"type": "function", "function": {"name": "look"}}])
    assert told.endswith("[<a\nb>]") and '"name": "look"' in told


@pytest.mark.parametrize("name", ["chat", "tools", "template", "messages", "run", "content_format", "values"])
def test_a_variable_of_a_template_may_have_any_name(name):
    text = render("{{ " + name + " }}" + each(), {"role": "user", "content": "hi"}, variables={name: "x"})
    assert text.startswith("x" if name not in ("tools", "messages") else ("None", "[{"))


@pytest.mark.parametrize("name", ["_other", "_items", "_seen", "_is", "__class__", "_as_json"])
def test_what_makes_two_shapes_of_a_value_is_out_of_a_templates_reach(name):
    reach = f"{{{{ m.content.{name} }}}}{{{{ m.content['{name}'] }}}}{{{{ (m.content | attr('{name}')) }}}}"
    for content in ("hi", PARTS):
        with pytest.raises(BadRequest, match="unsafe|no attribute"):
            render(each(reach + "{{ m.content." + name + ".x }}"), {"role": "user", "content": content})
