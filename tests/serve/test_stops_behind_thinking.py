"""Rule: what ends an answer counts in the answer, and not in the thinking before it: stop strings and tokens,
min_tokens, biases towards an end. Over every API that shows thinking, whole and streamed."""

from __future__ import annotations

import json
import random
import re
from contextlib import ExitStack

import httpx
import pytest
import tiny_tokenizers as tiny

from minivllm.engine.detokenizer import Detokenizer
from minivllm.engine.output import OutputProcessor
from minivllm.plan import Delta
from minivllm.request import SamplingParams, sequence_ids
from minivllm.serve.reasoning import REASONING_PARSERS
from minivllm.serve.reasoning.reader import Start
from tests.serve.conftest import FakeEngine, LetterTokenizer, serving

FRESH, INSIDE, BEHIND = Start.FRESH, Start.INSIDE, Start.BEHIND
TOKENIZER = tiny.byte_level()
ANALYSIS, FINAL, COMMENTARY = (f"<|channel|>{name}<|message|>" for name in ("analysis", "final", "commentary"))
NEXT = "<|end|><|start|>assistant"


def stopped(name, start, text, size=3, **params):
    """-> (the text that is left, what has stopped it, number of tokens)."""
    find = lambda: REASONING_PARSERS.get(name)(start)  # noqa: E731
    detokenizer = Detokenizer(
        TOKENIZER, SamplingParams(max_tokens=None, skip_special_tokens=False, **params), [5], find
    )
    ids = TOKENIZER.encode(text)
    pieces = [detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    pieces.append(detokenizer.push([], finished=True))
    assert "".join(pieces) == detokenizer.text
    return detokenizer.text, detokenizer.stopped_by, detokenizer.num_tokens


CASES = [
    ("qwen3", FRESH, "<think>The task says Question: so.</think>Seven. ", "Question: next"),
    ("qwen3", FRESH, "<think>Ques</think>", "Question: next"),
    ("qwen3", FRESH, "<think>Ques</think>tion: is none. ", "Question: next"),
    ("qwen3", FRESH, "\n<think>Question:</think>\n", "Question:"),
    ("qwen3", FRESH, "No thinking. ", "Question: <think>Question:</think>"),
    ("qwen3", INSIDE, "a Question: b</think>", "Question:"),
    ("qwen3", BEHIND, "a ", "Question:</think>Question:"),
    ("deepseek_r1", FRESH, "Question:</think>a", "Question:"),
    ("mistral", FRESH, "[THINK]Question:[/THINK]a", "Question:"),
    ("mistral", FRESH, "Well [THINK]Question:[/THINK]a", "Question:"),
    ("granite", FRESH, "Here is my thought process: Question: Here is my response: a", "Question:"),
    ("openai_gptoss", FRESH, f"{ANALYSIS}Question:{NEXT}{FINAL}a", "Question:"),
    ("openai_gptoss", FRESH, f"{ANALYSIS}Question:{NEXT}{ANALYSIS}Question:{NEXT}{COMMENTARY}a", "Question:"),
    (
        "openai_gptoss",
        FRESH,
        f"{COMMENTARY}Ques{NEXT}{FINAL}tion: a{NEXT}{ANALYSIS}Question:{NEXT}{FINAL}",
        "Question:",
    ),
    ("openai_gptoss", INSIDE, f"Question:{NEXT}<|channel|>final <|constrain|>json<|message|>", "Question:"),
]


@pytest.mark.parametrize(("name", "start", "left", "behind"), CASES)
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_a_stop_string_in_the_thinking_is_none_and_one_in_the_answer_ends_it(name, start, left, behind, size):
    text, by, _ = stopped(name, start, left + behind, size, stop=["Question:", "absent"])
    assert (text, by) == (left, "Question:")
    text, _, _ = stopped(name, start, left + behind, size, stop=["Question:"], include_stop_str_in_output=True)
    assert text == left + "Question:"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", "<think>never Question: ends"),
        ("openai_gptoss", f"{ANALYSIS}final Question:{NEXT}<|channel|>fin"),
        ("qwen3", "<think>final</think>assistant"),
    ],
)
def test_without_a_stop_in_the_answer_nothing_is_lost(name, text):
    assert stopped(name, FRESH, text, stop=["Question:", "final"])[:2] == (text, None)


