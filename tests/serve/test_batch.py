"""`python -m minivllm batch`: every line is answered exactly once, whatever kills the run."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
from collections import Counter

import forked
import pytest

from minivllm.engine.metrics import Metrics
from minivllm.errors import EngineDead, UserError
from minivllm.serve import batch
from minivllm.serve.generation import Service
from minivllm.serve.tools.formats.hermes import HermesParser

HELLO = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": HELLO, "max_tokens": 5}


def line(custom_id, body=CHAT, url="/v1/chat/completions", **fields):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **fields}


@pytest.fixture
def files(tmp_path):
    def write(*records):
        text = "\n".join(r if isinstance(r, str) else json.dumps(r) for r in records)
        (tmp_path / "in.jsonl").write_text(text + "\n")
        return tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    return write


def go(engine, source, target, concurrency=4):
    """{custom_id: result} of the output file, after a run."""
    asked = batch.scan(source)
    with batch.opened(target) as output:
        batch.is_same_run(asked, output, target)
        service = Service(engine, Metrics("fake"), ["fake"], HermesParser)
        asyncio.run(batch.run(source, output, service, concurrency))
    return results(target)


def results(target):
    found = [json.loads(text) for text in target.read_text().splitlines()]
    assert max(Counter(r["custom_id"] for r in found).values(), default=1) == 1
    return {r["custom_id"]: r for r in found}


def test_each_endpoint_answers_as_the_server_does(fake_engine, files):
    source, target = files(
        line("a"),
        line("b", {"prompt": "x", "max_tokens": 5}, "/v1/completions"),
        "",
        line("c", {"input": "x"}, "/v1/responses"),
    )
    found = go(fake_engine, source, target)
    assert set(found["a"]) == {"id", "custom_id", "response", "error"} and found["a"]["error"] is None
    bodies = {name: result["response"]["body"] for name, result in found.items()}
    assert bodies["a"]["choices"][0]["message"]["content"] == bodies["b"]["choices"][0]["text"] == "abc"
    assert bodies["c"]["output"][0]["content"][0]["text"] == "abc"
    for result in found.values():
        assert result["response"]["status_code"] == 200
        assert result["response"]["request_id"] == result["response"]["body"]["id"]


@pytest.mark.parametrize(
    ("bad", "status", "text"),
    [
        (line("x", {"messages": HELLO, "temperature": "hot"}), 400, "temperature"),
        (line("x", {**CHAT, "model": "gpt"}), 404, "not served"),
        (line("x", {**CHAT, "stream": True}), 400, "stream"),
        (line("x", {**CHAT, "max_tokens": 1000}), 400, "context"),
        (line("x", url="/v1/embeddings"), None, "/v1/embeddings"),
        (line("x", method="GET"), None, "GET"),
        (line("x", extra=1), None, "extra"),
        ({"custom_id": "x", "url": "/v1/completions"}, None, "body"),
    ],
)
def test_an_error_is_one_lines_own(fake_engine, files, bad, status, text):
    source, target = files(line("a"), bad, line("b"))
    found = go(fake_engine, source, target)
    assert [found[name]["response"]["status_code"] for name in "ab"] == [200, 200]
    if status is None:
        assert found["x"]["response"] is None and text in found["x"]["error"]["message"]
    else:
        assert found["x"]["response"]["status_code"] == status
        assert text in found["x"]["response"]["body"]["error"]["message"]


NESTED = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "record",
    [
        f'{{"custom_id": "x", "url": "/v1/completions", "body": {{"prompt": {NESTED}}}}}',
        f'{{"body": {NESTED}, "other": {{"a": "]}}"}}, "custom_id": "x", "url": "/v1/completions"}}',
    ],
    ids=["after", "before"],
)
def test_a_line_that_is_nested_beyond_reading_gets_an_error_of_its_own(fake_engine, files, record):
    source, target = files(line("a"), record, line("b"))
    found = go(fake_engine, source, target)
    assert [found[name]["response"]["status_code"] for name in "ab"] == [200, 200]
    assert found["x"]["response"] is None and "recursion depth" in found["x"]["error"]["message"]


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ("{", "line 2"),
        (NESTED, "line 2"),
        ('{"url": "x"}', "custom_id"),
        (line("a"), "line 1 too"),
        ('{"custom_id": 5}', "line 2"),
    ],
)
def test_a_file_whose_answers_could_not_be_told_apart_is_refused(files, record, text):
    source, _ = files(line("a"), record)
    with pytest.raises(UserError, match=text):
        batch.scan(source)


def test_a_run_goes_on_after_a_half_written_line(fake_engine, files):
    source, target = files(*(line(str(i)) for i in range(5)))
    go(fake_engine, source, target)
    whole = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(whole[:2]) + whole[2][:30])
    fake_engine.calls.clear()
    assert set(go(fake_engine, source, target)) == set("01234")
    assert len(fake_engine.calls) == 3
    assert target.read_bytes().startswith(b"".join(whole[:2]))


def test_a_dead_engine_ends_the_run_and_its_lines_are_left_for_the_next(fake_engine, files):
    source, target = files(*(line(str(i)) for i in range(3)))
    fake_engine.script = [EngineDead("gone")]
    with pytest.raises(EngineDead):
        go(fake_engine, source, target)
    assert target.read_bytes() == b"" and fake_engine.num_open == 0
    fake_engine.reset()
    assert set(go(fake_engine, source, target)) == set("012")


def test_an_internal_error_is_told_without_its_text(fake_engine, files):
    source, target = files(line("a"))
    fake_engine.script = [RuntimeError("secret")]
    found = go(fake_engine, source, target)
    assert found["a"]["response"]["status_code"] == 500 and "secret" not in target.read_text()


def test_no_more_than_the_concurrency_run_at_once(fake_engine, files):
    source, target = files(*(line(str(i)) for i in range(20)))
    most, generate = 0, fake_engine.generate

    async def watched(*args, **kwargs):
        nonlocal most
        async for output in generate(*args, **kwargs):
            most = max(most, fake_engine.num_open)
            yield output

    fake_engine.generate = watched
    assert len(go(fake_engine, source, target, concurrency=3)) == 20 and most == 3


def test_the_output_is_one_runs_and_one_inputs(fake_engine, files):
    source, target = files(line("a"))
    with batch.opened(target), pytest.raises(UserError, match="another run"):
        batch.Output(target)
    go(fake_engine, source, target)
    source.write_text(json.dumps(line("b")) + "\n")
    with pytest.raises(UserError, match="another batch"):
        go(fake_engine, source, target)
    target.write_text("my notes\n")
    with pytest.raises(UserError, match="no result"):
        batch.Output(target)


def test_a_disk_that_is_full_ends_the_run_and_keeps_whole_lines(fake_engine, files, monkeypatch):
    write, room = os.write, [2000]

    def until_full(fd, data):
        room[0] -= (taken := write(fd, data[: room[0]]) if room[0] else 0)
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return taken

    source, target = files(*(line(str(i)) for i in range(9)))
    monkeypatch.setattr(batch.os, "write", until_full)
    with pytest.raises(UserError, match="No space left on device.*the same command goes on"):
        go(fake_engine, source, target, concurrency=1)
    kept = results(target)
    assert kept and room == [0]
    monkeypatch.undo()
    assert len(go(fake_engine, source, target)) == 9 and kept.items() <= results(target).items()


def command(*args):
    options = ["--model", "dummy:tiny", "--set", "kv.num_blocks=128", "--max-model-len", "512", "--max-num-seqs", "2"]
    return ["-m", "minivllm", "batch", *map(str, args), *options]


KILLED = """
import os, runpy, signal, sys
target, write, num_lines = sys.argv.pop(1), os.write, 0

