"""Calls as families write them, over HTTP, where a reader of thinking stands before the parser of calls."""

from __future__ import annotations

from contextlib import ExitStack

import httpx
import pytest

from minivllm.serve.reasoning import REASONING_PARSERS
from minivllm.serve.tools import TOOL_PARSERS
from tests.serve.conftest import FakeEngine, serving

TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}]
PORT = '{"port": "Brest"}'
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
BARE = f"to=tide <|constrain|>json<|message|>{PORT}<|call|>"
CASES = [
    ("mistral", "mistral", f"[TOOL_CALLS]tide[CALL_ID]a1B2c3D4e[ARGS]{PORT}"),
    ("mistral", "mistral", f"[THINK]Hm.[/THINK][TOOL_CALLS]tide[CALL_ID]a1B2c3D4e[ARGS]{PORT}"),
    ("openai", "openai_gptoss", f"<|channel|>commentary {BARE}"),
    ("openai", "openai_gptoss", f"{ANALYSIS}<|channel|>commentary {BARE}"),
    ("openai", "openai_gptoss", f"{ANALYSIS}<|channel|>analysis {BARE}"),
    ("openai", "openai_gptoss", f"{ANALYSIS} to=tide<|channel|>commentary json<|message|>{PORT}<|call|>"),
    ("deepseek_v32", "qwen3", f'<think>a</think><｜DSML｜function_calls>\n<｜DSML｜invoke name="tide">\n{PORT}'),
]


@pytest.fixture(scope="module")
def servers():
    with ExitStack() as stack:
        made = {}
        for parser, reader, _ in CASES:
            if parser not in made:
                engine = FakeEngine()
                parsers = {"tool_parser": TOOL_PARSERS.get(parser), "reasoning_parser": REASONING_PARSERS.get(reader)}
                engine.url = stack.enter_context(serving(engine, **parsers))
                made[parser] = engine
        yield made


@pytest.mark.parametrize(("parser", "reader", "text"), CASES)
@pytest.mark.parametrize("piece", [1, 1000])
def test_a_call_is_a_call_and_nothing_of_it_is_content(servers, parser, reader, text, piece):
    engine = servers[parser]
    engine.reset()
    engine.script = [text[i : i + piece] for i in range(0, len(text), piece)]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}
    choice = httpx.post(f"{engine.url}/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"], choice["finish_reason"]) == ({"name": "tide", "arguments": PORT}, "tool_calls")
    assert not choice["message"]["content"]
    assert parser != "mistral" or call["id"] == "a1B2c3D4e"
    lines = httpx.post(f"{engine.url}/v1/chat/completions", json={**body, "stream": True}).text
    assert '"finish_reason":"tool_calls"' in lines and '"name":"tide"' in lines
