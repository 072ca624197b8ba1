"""Chapter 12: why should a scheduler wait for a tokenizer? The engine core beside its front end, and apart from it."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.common import spread
from chapters.ch12_two_processes import ahead
from chapters.harness import CHAPTERS, in_time, main, milliseconds, note
from minivllm import AsyncLLM, SamplingParams
from minivllm.config import DEFAULT_MODEL
from minivllm.engine.core import EngineStats
from minivllm.engine.messages import MESSAGES, Report
from minivllm.engine.tokenizer import TextTokenizer
from minivllm.machine import num_cores
from minivllm.plan import Delta
from minivllm.trace import read

CORES = ("inproc", "process")
NUM_PROMPT = 16
PAGE_CHARS = 16_000  # of each text of a burst, at most
WARMUP = 8  # tokens of each stream before anything is looked at
LEAVES_AFTER = 5  # tokens, where streams are left early
FIRST_ID = 1000  # ids below are the model's special ones and single bytes
EXACT = {"model.dtype": "float32", "model.quantization": "none"}  # so that outputs can be compared token by token


class Sizes(NamedTuple):
    num_streams: int
    num_new: int  # tokens of each
    bursts: tuple[int, ...]  # tokens that the first stream has when one begins
    rounds: int


FULL, SMOKE = Sizes(8, 48, (12, 30), 1), Sizes(4, 20, (6,), 1)


class Span(NamedTuple):
    """Something that lasts. In ms, by the machine's monotonic clock, which two processes share."""

    begin: float
    end: float

    @property
    def ms(self) -> float:
        return self.end - self.begin

    def overlaps(self, others: Sequence[Span]) -> bool:
        return any(self.end > other.begin and self.begin < other.end for other in others)


class Served(NamedTuple):
    tokens: list[list[int]]  # of each stream
    waits: list[float]  # ms between a token and the next where they are read, of all streams
    bursts: list[Span]  # when the front end had other work
    passes: list[Span]  # the forward passes in which all streams decode
    seconds: float


class Engine:
    """An engine whose core writes a trace, with a front end that does what a server's does."""

    def __init__(self, core: str, num_threads: int, folder: Path):
        self.trace = folder / f"{core}-{num_threads}.jsonl"
        sizes = {"executor.num_threads": num_threads, "kv.num_blocks": 64, "model.max_model_len": 512}
        self.llm = AsyncLLM(overrides={**EXACT, **sizes, "engine.core": core, "debug.trace": str(self.trace)})

    async def stream(
        self, name: str, prompt: list[int], num_new: int, num_read: int | None = None
    ) -> AsyncIterator[tuple[float, int]]:
        """(when in ms, token), as a client reads them, who may leave after num_read tokens."""
        params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        left = num_read or num_new
        outputs = self.llm.generate({"prompt_token_ids": prompt}, params, name, output_kind="delta")
        async with aclosing(outputs):
            async for output in outputs:
                (choice,) = output.outputs
                msgspec.json.encode({"id": name, "text": choice.text})  # what a server would write to a socket now
                for token in choice.token_ids:
                    yield 1e3 * time.monotonic(), token
                left -= len(choice.token_ids)
                if left <= 0:
                    return

    async def serve(
        self, guests: Mapping[str, list[int]], num_new: int, bursts: Collection[int], pages: Sequence[str]
    ) -> Served:
        """guests: each stream's name and prompt. A burst begins when the first of them has so many tokens."""
        begun: list[asyncio.Task[Span]] = []
        first = next(iter(guests))

        async def one(name: str) -> tuple[list[int], list[float]]:
            tokens, times = [], []
            async with aclosing(self.stream(name, guests[name], num_new)) as stream:
                async for when, token in stream:
                    tokens.append(token)
                    times.append(when)
                    if name == first and len(tokens) in bursts:
                        begun.append(asyncio.create_task(burst(self.llm.tokenizer, pages)))
            return tokens, [after - before for before, after in pairwise(times)]

        start = time.monotonic()
        found = await asyncio.gather(*map(one, guests))
        seconds = time.monotonic() - start
        spans = [await task for task in begun]
        waits = [wait for _, waits in found for wait in waits]
        return Served([tokens for tokens, _ in found], waits, spans, passes(self.trace, guests), seconds)

    async def leave(self, num_streams: int, num_new: int) -> tuple[int, list[list[int]]]:
        """Every second stream is left while steps run, and its id is used again at once: (what nobody gave back, the
        tokens of those that were read to their end)."""

        async def one(i: int) -> list[int]:
            if i % 2:
                await read_out(self.stream(f"left-{i}", prompt_of(100 + i), num_new, LEAVES_AFTER))
            return await read_out(self.stream(f"left-{i}", prompt_of(i), num_new))

        found = await asyncio.gather(*map(one, range(num_streams)))
        stats = self.llm.stats
        while stats.num_running or stats.num_waiting:  # the last report is on its way
            await asyncio.sleep(0.01)
        return stats.num_total_blocks - stats.num_free_blocks + self.llm.num_requests, found


