"""Rule: reading a text takes time in proportion to its length, whatever a model fills it with; and a long answer is
read beside the event loop."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import httpx
import pytest

from minivllm.engine.detokenizer import Detokenizer
from minivllm.request import SamplingParams
from minivllm.serve.reasoning import REASONING_PARSERS
from minivllm.serve.reasoning.answer import ReasoningAnswer
from minivllm.serve.reasoning.parsers import MAX_HEADER
from minivllm.serve.reasoning.reader import ReasoningReader, Start
from minivllm.serve.tools import TOOL_PARSERS
from minivllm.serve.tools.answer import PlainAnswer, ToolAnswer
from minivllm.serve.tools.parsers import ArgumentsParser, ArrayParser
from tests.serve.conftest import FakeEngine, LetterTokenizer, serving

FUNCTIONS = {"add": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}}
FILLINGS = [" ", "[", "{", "<", '"', "\\", '{"a":', "1,"]
TOOLS = [*dict.fromkeys(TOOL_PARSERS.get(name) for name in TOOL_PARSERS.names()), ArrayParser, ArgumentsParser]
N, TIMES = 600, 8
N_OF = dict.fromkeys(REASONING_PARSERS.names(), N) | {"openai_gptoss": 2 * MAX_HEADER}  # what it may hold is short
MOST = 20.0  # times as long as for N; in proportion it is 8, by the square 64


def of_markers(markers):
    return [*markers, *(marker[:-1] for marker in markers)]


def seconds(read, text, size) -> float:
    """CPU time of this thread, the least of three tries: a busy machine adds to it."""
    found = []
    for _ in range(3):
        begin = time.thread_time()
        answer = read()
        if size is None:
            answer.message(text)
        else:
            for i in range(0, len(text), size):
                answer.deltas(text[i : i + size], finished=False)
            answer.deltas("", finished=True)
        found.append(time.thread_time() - begin)
        if found[-1] < 0.05:
            break
    return min(found)


def check(read, beginnings, fillings, n=N):
    for beginning in beginnings:
        for filling in fillings:
            for size in (None, 1):
                texts = [beginning + filling * (num // len(filling)) for num in (n, TIMES * n)]
                short, long = (seconds(read, text, size) for text in texts)
                assert long < MOST * max(short, 0.001), (beginning, filling, size, short, long)


@pytest.mark.parametrize("parser", TOOLS)
def test_calls_are_read_in_time_in_proportion(parser):
    begins = getattr(parser, "begins", ())
    check(lambda: ToolAnswer(parser(FUNCTIONS)), [""], [*FILLINGS, *of_markers(parser.markers)])
    check(lambda: ToolAnswer(parser(FUNCTIONS)), begins[:1], FILLINGS)


@pytest.mark.parametrize("name", REASONING_PARSERS.names())
def test_thinking_is_read_in_time_in_proportion(name):
    parser: type[ReasoningReader] = REASONING_PARSERS.get(name)
    for start in Start if name != "openai_gptoss" else (Start.FRESH,):
        fillings = [*FILLINGS, *of_markers((*parser.openings, *parser.endings)), "<|start|>", "<|end|>"]
        check(lambda start=start: ReasoningAnswer(parser(start), PlainAnswer()), [""], fillings, N_OF[name])


class Letters(LetterTokenizer):
    has_bytes, strips_first_space = True, False


class Written:
    """A text by a detokenizer that looks for stops in the answer."""

    def __init__(self, name: str):
        params = SamplingParams(max_tokens=None, stop=[" " * 50 + "a", "<|end|>a", "<think>x"])
        self.detokenizer = Detokenizer(Letters(), params, [65], lambda: REASONING_PARSERS.get(name)(Start.FRESH))

    def message(self, text: str) -> None:
        self.detokenizer.push([ord(char) for char in text], finished=True)

    def deltas(self, text: str, finished: bool) -> None:
        self.detokenizer.push([ord(char) for char in text], finished)


@pytest.mark.parametrize("name", ["qwen3", "openai_gptoss"])
def test_stops_are_looked_for_in_time_in_proportion(name):
    check(lambda: Written(name), ["", "</think>"], [" ", "<", "<|start|>"], N_OF[name])


def test_white_space_before_the_thinking_has_a_longest():
    reader = REASONING_PARSERS.get("qwen3")(Start.FRESH)
    reader.push(" " * 5000)
    assert reader.num_held == 0


@pytest.fixture(scope="module")
def server():
    with ExitStack() as stack:
        engine = FakeEngine()
        engine.max_model_len = 100_000
        parsers = {"tool_parser": TOOL_PARSERS.get("hermes"), "reasoning_parser": REASONING_PARSERS.get("qwen3")}
        engine.url = stack.enter_context(serving(engine, **parsers))
        yield engine


ASKED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/messages": {"model": "fake", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/api/chat": {"messages": [{"role": "user", "content": "Hi"}], "stream": False},
    "/api/generate": {"prompt": "Hi", "stream": False},
}


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(("num_chars", "beside"), [(100, False), (40_000, True)])
def test_a_long_answer_is_read_beside_the_event_loop(server, monkeypatch, path, num_chars, beside):
    read_in, loops, push, generate = set(), set(), ReasoningReader.push, server.generate

    def noted(self, text):
        read_in.add(threading.get_ident())
        return push(self, text)

    async def generated(*args, **kwargs):
        loops.add(threading.get_ident())
        async for output in generate(*args, **kwargs):
            yield output

    server.reset()
    server.script = ["<think>a</think>" + "b " * (num_chars // 2)]
    monkeypatch.setattr(ReasoningReader, "push", noted)
    monkeypatch.setattr(server, "generate", generated)
    httpx.post(server.url + path, json=ASKED[path], timeout=60).raise_for_status()
    assert read_in and (not read_in & loops if beside else read_in == loops)