def answers(name: str, start: Start, text: str) -> list[tuple[int, int]]:
    """The slow reference: where in the text parts of the answer begin and end."""
    if start is BEHIND:
        return [(0, len(text))]
    opening, ending = {"mistral": (r"\[THINK\]", r"\[/THINK\]")}.get(name, ("<think>", "</think>"))
    first = 0
    if start is FRESH and name != "deepseek_r1":
        found = re.match(rf"\s*{opening}", text)
        if not found:
            return [(0, len(text))]
        first = found.end()
    closed = re.compile(ending).search(text, first)
    return [(closed.end(), len(text))] if closed else []


def test_stops_are_found_where_a_slow_reader_finds_them():
    rng = random.Random(5)
    parts = ["<think>", "</think>", "a", "b", "ab", "\n", "</thi", "<", "ba", "abab"]
    for case in range(1500):
        name = rng.choice(["qwen3", "deepseek_r1"])
        start = rng.choice([*Start])
        text = "".join(rng.choices(parts, k=rng.randrange(9)))
        text = rng.choice(["<think>", "", "\n<think>"]) + text
        stops = rng.sample(["ab", "ba", "b", "aba", "\n", "<", "k>a", ">a"], 2)
        expected: tuple[str, str | None] = text, None
        for begin, end in answers(name, start, text):
            ends = [i for i in range(begin, end + 1) if any(text[begin:i].endswith(stop) for stop in stops)]
            if ends:
                stop = max((stop for stop in stops if text[begin : ends[0]].endswith(stop)), key=len)
                expected = text[: ends[0] - len(stop)], stop
                break
        assert stopped(name, start, text, rng.choice([1, 3]), stop=stops)[:2] == expected, (case, name, start, text)


def test_min_tokens_of_a_stop_string_are_those_of_the_answer():
    text = "<think>aaaa</think>ab ab ab"
    num_thinking = len(TOKENIZER.encode("<think>aaaa</think>"))
    _, by, num = stopped("qwen3", FRESH, text, 1, stop=["ab"], min_tokens=4)
    assert by == "ab" and num - num_thinking > 4
    assert stopped("qwen3", FRESH, text, 1, stop=["ab"])[0] == "<think>aaaa</think>"


# ------------------------------------------------------------------------------------------------------- over the APIs

TEXT = "<think>The task says Question: so I count.</think>Seven. Question: next"
HELLO = [{"role": "user", "content": "Hi"}]
STOP = ["Question:"]


class Letters(LetterTokenizer):
    has_bytes, strips_first_space = True, False
    ending = ""

    def apply_chat_template(self, messages, **kwargs):
        return super().apply_chat_template(messages, **kwargs) + self.ending


class WritingEngine(FakeEngine):
    """Writes `text` by some letters a step, and ends it as an engine does."""

    def __init__(self):
        super().__init__()
        self.tokenizer, self.text, self.num_letters = Letters(), TEXT, 1

    async def generate(
        self, prompt, params, request_id, *, output_kind="cumulative", find_answer=None,
        on_start=lambda metrics: None, **_,
    ):  # fmt: skip
        processor = OutputProcessor(self.tokenizer)
        ids, letters = sequence_ids(request_id, params.num_sequences), list(map(ord, self.text))
        add = request_id, None, prompt["prompt_token_ids"], params, ids, 1.0, output_kind, find_answer
        processor.add(*add)
        on_start(processor.metrics_of(request_id))
        for i in range(0, len(letters), self.num_letters):
            ends = "stop" if i + self.num_letters >= len(letters) else None
            tokens = letters[i : i + self.num_letters] + ([0] if ends else [])
            for output in processor.process([Delta(id, tokens, ends, arrival_time=1.0) for id in ids], 2.0)[0]:
                yield output
                if output.finished:
                    return