async def read_out(stream: AsyncIterator[tuple[float, int]]) -> list[int]:
    async with aclosing(stream):
        return [token async for _, token in stream]


def prompt_of(i: int) -> list[int]:
    return [FIRST_ID + 97 * i + j for j in range(NUM_PROMPT)]


def guests(name: str, num_streams: int) -> dict[str, list[int]]:
    return {f"{name}-{i}": prompt_of(i) for i in range(num_streams)}


async def burst(tokenizer: TextTokenizer, pages: Sequence[str]) -> Span:
    """Requests for the tokens of a text (the server's /tokenize), one behind the other."""
    begin = time.monotonic()
    for page in pages:
        msgspec.json.encode({"tokens": tokenizer.encode(page)})
        await asyncio.sleep(0)  # whoever else waits for the event loop comes first
    return Span(1e3 * begin, 1e3 * time.monotonic())


def pages_of_this_book() -> list[str]:
    return [path.read_text()[:PAGE_CHARS] for path in sorted(CHAPTERS.glob("ch*/index.md"))]


def passes(trace: Path, names: Collection[str]) -> list[Span]:
    """The steps of a run in which all of its streams decode, by the machine's clock: a request's record has the time
    when it set out, and the trace's own time when it arrived."""
    records = read(trace).records
    zero = min(r["t"] - r["request"]["arrival_time"] for r in records if r["type"] == "add")  # by the quickest of them
    decodes = sorted([name, 1] for name in names)
    found = []
    for record in records:
        if record["type"] == "step" and sorted(row[:2] for row in record["sched"]) == decodes:
            end = 1e3 * (record["t"] - zero) - record["times"]["update"]
            found.append(Span(end - record["times"]["execute"], end))
    return found


# ---------------------------------------------------------------------------------------- what came of it


def told(runs: Sequence[Served]) -> dict[str, Any]:
    """Of one engine. What is usual is what a step takes while the front end does nothing but stream."""
    usual = [one.ms for run in runs for one in run.passes if not one.overlaps(run.bursts)]
    steps = [(run, Span(before.end, after.end), after) for run in runs for before, after in pairwise(run.passes)]
    gaps = [step.ms - one.ms for run, step, one in steps if not step.overlaps(run.bursts)]
    bursts = [(run, burst) for run in runs for burst in run.bursts]
    ended = sum(burst.begin < one.end < burst.end for run, burst in bursts for one in run.passes)
    return {
        "pass": round(statistics.median(usual), 2),
        "gap": round(statistics.median(gaps), 2),
        "longest_step": spread([max(steps_of(run)) for run in runs], 1),
        "longest_gap": spread([max(b.begin - a.end for a, b in pairwise(run.passes)) for run in runs], 1),
        "longest_wait": spread([max(run.waits) for run in runs], 1),
        "burst": spread([burst.ms for _, burst in bursts], 1),
        "ended": ended,  # passes that ended while a burst lasted
        "ended_a_burst": round(ended / len(bursts), 1),
        "seconds": spread([run.seconds for run in runs], 2),
    }


def steps_of(run: Served) -> list[float]:
    """ms from the end of a forward pass to the end of the next: the gap between them, and the pass."""
    return [after.end - before.end for before, after in pairwise(run.passes)]


def drawn(runs: Mapping[str, Sequence[Served]]) -> list[dict[str, float]]:
    """Each step of the quickest run of each."""
    found = {core: steps_of(min(each, key=lambda run: run.seconds)) for core, each in runs.items()}
    num_steps = min(map(len, found.values()))
    return [{"step": i + 1, **{core: round(steps[i], 1) for core, steps in found.items()}} for i in range(num_steps)]


