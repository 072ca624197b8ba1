"""The engine core in a process of its own: the same tokens and errors, and nothing left behind however it ends."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
from eventually import PATIENCE, eventually

from minivllm import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from minivllm.errors import ConfigError, EngineDead, ModelError, TraceError
from minivllm.trace import read

TINY = {"kv.num_blocks": 60, "kv.block_size": 8, "executor.num_threads": 1, "model.dtype": "float32"}
APART = {**TINY, "engine.core": "process"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def gone(pid, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_the_tokens_are_those_of_a_core_in_this_process(tmp_path):
    prompts = [[1, 2, 3], [4, 5], [6] * 30]
    params = [GREEDY, GREEDY.replace(temperature=1.0, seed=5, n=2), BeamSearchParams(beam_width=2, max_tokens=6)]
    trace = tmp_path / "trace.jsonl"
    tokens, stats = [], []
    for overrides in (TINY, {**APART, "debug.trace": str(trace)}):
        with LLM("dummy:tiny", overrides=overrides) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            tokens.append([[c.token_ids for c in output.outputs] for output in outputs])
            stats.append(llm.stats.generation_tokens)
    assert tokens[0] == tokens[1] and stats[0] == stats[1] > 0
    assert sum(1 for _ in read(trace).steps()) > 3


def test_what_cannot_be_built_there_is_told_here():
    with pytest.raises(ModelError, match="no-such-shape"):
        LLM("dummy:no-such-shape", overrides=APART)
    with pytest.raises(ConfigError, match="observers"):
        LLM("dummy:tiny", overrides=APART, observers=[object()])


async def drain(engine, request_id, params):
    return [output async for output in engine.generate([1, 2, 3], params, request_id, output_kind="delta")]


def test_streams_end_with_an_error_when_the_core_is_killed_and_later_requests_are_refused():
    engine = AsyncLLM("dummy:tiny", overrides={**APART, "engine.restart": False})

    async def run():
        tasks = [asyncio.create_task(drain(engine, str(i), GREEDY.replace(max_tokens=400))) for i in range(4)]
        while not engine.stats.generation_tokens:
            await asyncio.sleep(0.01)
        os.kill(engine._link.pid, signal.SIGKILL)
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE)
        assert all(isinstance(end, EngineDead) and "signal 9" in str(end) for end in ends)
        assert not engine.is_running
        with pytest.raises(EngineDead):
            await drain(engine, "late", GREEDY)

    asyncio.run(run())
    engine.close()


def test_a_core_that_was_killed_is_started_again_and_serves_the_same_tokens():
    engine = AsyncLLM("dummy:tiny", overrides=APART)

    async def run():
        before = await drain(engine, "before", GREEDY)
        first = engine._link.pid
        os.kill(first, signal.SIGKILL)
        while engine.is_running:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDead):
            await drain(engine, "meanwhile", GREEDY)
        while not engine.is_running:
            await asyncio.sleep(0.05)
        after = await drain(engine, "after", GREEDY)
        assert engine._link.pid != first and gone(first)
        return [[token for output in outputs for token in output.outputs[0].token_ids] for outputs in (before, after)]

    tokens = asyncio.run(run())
    assert tokens[0] == tokens[1] and len(tokens[0]) == 12
    pid = engine._link.pid
    engine.close()
    assert gone(pid)


def test_a_core_that_starts_again_keeps_the_trace_of_the_one_that_died(forked_cores, tmp_path):
    path = tmp_path / "run.jsonl"
    engine = AsyncLLM("dummy:tiny", overrides={**APART, "debug.trace": str(path)})

    async def run():
        await drain(engine, "before", GREEDY)
        os.kill(engine._link.pid, signal.SIGKILL)
        while engine.is_running:
            await asyncio.sleep(0.01)
        while not engine.is_running:
            await asyncio.sleep(0.01)
        await drain(engine, "after", GREEDY)

    asyncio.run(run())
    engine.close()
    of = [[r["request"]["id"] for r in read(p).records if r["type"] == "add"] for p in (f"{path}.1", path)]
    assert of == [["before"], ["after"]]


def test_a_core_that_cannot_write_its_trace_again_starts_without(forked_cores, tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    engine = AsyncLLM("dummy:tiny", overrides={**APART, "debug.trace": str(folder / "run.jsonl")})
    shutil.rmtree(folder)

    async def run():
        os.kill(engine._link.pid, signal.SIGKILL)
        while engine.is_running:
            await asyncio.sleep(0.01)
        while not engine.is_running:
            await asyncio.sleep(0.01)
        return len(await drain(engine, "after", GREEDY))

    assert asyncio.run(run())
    engine.close()


def test_a_trace_that_cannot_be_written_at_first_is_the_callers_to_mend(forked_cores, tmp_path):
    with pytest.raises(TraceError, match="no-such-folder"):
        LLM("dummy:tiny", overrides={**APART, "debug.trace": str(tmp_path / "no-such-folder" / "run.jsonl")})


class Broken:
    def on_add(self, request): ...
    def on_abort(self, req_ids): ...

    def on_report(self, report):
        raise RuntimeError("lightning")


def test_an_engine_whose_messages_nobody_reads_is_dead(forked_cores):
    """The core is well, and no token of it would ever come."""
    engine = AsyncLLM("dummy:tiny", overrides=APART)
    engine.watchers.append(Broken())
    with pytest.raises(EngineDead, match="lightning"):
        asyncio.run(drain(engine, "a", GREEDY))
    assert not engine.is_running
    pid = engine._link.pid
    engine.close()
    assert gone(pid)


def test_closing_ends_a_restart_that_is_on_its_way():
    engine = AsyncLLM("dummy:tiny", overrides=APART)
    os.kill(engine._link.pid, signal.SIGKILL)
    while engine._dead is None:
        time.sleep(0.01)
    engine.close()
    time.sleep(1.0)
    assert not engine.is_running


def test_leaving_a_stream_frees_its_blocks_there():
    engine = AsyncLLM("dummy:tiny", overrides=APART)

    async def run():
        stream = engine.generate([1, 2], GREEDY.replace(max_tokens=400), "a")
        async for _ in stream:
            break
        await stream.aclose()
        is_free = lambda: engine.stats.num_free_blocks == 60 and not engine.stats.num_running  # noqa: E731
        await asyncio.to_thread(eventually, is_free)

    asyncio.run(run())
    pid = engine._link.pid
    engine.close()
    engine.close()
    assert gone(pid)


def test_the_parents_death_ends_the_core(tmp_path):
    script = f"""
