"""Every format of thinking, read whole and in pieces. The rule: how a text is cut on its way makes no difference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.errors import ConfigError
from minivllm.serve.reasoning import REASONING_PARSERS, choose, find
from minivllm.serve.reasoning.reader import Start, Thought

FRESH, INSIDE, BEHIND = Start.FRESH, Start.INSIDE, Start.BEHIND
MARKERS = [
    "<think>", "</think>", "[THINK]", "[/THINK]", "Here is my thought process:", "Here's my response:",
    "<|channel|>", "analysis", "final", "commentary", "commentary to=functions.f ", "<|constrain|>json", "<|message|>",
    "<|end|>", "<|start|>assistant", "<|call|>", "<|return|>",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from([*MARKERS, *"ab <>[/H\n"]), max_size=14).map("".join)
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"


def read(name, pieces, start=FRESH):
    """(thinking, the rest)."""
    reader = REASONING_PARSERS.get(name)(start)
    thought = rest = ""
    for event in [event for piece in pieces for event in reader.push(piece)] + reader.end():
        if isinstance(event, Thought):
            thought += event.text
        else:
            rest += event.text
    return thought, rest


CASES = [
    ("qwen3", FRESH, "<think>\na < b\n</think>\n\nYes", ("\na < b\n", "\n\nYes")),
    ("qwen3", FRESH, "\n<think>a</think>b", ("a", "b")),
    ("qwen3", FRESH, "Yes, <think> is a tag", ("", "Yes, <think> is a tag")),
    ("qwen3", FRESH, "<think>a</think>b</think><think>c", ("a", "b</think><think>c")),
    ("qwen3", FRESH, "<think>cut off", ("cut off", "")),
    ("qwen3", FRESH, "<think>cut off</thin", ("cut off</thin", "")),
    ("qwen3", FRESH, "<thin", ("", "<thin")),
    ("qwen3", INSIDE, "a</think>b", ("a", "b")),
    ("qwen3", INSIDE, "<think>a</think>b", ("a", "b")),
    ("qwen3", BEHIND, "<think>a</think>b", ("", "<think>a</think>b")),
    ("qwen3", FRESH, "<think></think><tool_call>{}</tool_call>", ("", "<tool_call>{}</tool_call>")),
    ("deepseek_r1", FRESH, "a</think>b", ("a", "b")),
    ("deepseek_r1", FRESH, "<think>a</think>b", ("a", "b")),
    ("deepseek_r1", FRESH, "never ended", ("never ended", "")),
    ("deepseek_r1", BEHIND, "b", ("", "b")),
    ("mistral", FRESH, "[THINK]a[/THINK]b", ("a", "b")),
    ("mistral", FRESH, "Well [THINK]a[/THINK]b[THINK]", ("a", "Well b[THINK]")),
    ("mistral", FRESH, "no thinking", ("", "no thinking")),
    ("mistral", FRESH, "a[/THINK]b", ("", "ab")),
    ("mistral", INSIDE, "a[/THINK]b", ("a", "b")),
    ("granite", FRESH, "Here is my thought process: a Here is my response: b", (" a ", " b")),
    ("granite", FRESH, "Here's my thought process: a Here's my response: b", (" a ", " b")),
    ("granite", FRESH, "Here is my thought process: Here is mine", (" Here is mine", "")),
    ("granite", FRESH, "Here is my response: b", ("", "Here is my response: b")),
    ("openai_gptoss", FRESH, f"{ANALYSIS}a{NEXT}{FINAL}b<|return|>", ("a", "b")),
    ("openai_gptoss", FRESH, f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c", ("a\nb", "c")),
    ("openai_gptoss", FRESH, f"{FINAL}b", ("", "b")),
    ("openai_gptoss", FRESH, "<|channel|>final <|constrain|>json<|message|>{}", ("", "{}")),
    ("openai_gptoss", FRESH, f"{ANALYSIS}cut", ("cut", "")),
    ("openai_gptoss", FRESH, f"{ANALYSIS}a{NEXT}<|channel|>fin", ("a", "")),
    ("openai_gptoss", FRESH, f"{ANALYSIS}a{NEXT}{CALL}", ("a", CALL)),
    ("openai_gptoss", FRESH, f"{ANALYSIS}a{NEXT}{CALL}"[:-8], ("a", CALL[:-8])),  # the engine stops at <|call|>
    ("openai_gptoss", FRESH, f"<|channel|>commentary<|message|>Look:{NEXT}{CALL}", ("", f"Look:{CALL}")),
    ("openai_gptoss", FRESH, f"<|channel|>commentary<|message|>a{NEXT}{FINAL}b", ("", "a\nb")),
    ("openai_gptoss", FRESH, f"{CALL}<|start|>assistant{CALL}", ("", CALL + CALL)),
    ("openai_gptoss", FRESH, ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', ("", CALL)),
    ("openai_gptoss", FRESH, f"{ANALYSIS}a<|channel|>final<|message|>b", ("a", "b")),  # an <|end|> is forgotten
    ("openai_gptoss", FRESH, "Hello", ("", "Hello")),
    ("openai_gptoss", FRESH, "to=x", ("", "to=x")),
    ("openai_gptoss", INSIDE, f"a{NEXT}{FINAL}b", ("a", "b")),
    ("openai_gptoss", BEHIND, "b<|return|>", ("", "b")),
]


@pytest.mark.parametrize(("name", "start", "text", "parts"), CASES)
def test_a_format_is_read_wherever_it_is_cut(name, start, text, parts):
    assert read(name, [text], start) == parts
    assert read(name, text, start) == parts
    for i in range(len(text)):
        assert read(name, [text[:i], text[i:]], start) == parts


@pytest.mark.parametrize("name", REASONING_PARSERS.names())
@pytest.mark.parametrize("start", Start)
@settings(max_examples=80, deadline=None)
@given(text=TEXTS, places=st.lists(st.integers(0, 200), max_size=12))
def test_any_text_is_read_alike_however_it_is_cut(name, start, text, places):
    places = sorted({place % (len(text) + 1) for place in places})
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert read(name, pieces, start) == read(name, [text], start) == read(name, text, start)


BARE = '<|channel|>{} to=tide <|constrain|>json<|message|>{{"port": "Brest"}}<|call|>'


@pytest.mark.parametrize("channel", ["commentary", "analysis"])
def test_a_call_of_an_offered_tool_is_no_thinking_though_its_namespace_is_missing(channel):
    text = f"{ANALYSIS}Hm.{NEXT}{BARE.format(channel)}"
    for pieces in [text], text:
        reader = REASONING_PARSERS.get("openai_gptoss")(FRESH, {"tide"})
        events = [event for piece in pieces for event in reader.push(piece)] + reader.end()
        assert "".join(event.text for event in events if isinstance(event, Thought)) == "Hm."
        assert "".join(event.text for event in events if not isinstance(event, Thought)) == BARE.format(channel)


@pytest.mark.parametrize("begin", ["<|tool_calls_section_begin|>", "<|tool_call_begin|>"])
def test_a_call_of_kimi_ends_the_thinking_where_tools_are_offered(begin):
    call = f'{begin}functions.tide:0<|tool_call_argument_begin|>{{"port": "Brest"}}<|tool_call_end|>'
    text = f"<think>Hm.{call}"
    for pieces in [text], text:
        for functions, parts in (({"tide"}, ("Hm.", call)), ((), (f"Hm.{call}", ""))):
            reader = REASONING_PARSERS.get("kimi_k2")(FRESH, functions)
            events = [event for piece in pieces for event in reader.push(piece)] + reader.end()
            thought = "".join(event.text for event in events if isinstance(event, Thought))
            assert (thought, "".join(e.text for e in events if not isinstance(e, Thought))) == parts
            assert not reader.is_inside or not functions


def test_a_call_of_the_models_own_tool_in_its_thinking_is_thinking():
    text = "<|channel|>analysis to=python code<|message|>1 + 1<|call|>"
    assert read("openai_gptoss", text) == ("1 + 1", "")


@pytest.mark.parametrize("name", ["qwen3", "kimi_k2", "deepseek_r1", "mistral", "granite"])
def test_what_cannot_be_a_marker_is_told_at_once(name):
    parser = REASONING_PARSERS.get(name)
    reader = parser(INSIDE)
    assert [reader.push(char) for char in "12"] == [[Thought("1")], [Thought("2")]]
    assert reader.push(parser.endings[0][:-1]) == [] and reader.is_inside
    assert reader.push(parser.endings[0][-1]) == [] and not reader.is_inside


PROMPTS = [
    ("qwen3", "<|im_start|>assistant\n<think>\n", INSIDE),
    ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", BEHIND),
    ("qwen3", "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", FRESH),
    ("deepseek_r1", "<｜Assistant｜><think>\n", INSIDE),
    ("deepseek_r1", "<｜Assistant｜></think>", BEHIND),
    ("openai_gptoss", "<|start|>assistant", FRESH),
    ("openai_gptoss", f"<|start|>assistant{ANALYSIS}", INSIDE),
]


@pytest.mark.parametrize(("name", "prompt", "start"), PROMPTS)
def test_the_prompt_says_where_the_answer_begins(name, prompt, start):
    assert REASONING_PARSERS.get(name).start_of(prompt, None) is start


def test_an_answer_that_goes_on_begins_where_its_beginning_ends():
    start_of = REASONING_PARSERS.get("deepseek_r1").start_of
    assert start_of("...<think>a", "<think>a") is INSIDE
    assert start_of("...<think>a</think>b", "<think>a</think>b") is BEHIND
    assert start_of("...Well,", "Well,") is BEHIND


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>' }}", "qwen3"),
        ("{{ '<think>' + '<|tool_calls_section_begin|>' }}", "kimi_k2"),
        ("{{'<｜Assistant｜><think>\\n'}}", "deepseek_r1"),
        ("[SYSTEM_PROMPT]... [THINK] ...", "mistral"),
        ("... <|channel|>analysis<|message|> ...", "openai_gptoss"),
        ('... "Here is my thought process:" ...', "granite"),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_the_template_says_which_format_it_is(template, name):
    assert find(template).name == (name or "none")
    assert choose("auto", SimpleNamespace(chat_template=template)).name == (name or "none")


def test_the_option_goes_before_the_template():
    tokenizer = SimpleNamespace(chat_template="<think>")
    assert choose("granite", tokenizer).parser is REASONING_PARSERS.get("granite")
    assert choose("none", tokenizer)[:2] == (None, "none")
    with pytest.raises(ConfigError, match='Did you mean "qwen3"'):
        choose("qwen", tokenizer)