async def both(smoke: bool, folder: Path) -> dict[str, Any]:
    pages, sizes = pages_of_this_book(), SMOKE if smoke else FULL
    num_streams, num_new = sizes.num_streams, sizes.num_new
    all_threads = num_cores()
    kinds = [(core, all_threads) for core in CORES]
    one_thread = kinds[-1] if smoke or all_threads == 1 else ("process", 1)
    if one_thread not in kinds:
        kinds.append(one_thread)
    engines: dict[tuple[str, int], Engine] = {}
    for kind in kinds:
        note(f"  an engine: engine.core={kind[0]}, {kind[1]} thread(s)")
        engines[kind] = Engine(*kind, folder)
        await engines[kind].serve(guests("warm", num_streams), WARMUP, (), pages)  # first steps are slower
    runs: dict[tuple[str, int], list[Served]] = {kind: [] for kind in kinds}
    for i in range(sizes.rounds):
        note(f"  all of them in turns, round {i + 1} of {sizes.rounds}")
        for kind, engine in engines.items():
            runs[kind].append(await engine.serve(guests(f"round{i}", num_streams), num_new, sizes.bursts, pages))
    left = [await engines[core, all_threads].leave(num_streams, num_new) for core in CORES]
    for engine in engines.values():
        await engine.llm.shutdown()
    tokens = [run.tokens for found in runs.values() for run in found]
    rows = {kind: {"core": kind[0], "threads": kind[1], **told(found)} for kind, found in runs.items()}
    return {
        "num_streams": num_streams,
        "num_new": num_new,
        "threads": all_threads,
        "num_pages": len(pages),
        "num_chars": sum(map(len, pages)),
        "num_bursts": len(sizes.bursts),
        "steps": drawn({core: runs[core, all_threads] for core in CORES}),
        "rows": list(rows.values()),
        **{core: rows[core, all_threads] for core in CORES},
        "one_thread": {"process": rows[one_thread]},
        "equal": all(found == tokens[0] for found in tokens),
        "left": {
            "streams": len(left) * (num_streams // 2),
            "leaked": sum(leaked for leaked, _ in left),
            "equal": all(found == tokens[0] for _, found in left),
        },
    }


def message(num_streams: int) -> dict[str, Any]:
    """What a step's report costs on its way from one process to the other."""
    deltas = [Delta(f"cmpl-{i:032}", [FIRST_ID + i]) for i in range(num_streams)]
    report = Report(deltas, EngineStats(), [], num_streams, {"schedule": 0.1, "execute": 10.0, "update": 0.1})
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(MESSAGES)
    times = milliseconds({"both": lambda: decoder.decode(encoder.encode(report))}, 0.05, 4)
    return {"bytes": len(encoder.encode(report)), "us": round(1e3 * times["both"]["median"], 1)}


def measure(smoke: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(both(smoke, Path(folder)))
    return {
        "model": DEFAULT_MODEL,
        "dtype": "float32",
        **found,
        "message": message(found["num_streams"]),
        "ahead": ahead.measure(smoke, num_cores()),
    }


def check(results: dict[str, Any]) -> None:
    """What the text claims, true on any machine."""
    assert results["equal"], "where the core steps changed the output"
    beside_it, apart = results["inproc"], results["process"]
    in_time(apart["ended"] > beside_it["ended"], "a core apart waits for the tokenizer too")
    in_time(apart["longest_step"]["min"] < beside_it["longest_step"]["min"], "a step is as long in either")
    in_time(
        beside_it["longest_step"]["min"] > beside_it["burst"]["min"] / 2, "a burst does not stop the core beside it"
    )
    assert results["left"]["streams"] and results["left"]["leaked"] == 0, "an abort in flight left something behind"
    assert results["left"]["equal"], "somebody got the tokens of one who had left"
    ahead.check(results["ahead"])


def tell(results: dict[str, Any]) -> str:
    lines = [
        f"{results['num_streams']} streams of {results['num_new']} tokens; {results['num_bursts']} times a burst of "
        f"{results['num_pages']} texts comes to be tokenised",
        "",
        "                      usual     usual  longest     a reader's     passes that  all are",
        "the core   threads  pass, ms  gap, ms  step, ms  worst wait, ms  end in a burst   served",
    ]
    for row in results["rows"]:
        name = "beside it" if row["core"] == "inproc" else "apart"
        lines.append(
            f"{name:10} {row['threads']:7} {row['pass']:9.1f} {row['gap']:8.2f} {row['longest_step']['min']:9.0f} "
            f"{row['longest_wait']['min']:15.0f} {row['ended_a_burst']:15.1f} {row['seconds']['min']:6.2f} s"
        )
    left, sent = results["left"], results["message"]
    lines += [
        "",
        f"{left['streams']} streams left while steps run: {left['leaked']} blocks and requests left behind",
        f"a step's report: {sent['bytes']} bytes, {sent['us']:.0f} us to write and to read",
        "the same tokens from all engines" if results["equal"] else "the tokens differ",
        "",
        *ahead.tell(results["ahead"]),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main("12", measure, check, tell)
