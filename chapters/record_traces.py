"""Record the runs that the book's widgets replay: `make traces`, or `python -m chapters.record_traces ten-blocks`.

Each is a run of this engine, written by minivllm/trace.py (minivllm.trace/1). The header gets one field more, `book`:
when and from which commit it was recorded, by what command, and the text of each token that occurs.

    stall-v0, stall-v1  the same five requests on the default model, by V0's scheduler and by V1's; time is what one
                        core spends on it, so that what else runs on the machine is not in the picture
    seats-static, seats-continuous
                        eight requests on four seats of the default model, in a static batch and in a continuous one
    small-pool          four requests on the default model in a pool that is too small for them: one is preempted
    ten-blocks          vLLM's example of prefix caching, ten blocks of four tokens; letters instead of a model
    three-guests        the forty steps of chapter 0
    sampled-text        one request on the default model, sampled, with the five likeliest tokens of each step
    held-text           the same, greedy, and held to chapter 16's schema
    core-inproc, core-process
                        four chats on the default model, with the engine core in the front end's process and in its own
                        one, while the front end has a burst of texts to tokenise; by the clock on the wall
    guessed-records     one request on the default model whose next tokens are guessed by n-gram look-up
"""

from __future__ import annotations

import asyncio
import datetime
import json
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.common import commit
from chapters.ch00_the_map.run import CONFIG, GUESTS
from chapters.ch12_two_processes.run import Engine as ServingEngine
from chapters.ch12_two_processes.run import pages_of_this_book
from chapters.ch15_guess_ahead.texts import TEXTS
from chapters.ch16_only_legal_tokens.run import HELD
from minivllm.config import EngineConfig
from minivllm.engine.build import Engine, build, build_kv, build_scheduler
from minivllm.engine.core import EngineCore
from minivllm.engine.tokenizer import TextTokenizer
from minivllm.plan import AsyncOutput, StepOutput, StepPlan
from minivllm.request import EngineRequest, SamplingParams
from minivllm.scheduler.base import Limits
from minivllm.trace import TraceRecorder

TRACES = Path(__file__).parent / "traces"
MAX_BYTES = 200_000
ONE_THREAD = {"executor.num_threads": 1, "model.max_model_len": 1024}

CHATS = {
    "Ada": "Tell me about the sea at night, and about the people who",
    "Ben": "Write a short letter to a friend who has moved to",
    "Cleo": "My favourite recipe begins with two onions and a",
    "Dan": "The three things that every gardener should know are",
}
NUM_CHAT_TOKENS, NUM_REPORT_TOKENS = 40, 700
CHATS_APART, REPORT_AT = 0.03, 0.3  # seconds
STALL = {**ONE_THREAD, "kv.num_blocks": 128, "scheduler.max_num_batched_tokens": 64}
NUM_RECORD_TOKENS = 80
TRIES = 3  # of a run that is timed; the quickest is kept, since other programs only ever add time
CLOCK = time.process_time

Arrivals = list[tuple[float, EngineRequest]]  # (seconds or steps, request), in order

# ---------------------------------------------------------------------------------------- how a run is driven


def greedy(num_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, seed=0, max_tokens=num_tokens, ignore_eos=True, **more)


def drive(core: EngineCore, arrivals: Arrivals) -> None:
    """Requests are added when their time has come, however busy the engine is. Waiting for one spends time as well."""
    pending, start = deque(arrivals), CLOCK()
    while pending or not core.is_settled:
        while pending and pending[0][0] <= CLOCK() - start:
            core.add(pending.popleft()[1])
        if not core.is_settled:
            core.step()


def drive_by_steps(core: EngineCore, arrivals: Arrivals) -> None:
    """Time is counted in steps, idle ones included, so that a run makes the same plans every time."""
    pending, step = deque(arrivals), 0
    while pending or not core.is_settled:
        while pending and pending[0][0] <= step:
            core.add(pending.popleft()[1])
        core.step()
        step += 1