import os, time
from minivllm import LLM
if __name__ == "__main__":
    llm = LLM("dummy:tiny", overrides={APART!r})
    print(llm._link.pid, flush=True)
    time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.wait()
    assert gone(pid)


def test_ctrl_c_in_a_terminal_reaches_both_and_leaves_nothing():
    """A terminal sends the interrupt to the whole group: the core leaves it to its parent to say what it means."""
    script = f"""
import signal
from minivllm import LLM, SamplingParams
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
llm = LLM("dummy:tiny", overrides={APART!r})
try:
    print(llm._link.pid, flush=True)
    while True:
        llm.generate([[1, 2]], SamplingParams(max_tokens=480, ignore_eos=True), use_tqdm=False)
except KeyboardInterrupt:
    print(len(llm.generate([[1, 2]], SamplingParams(max_tokens=5), use_tqdm=False)), "answer after it", flush=True)
    llm.shutdown()
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    pid = int(parent.stdout.readline())
    time.sleep(0.3)
    os.killpg(parent.pid, signal.SIGINT)
    assert parent.communicate(timeout=PATIENCE)[0] == "1 answer after it\n"
    assert parent.returncode == 0 and gone(pid)


ABOUT_TO_START = """
import time
from minivllm import child
from minivllm.terminal import interrupts_end_at_once
from minivllm.config import EngineConfig
from minivllm.engine.process_link import ProcessLink

def start(*_):
    print("now", flush=True)
    time.sleep(60)

child.start = start
with interrupts_end_at_once():
    ProcessLink(EngineConfig())
"""


def test_ctrl_c_just_before_a_core_is_started_leaves_no_folder(short_folder):
    """Later its process removes it."""
    env = os.environ | {"TMPDIR": str(short_folder)}
    process = subprocess.Popen([sys.executable, "-c", ABOUT_TO_START], env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "now\n" and len(list(short_folder.iterdir())) == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130 and list(short_folder.iterdir()) == []
    finally:
        process.kill()
        process.stdout.close()