@pytest.fixture(scope="module")
def writer():
    with ExitStack() as stack:
        engine = WritingEngine()
        engine.max_model_len = 1000
        engine.url = stack.enter_context(serving(engine, reasoning_parser=REASONING_PARSERS.get("qwen3")))
        yield engine


@pytest.fixture(params=[1, 2, 7, 200])
def letters(request, writer):
    writer.num_letters, writer.text, writer.tokenizer.ending = request.param, TEXT, ""
    return writer


def lines(reply, data="data: "):
    found = [line.removeprefix(data) for line in reply.text.splitlines() if line.startswith(data)]
    return [json.loads(line) for line in found if line != "[DONE]"]


def chat(engine, stream, **fields):
    body = {"messages": HELLO, "stop": STOP, "stream": stream, **fields}
    reply = httpx.post(f"{engine.url}/v1/chat/completions", json=body).raise_for_status()
    if not stream:
        choices = reply.json()["choices"]
        return [(c["message"]["reasoning"], c["message"]["content"], c["finish_reason"]) for c in choices]
    found = {}
    for choice in (choice for line in lines(reply) for choice in line["choices"]):
        thought, content, reason = found.get(choice["index"], ("", "", None))
        delta = choice["delta"]
        thought, content = thought + (delta.get("reasoning") or ""), content + (delta.get("content") or "")
        found[choice["index"]] = thought, content, choice["finish_reason"] or reason
    return list(found.values())


THOUGHT = "The task says Question: so I count."


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions_stop_in_the_answer(letters, stream):
    assert chat(letters, stream) == [(THOUGHT, "Seven. ", "stop")]
    assert chat(letters, stream, n=3) == [(THOUGHT, "Seven. ", "stop")] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_where_the_prompt_has_opened_or_closed_the_thinking(letters, stream):
    letters.text, letters.tokenizer.ending = TEXT.removeprefix("<think>"), "<think>\n"
    assert chat(letters, stream) == [(THOUGHT, "Seven. ", "stop")]
    letters.tokenizer.ending = "<think>\n\n</think>\n\n"
    assert chat(letters, stream) == [("" if stream else None, "The task says ", "stop")]


@pytest.mark.parametrize("stream", [False, True])
def test_messages_stop_in_the_answer(letters, stream):
    body = {"model": "fake", "messages": HELLO, "max_tokens": 500, "stop_sequences": STOP, "stream": stream}
    reply = httpx.post(f"{letters.url}/v1/messages", json=body).raise_for_status()
    if stream:
        deltas = [event["delta"] for event in lines(reply) if "delta" in event]
        assert "".join(delta.get("thinking", "") for delta in deltas) == THOUGHT
        assert "".join(delta.get("text", "") for delta in deltas) == "Seven. "
        answer = deltas[-1]
    else:
        answer = reply.json()
        assert [block.get("thinking") or block.get("text") for block in answer["content"]] == [THOUGHT, "Seven. "]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "Question:")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat", "generate"])
def test_ollama_stops_in_the_answer(letters, stream, path):
    body = {"model": "fake", "messages": HELLO, "options": {"stop": STOP}, "stream": stream, "think": True}
    if path == "generate":
        body["prompt"] = body.pop("messages")[0]["content"]
    reply = httpx.post(f"{letters.url}/api/{path}", json=body).raise_for_status()
    parts = [json.loads(line) for line in reply.text.splitlines()]
    said = [part.get("message", part) for part in parts]
    assert "".join(part.get("thinking") or "" for part in said) == THOUGHT
    assert "".join(part.get("content") or part.get("response") or "" for part in said) == "Seven. "


