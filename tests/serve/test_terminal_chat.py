"""`python -m minivllm chat`: turns, commands, errors."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from minivllm.cli import chat
from minivllm.errors import BadRequest


class Echo:
    name = "echo"

    def __init__(self):
        self.seen = []
        self.num_closed = 0
        self.script = None

    def answer(self, messages):
        self.seen.append([dict(message) for message in messages])
        try:
            for item in self.script or [messages[-1]["content"].upper()]:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.num_closed += 1


@pytest.fixture
def talk(monkeypatch, capsys):
    def talk(*lines, system=None, model=None):
        said = iter(lines)

        def read(prompt):
            line = next(said, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        model = model or Echo()
        chat.converse(model, system)
        return SimpleNamespace(model=model, text=capsys.readouterr().out)

    return talk


def test_a_turn_holds_the_conversation_so_far(talk):
    done = talk("one", "two", system="s")
    assert [[m["content"] for m in messages] for messages in done.model.seen] == [
        ["s", "one"],
        ["s", "one", "ONE", "two"],
    ]
    assert "ONE\n" in done.text and "TWO\n" in done.text


def test_reset_forgets_all_but_the_system_message(talk):
    assert talk("one", "/reset", "two", system="s").model.seen[-1] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "two"},
    ]


@pytest.mark.parametrize("leave", ["/quit", EOFError(), KeyboardInterrupt()])
def test_quit_end_of_file_and_interrupt_at_the_prompt_leave(talk, leave):
    assert talk(leave, "never said").model.seen == []


def test_an_unknown_command_shows_the_help_and_blank_lines_are_nothing(talk):
    done = talk("/what", "  ")
    assert "/reset" in done.text and done.model.seen == []


def test_an_interrupt_stops_the_answer_and_keeps_what_was_said(talk):
    model = Echo()
    model.script = ["half", KeyboardInterrupt()]
    done = talk("one", "two", model=model)
    assert "half [stopped]" in done.text
    assert [m["content"] for m in model.seen[1]] == ["one", "half", "two"]
    assert model.num_closed == 2


def test_a_question_that_cannot_be_answered_is_taken_back(talk):
    model = Echo()
    model.script = [BadRequest("too long")]
    done = talk("one", "two", model=model)
    assert "error: too long" in done.text
    assert [m["content"] for m in model.seen[1]] == ["two"]


def run_chat(url, text, *args):
    command = [sys.executable, "-m", "minivllm", "chat", "--url", url, *args]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=250)


def test_chat_with_a_server_streams_its_answer(fake):
    done = run_chat(fake.url, "hello\n", "--temperature", "0", "--max-tokens", "5")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Talking to fake." in done.stdout and "abc\n" in done.stdout
    params = fake.engine.calls[0].params
    assert (params.temperature, params.max_tokens) == (0, 5)


def test_chat_with_a_server_shows_its_errors_and_goes_on(fake):
    fake.engine.script = ["a", RuntimeError()]
    done = run_chat(fake.url + "/v1", "hello\n" + "x" * 200 + "\nhello\n")
    assert done.returncode == 0
    assert "internal error" in done.stdout and "context is 100 tokens" in done.stdout


def test_leaving_an_answer_of_a_server_ends_its_request(fake, eventually):
    gate = threading.Event()
    fake.engine.script = ["a", gate]
    model = chat.RemoteModel(fake.url, {}, None, None)
    answer = model.answer([{"role": "user", "content": "x"}])
    try:
        assert [next(answer), next(answer)] == ["", "a"]
        answer.close()
        eventually(lambda: fake.engine.num_open == 0)
    finally:
        gate.set()
        model.close()


def test_what_python_takes_for_a_line_end_may_be_in_an_answer(fake):
    fake.engine.script = ["a\u2028b", "\x85", "\x0b\x1cc\n"]
    model = chat.RemoteModel(fake.url, {"max_tokens": 9}, None, None)
    assert "".join(model.answer([{"role": "user", "content": "Hi"}])) == "a\u2028b\x85\x0b\x1cc\n"
    model.close()
