"""Rules: a template that goes through a message's content gets OpenAI's parts, any other a string; an option decides
otherwise. What counts as going through it is what vLLM's detection finds (entrypoints/chat_utils.py, 0.32)."""

from __future__ import annotations

import pytest
from engine.test_tokenizer import with_template

from minivllm.engine.content_format import reads_parts

PRINTS = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
LOOPS = "{% for m in messages %}[{% for part in m['content'] %}<{{ part.text }}>{% endfor %}]{% endfor %}"
TWO_PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (PRINTS, False),
        (LOOPS, True),
        ("{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}", True),
        (
            "{% for m in messages %}{% set c = m.content %}{% for part in c | list %}{{ part.text }}{% endfor %}"
            "{% endfor %}",
            True,
        ),
        ("{% for m in messages %}{% for part in m.content[1:] %}{{ part.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages[1:] %}{{ m.content }}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}", False),
        ("{% for", False),
    ],
)
def test_a_loop_over_the_content_is_found(template, found):
    assert reads_parts(template) == found


def test_each_template_gets_what_it_reads():
    assert with_template(PRINTS).apply_chat_template(TWO_PARTS) == "[a\nb]"
    assert with_template(LOOPS).apply_chat_template(TWO_PARTS) == "[<a><b>]"
    assert with_template(LOOPS).apply_chat_template([{"role": "user", "content": "hi"}]) == "[<hi>]"


def test_the_option_decides_otherwise():
    tokenizer = with_template(LOOPS)
    tokenizer.use_content_format("string")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "[<><>]"  # its characters have no text
    tokenizer = with_template("{% for m in messages %}{{ m.content[0].text }}{% endfor %}")
    tokenizer.use_content_format("openai")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi"


def test_parts_are_continued_and_told_of_tools():
    tokenizer = with_template(LOOPS)
    messages = [*TWO_PARTS, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}]
    arguments = {"add_generation_prompt": False, "continue_final_message": True}
    assert tokenizer.apply_chat_template(messages, **arguments) == "[<a><b>][<x"
    told = tokenizer.apply_chat_template(TWO_PARTS, tools=[TOOL])
    assert told.endswith("[<a\nb>]") and '"name": "look"' in told