def recorded(core: EngineCore, config: EngineConfig, info: dict[str, Any], run: Callable[[], None]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        recorder = TraceRecorder(Path(folder) / "trace.jsonl", CLOCK)
        recorder.on_start(config.flat(), info)
        core.observers.append(recorder)
        run()
        core.observers.remove(recorder)
        recorder.close()
        return (Path(folder) / "trace.jsonl").read_bytes()


# ---------------------------------------------------------------------------------------- the scenes


def stall(preset: str) -> bytes:
    """Four chats decode when a long prompt joins."""
    config = EngineConfig.build(preset, STALL)
    engine = build(config)
    tokenizer = TextTokenizer.load(engine.tokenizer_dir)
    arrivals = stall_arrivals(tokenizer)
    drive_by_steps(engine.core, renamed(arrivals))  # what only a first run pays for
    runs = []
    for _ in range(TRIES):
        engine.core.scheduler.base.kv.forget_cached()  # what the run before left behind
        start = CLOCK()
        run = recorded(engine.core, config, engine.info, lambda: drive(engine.core, arrivals))
        runs.append((CLOCK() - start, run))
    engine.core.shutdown()
    return told(min(runs)[1], words_of(tokenizer), f"stall-{preset}")


def stall_arrivals(tokenizer: TextTokenizer) -> Arrivals:
    chats = [
        (i * CHATS_APART, EngineRequest(name, tokenizer.encode(text), greedy(NUM_CHAT_TOKENS)))
        for i, (name, text) in enumerate(CHATS.items())
    ]
    ids = random.Random(0).choices(range(1000, 40_000), k=NUM_REPORT_TOKENS)
    return [*chats, (REPORT_AT, EngineRequest("report", ids, greedy(4)))]


def renamed(arrivals: Arrivals) -> Arrivals:
    """The same once more, with prompts that share nothing: V1's prefix cache would remember them."""
    return [
        (0, EngineRequest(f"warm {er.id}", [token + 1 for token in er.prompt_token_ids], er.params))
        for _, er in arrivals
    ]


BURST_AT = 12  # tokens of the first chat


def two_processes(core: str) -> bytes:
    """Four chats decode when the front end gets other work. The core writes the trace, wherever it is."""
    with tempfile.TemporaryDirectory() as folder:
        engine = ServingEngine(core, 1, Path(folder))
        chats = {name: engine.llm.tokenizer.encode(text) for name, text in CHATS.items()}
        runs = []
        for bursts in ((), *[(BURST_AT,)] * TRIES):  # the first pays for what only a first run does
            before = len(engine.trace.read_bytes())
            served = asyncio.run(engine.serve(chats, NUM_CHAT_TOKENS, bursts, pages_of_this_book()))
            runs.append((served.seconds, engine.trace.read_bytes()[before:]))
        head = json.loads(engine.trace.read_bytes().splitlines()[0])
        engine.llm.close()
    head["config"]["debug.trace"] = None  # a file of the machine that recorded it
    run = json.dumps(head).encode() + b"\n" + min(runs[1:])[1]
    return told(run, words_of(engine.llm.tokenizer), f"core-{core}")


# Name: how many tokens each wants, on four seats.
SEATED = {"Ada": 24, "Ben": 5, "Cleo": 9, "Dan": 16, "Eve": 7, "Finn": 20, "Gil": 5, "Hana": 9}
BATCHES = {"static": {"scheduler.kind": "static", "scheduler.chunked_prefill": False}, "continuous": {}}


def seats(way: str) -> bytes:
    """All are there from the start; who gets a seat, and when, is what differs."""
    sizes = {"kv.num_blocks": 64, "kv.prefix": "none", "scheduler.max_num_seqs": 4}
    config = EngineConfig.build("v1", {**ONE_THREAD, **sizes, **BATCHES[way]})
    engine = build(config)
    tokenizer = TextTokenizer.load(engine.tokenizer_dir)
    arrivals = [
        (0, EngineRequest(name, tokenizer.encode(f"A letter from {name} to a friend:"), greedy(num_tokens)))
        for name, num_tokens in SEATED.items()
    ]
    drive_by_steps(engine.core, renamed(arrivals))  # what only a first run pays for
    return from_engine(engine, config, tokenizer, arrivals, f"seats-{way}")


def small_pool() -> bytes:
    sizes = {"kv.num_blocks": 16, "kv.block_size": 4, "model.max_model_len": 60}
    config = EngineConfig.build("v0", {**ONE_THREAD, **sizes, "kv.preemption": "recompute"})
    engine = build(config)
    tokenizer = TextTokenizer.load(engine.tokenizer_dir)
    lengths = dict(zip(CHATS, (14, 18, 12, 16), strict=True))
    arrivals = [
        (3 * i, EngineRequest(name, tokenizer.encode(CHATS[name])[: 9 - i], greedy(num_tokens)))
        for i, (name, num_tokens) in enumerate(lengths.items())
    ]
    return from_engine(engine, config, tokenizer, arrivals, "small-pool")


def three_guests() -> bytes:
    config = EngineConfig.build("v1", {**ONE_THREAD, **CONFIG})
    engine = build(config)
    tokenizer = TextTokenizer.load(engine.tokenizer_dir)
    arrivals = [
        (guest.arrives, EngineRequest(guest.name, tokenizer.encode(guest.prompt), greedy(guest.num_new)))
        for guest in GUESTS
    ]
    drive_by_steps(engine.core, renamed(arrivals))  # what only a first run pays for
    return from_engine(engine, config, tokenizer, arrivals, "three-guests")


def sampled_text() -> bytes:
    text = "The lighthouse keeper climbed the stairs, as he had done every evening for thirty years, and"
    return one_text("sampled-text", text, SamplingParams(temperature=0.8, seed=7, max_tokens=32, ignore_eos=True))


def held_text() -> bytes:
    text = "Ada is 36 years old and lives in London. The same as JSON:"
    return one_text("held-text", text, SamplingParams(temperature=0.0, seed=0, max_tokens=40, structured=HELD))


def one_text(name: str, text: str, params: SamplingParams) -> bytes:
    sizes = {"kv.num_blocks": 64, "model.dtype": "float32", "structured.backend": "dfa"}
    config = EngineConfig.build("v1", {**ONE_THREAD, **sizes})
    engine = build(config)
    tokenizer = TextTokenizer.load(engine.tokenizer_dir)
    params = params.replace(logprobs=5, eos_token_ids=() if params.ignore_eos else tokenizer.eos_token_ids)
    return from_engine(engine, config, tokenizer, [(0, EngineRequest("one", tokenizer.encode(text), params))], name)


def guessed_records() -> bytes:
    guessing = {"spec_decode.method": "ngram", "spec_decode.adaptive": False}
    config = EngineConfig.build("v1", {**ONE_THREAD, "kv.num_blocks": 64, "model.dtype": "float32", **guessing})
    engine = build(config)
    tokenizer = TextTokenizer.load(engine.tokenizer_dir)
    text = tokenizer.apply_chat_template(TEXTS["records"], add_generation_prompt=False, continue_final_message=True)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    arrivals: Arrivals = [(0, EngineRequest("records", tokens, greedy(NUM_RECORD_TOKENS)))]
    return from_engine(engine, config, tokenizer, arrivals, "guessed-records")


def from_engine(engine: Engine, config: EngineConfig, tokenizer: TextTokenizer, arrivals: Arrivals, name: str) -> bytes:
    run = recorded(engine.core, config, engine.info, lambda: drive_by_steps(engine.core, arrivals))
    engine.core.shutdown()
    return told(run, words_of(tokenizer), name)


class Scripted:
    """An executor without a model: what follows a request's first n tokens is the n-th letter of its text."""

    def __init__(self, num_prompt: dict[str, int], texts: dict[str, str]):
        self.num_prompt = num_prompt
        self.texts = texts

    def submit(self, plan: StepPlan) -> AsyncOutput[StepOutput]:
        ends = {req_id: plan.start[req_id] + num for req_id, num in plan.num_tokens.items()}
        out = StepOutput({r: [ord(self.texts[r][n])] for r, n in ends.items() if n >= self.num_prompt[r]})
        return AsyncOutput.ready(out)

    def shutdown(self) -> None: ...


# Name: the step it arrives at, its prompt, its output. Lengths and order are those of vLLM's documentation ("Automatic
# Prefix Caching"): the second prompt begins as the first does for ten tokens, the third for twelve.
TEN_BLOCKS = {
    "first": (0, "ABCDEFGHIJKLMNO", "PQRS"),
    "second": (3, "ABCDEFGHIJwxyz", "uv"),
    "third": (6, "ABCDEFGHIJKLabcdefghijklmnopq", "rs"),
}


def ten_blocks_core() -> tuple[EngineCore, EngineConfig, Arrivals]:
    config = EngineConfig.build("v1", {"kv.num_blocks": 10, "kv.block_size": 4, "kv.hash_seed": "the book"})
    kv = build_kv(config, 10, 40)
    scheduler = build_scheduler(config, kv, Limits(8, 64, 40, kv.capacity))
    num_prompt = {name: len(prompt) for name, (_, prompt, _) in TEN_BLOCKS.items()}
    executor = Scripted(num_prompt, {name: prompt + output for name, (_, prompt, output) in TEN_BLOCKS.items()})
    arrivals = [
        (step, EngineRequest(name, [ord(letter) for letter in prompt], greedy(len(output))))
        for name, (step, prompt, output) in TEN_BLOCKS.items()
    ]
    return EngineCore(scheduler, executor), config, arrivals


def ten_blocks() -> bytes:
    core, config, arrivals = ten_blocks_core()
    run = recorded(core, config, {"num_blocks": 10, "block_size": 4}, lambda: drive_by_steps(core, arrivals))
    return told(run, chr, "ten-blocks")


# ---------------------------------------------------------------------------------------- the files


def words_of(tokenizer: TextTokenizer) -> Callable[[int], str]:
    return lambda token: tokenizer.decode([token], skip_special_tokens=False)


def told(run: bytes, word: Callable[[int], str], name: str) -> bytes:
    """The trace with what the book needs to show it."""
    head, *lines = run.splitlines()
    tokens: set[int] = set()
    for line in map(json.loads, lines):
        if line["type"] == "add" and line["request"]["id"] != "report":  # nobody reads that one
            tokens.update(line["request"]["prompt_token_ids"])
        for row in (*line.get("tokens", {}).values(), *line.get("drafts", {}).values()):
            tokens.update(row)
        for positions in line.get("logprobs", {}).values():
            tokens.update(token for position in positions for token, *_ in position)
    book = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": f"python -m chapters.record_traces {name}",
        "words": {token: word(token) for token in sorted(tokens)},
    }
    return b"\n".join([json.dumps(json.loads(head) | {"book": book}).encode(), *lines, b""])


SCENES: dict[str, Callable[[], bytes]] = {
    "stall-v0": lambda: stall("v0"),
    "stall-v1": lambda: stall("v1"),
    "seats-static": lambda: seats("static"),
    "seats-continuous": lambda: seats("continuous"),
    "small-pool": small_pool,
    "ten-blocks": ten_blocks,
    "three-guests": three_guests,
    "sampled-text": sampled_text,
    "core-inproc": lambda: two_processes("inproc"),
    "core-process": lambda: two_processes("process"),
    "held-text": held_text,
    "guessed-records": guessed_records,
}


def main(names: Sequence[str]) -> int:
    if unknown := [name for name in names if name not in SCENES]:
        print(f"no scene {unknown[0]}. There are: {', '.join(SCENES)}", file=sys.stderr)
        return 2
    for name in names or SCENES:
        trace = SCENES[name]()
        assert len(trace) <= MAX_BYTES, f"{name} has {len(trace):,} bytes, a page's trace at most {MAX_BYTES:,}"
        TRACES.mkdir(exist_ok=True)
        (TRACES / f"{name}.jsonl").write_bytes(trace)
        print(f"{name}: {len(trace):,} bytes", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