def until_killed(fd, data):
    global num_lines
    if not (os.path.exists(target) and os.path.samestat(os.fstat(fd), os.stat(target))):
        return write(fd, data)
    if num_lines == 2:
        write(fd, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    num_lines += bytes(data).count(b"\\n")
    return write(fd, data)

os.write = until_killed
runpy.run_module("minivllm", run_name="__main__", alter_sys=True)
"""


def test_a_killed_run_is_taken_up_by_the_same_command(files):
    body = {"messages": HELLO, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    source, target = files(*(line(str(i), body) for i in range(12)), line("bad", {}))
    _, _, *args = command(source, target, "--concurrency", 2)
    (script := target.with_name("killed.py")).write_text(KILLED)
    run = forked.run(str(script), str(target), *args)
    kept = target.read_bytes()
    assert run.returncode == -signal.SIGKILL and kept.count(b"\n") == 2 and kept[-1:] != b"\n", "in the third line"
    done = forked.run(*command(source, target))
    found = results(target)
    assert set(found) == {*(str(i) for i in range(12)), "bad"}
    assert target.read_bytes().startswith(kept[: kept.rindex(b"\n") + 1])
    assert len({found[str(i)]["response"]["body"]["choices"][0]["message"]["content"] for i in range(12)}) == 1
    assert done.returncode == 1 and "answered: 13" in done.stderr
    assert "1 of them with an error" in done.stderr  # `bad` is one
    again = forked.run(*command(source, target))
    assert again.returncode == 1 and "13 of them before this run" in again.stderr