@pytest.mark.parametrize("stream", [False, True])
def test_responses_stop_in_the_answer(letters, stream):
    body = {"input": "Hi", "stop": STOP, "stream": stream}
    reply = httpx.post(f"{letters.url}/v1/responses", json=body).raise_for_status()
    answer = lines(reply)[-1]["response"] if stream else reply.json()
    texts = [content["text"] for item in answer["output"] for content in item["content"]]
    assert texts == [THOUGHT, "Seven. "]


def test_completions_have_no_thinking(letters):
    body = {"prompt": "Hi", "stop": STOP, "max_tokens": 500}
    reply = httpx.post(f"{letters.url}/v1/completions", json=body).raise_for_status().json()
    assert reply["choices"][0]["text"] == "<think>The task says "


# --------------------------------------------------------------------------------------------------- in a real engine


@pytest.fixture(scope="module", params=["", "self_draft"])
def real(request):
    """A random model whose template opens the thinking."""
    from minivllm.engine.async_llm import AsyncLLM

    overrides = {"kv.num_blocks": 256, "model.dtype": "float32", "executor.num_threads": 1}
    if request.param:
        overrides |= {"spec_decode.method": request.param, "spec_decode.adaptive": False}
    engine = AsyncLLM("dummy:tiny", overrides=overrides, max_model_len=1024)
    engine.tokenizer.use_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}<think>\n")
    with serving(engine, reasoning_parser=REASONING_PARSERS.get("qwen3")) as url:
        yield url, engine


def asked(real, **fields):
    """-> (reply, tokens of the answer)."""
    body = {"messages": HELLO, "max_tokens": 200, "seed": 3, "thinking_token_budget": 6, **fields}
    reply = httpx.post(f"{real[0]}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
    used = reply["usage"]
    return reply["choices"][0], used["completion_tokens"] - used["completion_tokens_details"]["reasoning_tokens"]


def test_a_bias_that_ends_is_withheld_in_the_thinking(real):
    eos = real[1].tokenizer.eos_token_ids[0]
    choice, num_answered = asked(real, logit_bias={str(eos): 100})
    assert choice["message"]["reasoning"] and (num_answered, choice["finish_reason"]) == (1, "stop")


def test_min_tokens_are_those_of_the_answer(real):
    eos = real[1].tokenizer.eos_token_ids[0]
    choice, num_answered = asked(real, logit_bias={str(eos): 100}, min_tokens=7)
    assert (num_answered, choice["finish_reason"]) == (8, "stop")
    schema = {"guided_regex": "[a-z]{2,20}"}
    assert asked(real, logit_bias={str(eos): 100}, min_tokens=7, **schema)[1] >= 8


def test_a_stop_token_stops_the_answer_alone(real):
    token = real[1].tokenizer.encode("e")[0]
    fields = {"stop_token_ids": [token], "logit_bias": {str(token): 100}}
    choice, num_answered = asked(real, **fields)
    assert (num_answered, choice["finish_reason"], choice["stop_reason"]) == (1, "stop", token)
    assert not choice["message"]["content"] and choice["message"]["reasoning"]
    choice, num_answered = asked(real, **fields, min_tokens=3)
    assert (num_answered, choice["stop_reason"]) == (4, token)
    choice, _ = asked(
        real, allowed_token_ids=[token], stop_token_ids=[token], thinking_token_budget=None, max_tokens=20
    )
    assert choice["finish_reason"] == "length" and choice["message"]["reasoning"] == "e" * 20


def test_a_stop_token_without_thinking_stops_as_before(real):
    token = real[1].tokenizer.encode("e")[0]
    body = {"prompt": "Hi", "stop_token_ids": [token], "logit_bias": {str(token): 100}, "max_tokens": 9}
    choice = httpx.post(f"{real[0]}/v1/completions", json=body, timeout=60).raise_for_status().json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", token)
