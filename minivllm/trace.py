"""Record any run, replay it, show it. Schema `minivllm.trace/1`: JSON Lines, a header and then one record an event.

A step is a StepPlan, which is data; so a run written down step by step can be run again on the same worker without the
scheduler (`replay`: "a refactoring changes no token"), diffed, and drawn (`to_chrome`, and the chapters' widgets).

    header  {"schema": "minivllm.trace/1", "versions": {..}, "machine": {..}, "config": {"kv.prefix": ..}, "info": {..}}
            config: every dotted field of EngineConfig; info: what the engine found out (num_blocks, dtype ...).
    add     {"type": "add", "t": .., "step": .., "request": EngineRequest as an object, keys by name}
    abort   {"type": "abort", "t": .., "step": .., "id": ..}
    step    {"type": "step", "t": .., "step": n, "sched": [[id, tokens now, computed before], ..], "times": {phase: ms},
             "joins": [..], "new_blocks": {id: [..]}, "leaves": [..], "stats": {"num_free_blocks": .., ..},
             "tokens": {id: [..]}, "finished": {id: [reason, stop]}}

`t` is in seconds since the header, taken when the record is written; an add or abort came before the step it names.
A step has every column of StepPlan: `sched` is num_tokens and start in one, in batch order; the others keep their
names and are left out while empty. Block events are `new_blocks` (appended to that table) and `leaves` (the table is
dropped). `logprobs` and `prompt_logprobs` are there when asked for; a log-probability of -inf is null. `pooled` has the
vectors of an engine that embeds, or its scores. `times` are
phases in the order in which they ran, back to back; with engine.overlap=2 they are what the step loop did until this
step's output was taken in: it planned the next step (`schedule`), waited (`execute`), took the output in (`update`).

Each line reaches the file at once. A run that was killed leaves at most one cut line, which `read` drops. A run whose
disk is full goes on without its trace, which ends there.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from minivllm import machine
from minivllm.config import EngineConfig
from minivllm.errors import TraceError
from minivllm.plan import AsyncOutput, Delta, StepOutput, StepPlan
from minivllm.request import EngineRequest

SCHEMA = "minivllm.trace/1"
FOLDED = ("num_tokens", "start")  # of StepPlan: these two are the rows of `sched`
NUM_KEPT = 5  # earlier traces of one name
Record = dict[str, Any]

logger = logging.getLogger("minivllm")


def keep_earlier(path: str | Path) -> None:
    """Make room for a trace: run.jsonl of the run before, which may have crashed, becomes run.jsonl.1, that run.jsonl.2
    and so on. Raises TraceError."""
    path = Path(path)
    if not (path.is_file() and path.stat().st_size):
        return
    names = [path, *(path.with_name(f"{path.name}.{age}") for age in range(1, NUM_KEPT + 1))]
    try:
        for older, newer in zip(names[::-1], names[-2::-1], strict=False):
            if newer.exists():
                newer.replace(older)
    except OSError as e:
        raise TraceError(f"cannot keep the earlier trace {path}: {e.strerror}; name another file") from None


class TraceRecorder:
    """An engine observer that writes what it sees. `clock` in seconds."""

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.perf_counter):
        try:
            self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # it holds prompts
        except OSError as e:
            raise TraceError(f"cannot write the trace {path}: {e.strerror}") from None
        self._path = path
        self._clock = clock
        self._start = clock()
        self._step = 0  # the next one
        self._encode = msgspec.json.Encoder().encode

    def on_start(self, config: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        """config: EngineConfig.flat()."""
        header = {"schema": SCHEMA, "versions": machine.versions(), "machine": machine.describe()}
        self._write({**header, "config": dict(config), "info": dict(info)})

    def on_add(self, req: EngineRequest, step: int) -> None:
        fields = {name: getattr(req, name) for name in EngineRequest.__struct_fields__}
        self._write({"type": "add", "t": self._now(), "step": step, "request": fields})

    def on_abort(self, req_id: str) -> None:
        self._write({"type": "abort", "t": self._now(), "step": self._step, "id": req_id})

    def on_step(self, plan: StepPlan, out: StepOutput, deltas: list[Delta], times: Mapping[str, float]) -> None:
        """times: milliseconds a phase, in the order in which they ran."""
        self._step = plan.step + 1
        record: Record = {"type": "step", "t": self._now(), "step": plan.step, "sched": rows_of(plan)}
        record["times"] = {phase: round(ms, 4) for phase, ms in times.items()}
        record |= {name: column for name in COLUMNS if (column := getattr(plan, name))}
        record["tokens"] = out.tokens
        if out.logprobs:
            record["logprobs"] = out.logprobs
        if out.prompt_logprobs:
            record["prompt_logprobs"] = out.prompt_logprobs
        if out.pooled:
            record["pooled"] = {req_id: vector.tolist() for req_id, vector in out.pooled.items()}
        finished = {d.req_id: [d.finish_reason, d.stop_reason] for d in deltas if d.finish_reason is not None}
        if finished:
            record["finished"] = finished
        self._write(record)

    def close(self) -> None:
        """Also the end of a trace that could not be written on."""
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def _now(self) -> float:
        return round(self._clock() - self._start, 6)

    def _write(self, record: Record) -> None:
        if self._file is None:
            return
        line = self._encode(record) + b"\n"
        try:
            while line:
                line = line[os.write(self._file, line) :]
        except OSError as error:
            logger.error("the trace %s ends here, and the engine goes on without: %s", self._path, error.strerror)
            self.close()


COLUMNS = tuple(f.name for f in dataclasses.fields(StepPlan) if f.name not in (*FOLDED, "step"))


def rows_of(plan: StepPlan) -> list[tuple[str, int, int]]:
    """(request, tokens now, computed before), in batch order."""
    start = plan.start
    return [(req_id, now, start[req_id]) for req_id, now in plan.num_tokens.items()]


class Trace(NamedTuple):
    header: Record
    records: list[Record]

    def steps(self) -> Iterator[Record]:
        return (record for record in self.records if record["type"] == "step")


def read(path: str | Path) -> Trace:
    """All whole records of a trace. Raises TraceError for a file that is none, or is damaged before its last line."""
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise TraceError(f"cannot read the trace {path}: {e.strerror}") from None
    whole = data[: data.rfind(b"\n") + 1]  # a killed run may have cut its last line
    records = [_decode(path, number, line) for number, line in enumerate(whole.splitlines(), start=1)]
    if not records or records[0].get("schema") != SCHEMA:
        raise TraceError(f"{path} is not a trace: its first line must have the schema {SCHEMA}")
    for number, line in enumerate(whole.splitlines()[1:], start=2):
        _check(path, number, line)
    return Trace(records[0], records[1:])


def _decode(path: str | Path, number: int, line: bytes) -> Record:
    try:
        return msgspec.json.decode(line, type=dict)
    except msgspec.DecodeError as e:
        raise TraceError(f"{path}, line {number} is damaged ({e}); record the run again") from None


class _Added(msgspec.Struct, tag_field="type", tag="add"):
    t: float
    step: int
    request: dict[str, Any]


class _Aborted(msgspec.Struct, tag_field="type", tag="abort"):
    t: float
    id: str


class _Stepped(msgspec.Struct, tag_field="type", tag="step"):
    t: float
    step: int
    sched: list[tuple[str, int, int]]
    times: dict[str, float]
    tokens: dict[str, list[int]]


def _check(path: str | Path, number: int, line: bytes) -> None:
    """Raises TraceError for what is no record, or lacks what every record of its type has."""
    try:
        msgspec.json.decode(line, type=_Added | _Aborted | _Stepped)
    except msgspec.ValidationError as e:
        raise TraceError(f"{path}, line {number} is no record of a trace: {e}") from None


def plan_of(record: Record) -> StepPlan:
    """The very plan that was recorded in a step record."""
    rows = record["sched"]
    columns = {name: record[name] for name in COLUMNS if name in record}
    folded = {"num_tokens": {r: now for r, now, _ in rows}, "start": {r: before for r, _, before in rows}}
    return msgspec.convert({"step": record["step"], **folded, **columns}, StepPlan, str_keys=True)


def output_of(record: Record) -> StepOutput:
    def finite(positions):
        return [[(token, float("-inf") if p is None else p, rank) for token, p, rank in row] for row in positions]

    def column(name):
        return {req_id: finite(positions) for req_id, positions in record.get(name, {}).items()}

    return StepOutput(record["tokens"], column("logprobs"), column("prompt_logprobs"))


def plans(path: str | Path) -> list[StepPlan]:
    return [plan_of(record) for record in read(path).steps()]


def requests(path: str | Path) -> list[tuple[float, EngineRequest]]:
    """The arrivals of a trace: (seconds since its start, request)."""
    added = (record for record in read(path).records if record["type"] == "add")
    return [(r["t"], msgspec.convert(list(r["request"].values()), EngineRequest, str_keys=True)) for r in added]


# ---------------------------------------------------------------------------------------------------- replay


class Replays(Protocol):
    """What replay needs of an executor."""

    def tell(self, method: str, *args: Any) -> None: ...
    def submit(self, plan: StepPlan) -> AsyncOutput[StepOutput]: ...


class Divergence(NamedTuple):
    step: int
    req_id: str
    expected: list[Any]  # the recorded tokens, or numbers of a vector; [] for none
    got: list[Any]

    def __str__(self) -> str:
        return f"step {self.step}, request {self.req_id}: recorded {self.expected}, replayed {self.got}"


class ReplayReport(NamedTuple):
    num_steps: int  # replayed, the diverging one included
    num_tokens: int  # compared, and numbers of vectors
    divergence: Divergence | None  # the first; replay ends there, since all that follows builds on it


def replay(
    path: str | Path, executor: Replays | None = None, overrides: Mapping[str, Any] | None = None
) -> ReplayReport:
    """Run the recorded plans through a worker and compare its tokens with the recorded ones.

    Without an executor one is built from the header's config, with `overrides` on top (another attention backend, a
    model that lies elsewhere). Equality is only to be expected of an equal dtype, thread count and batch invariant
    kernels; a first divergence late in a bf16 run may be a tie.
    """
    trace = read(path)
    if executor is not None:
        return _replay(trace.records, executor)
    from minivllm.engine.build import build  # upwards and late: only this convenience needs the engine

    engine = build(config_of(trace, overrides))
    try:
        return _replay(trace.records, engine.executor)
    finally:
        engine.core.shutdown()


def config_of(trace: Trace, overrides: Mapping[str, Any] | None = None) -> EngineConfig:
    """The recorded run's configuration, with a pool in which the recorded block numbers exist."""
    found_out = {"kv.num_blocks": trace.header["info"].get("num_blocks"), "debug.trace": None}
    return EngineConfig.build(overrides={**trace.header["config"], **found_out, **(overrides or {})})


def _replay(records: Iterable[Record], executor: Replays) -> ReplayReport:
    num_steps = num_tokens = 0
    for record in records:
        if record["type"] == "add":
            for digest, content in record["request"].get("contents", {}).items():
                executor.tell("hold_item", digest, b64decode(content))
        if record["type"] != "step":
            continue
        plan, expected = plan_of(record), {**record["tokens"], **record.get("pooled", {})}
        out = executor.submit(plan).result()
        got = {**out.tokens, **{req_id: vector.tolist() for req_id, vector in out.pooled.items()}}
        num_steps += 1
        num_tokens += sum(map(len, expected.values()))
        for req_id in dict.fromkeys([*expected, *got]):
            if expected.get(req_id, []) != got.get(req_id, []):
                wrong = Divergence(plan.step, req_id, expected.get(req_id, []), got.get(req_id, []))
                return ReplayReport(num_steps, num_tokens, wrong)
    return ReplayReport(num_steps, num_tokens, None)


# ---------------------------------------------------------------------------------------------------- Chrome trace

ENGINE, REQUESTS = 1, 2  # process ids: two groups of tracks


def to_chrome(path: str | Path, out: str | Path) -> int:
    """Write a trace for chrome://tracing or Perfetto: returns the number of events.

    One track has the steps with their phases inside; each request has a track with a slice a step (prefill, recompute
    after a preemption, decode); counters show blocks, requests and tokens.
    """
    view = ChromeView()
    for record in read(path).records:
        view.on(record)
    Path(out).write_bytes(view.encode())
    return len(view.events)


class ChromeView:
    """Folds records into trace events. All times in microseconds; a step ends at its record's t."""

    def __init__(self) -> None:
        self.events: list[Record] = []
        self.tracks: dict[str, int] = {}
        self.arrived: dict[str, float] = {}
        self.known: dict[str, tuple[int, str]] = {}  # request -> tokens at its join, what computing them is called
        self._meta(ENGINE, 0, "process_name", "engine")
        self._meta(ENGINE, 0, "thread_name", "steps")
        self._meta(REQUESTS, 0, "process_name", "requests")

    def on(self, record: Record) -> None:
        getattr(self, f"on_{record['type']}")(record)

    def encode(self) -> bytes:
        return msgspec.json.encode({"traceEvents": self.events, "displayTimeUnit": "ms"})

    def arrive(self, req_id: str, seconds: float) -> None:
        self.arrived[req_id] = seconds * 1e6

    def join(self, join: Record) -> None:
        """A record's, or one that has the number of its tokens alone."""
        num_tokens = join["num_tokens"] if "num_tokens" in join else len(join["token_ids"])
        self.known[join["req_id"]] = (num_tokens, "recompute" if num_tokens > join["num_prompt_tokens"] else "prefill")

    def on_add(self, record: Record) -> None:
        self.arrive(record["request"]["id"], record["t"])
        self._instant(record["request"]["id"], record, "arrives")

    def on_abort(self, record: Record) -> None:
        self._instant(record["id"], record, "abort")

    def on_step(self, record: Record) -> None:
        end, spent = record["t"] * 1e6, sum(record["times"].values()) * 1e3
        begin = end - spent
        total = sum(now for _, now, _ in record["sched"])
        args = {"requests": len(record["sched"]), "tokens": total, "leaves": record.get("leaves", [])}
        self._slice(ENGINE, 0, f"step {record['step']}", begin, spent, args)
        at = begin
        for phase, ms in record["times"].items():
            self._slice(ENGINE, 0, phase, at, ms * 1e3, {})
            at += ms * 1e3
        self._counters(record["stats"], total, begin)
        for join in record.get("joins", []):
            self.join(join)
        for req_id, now, before in record["sched"]:
            self._request_slice(req_id, now, before, begin, spent)
        for req_id, (reason, _) in record.get("finished", {}).items():
            self._instant(req_id, record, reason)

    def _request_slice(self, req_id: str, now: int, before: int, begin: float, spent: float) -> None:
        if (arrived := self.arrived.pop(req_id, None)) is not None:
            self._slice(REQUESTS, self._track(req_id), "waiting", arrived, max(begin - arrived, 0.0), {})
        known, catching_up = self.known.get(req_id, (0, "prefill"))
        name = catching_up if before < known else "decode"
        self._slice(REQUESTS, self._track(req_id), name, begin, spent, {"tokens": now, "computed before": before})

    def _counters(self, stats: Record, tokens: int, at: float) -> None:
        free, cached = stats["num_free_blocks"], stats["num_cached_blocks"]
        blocks = {"in use": stats["num_total_blocks"] - free, "cached": cached, "free": free - cached}
        requests = {"running": stats["num_running"], "waiting": stats["num_waiting"]}
        for name, values in (("blocks", blocks), ("requests", requests), ("tokens in the step", {"tokens": tokens})):
            self.events.append({"ph": "C", "pid": ENGINE, "tid": 0, "name": name, "ts": at, "args": values})

    def _track(self, req_id: str) -> int:
        if req_id not in self.tracks:
            self.tracks[req_id] = len(self.tracks) + 1
            self._meta(REQUESTS, self.tracks[req_id], "thread_name", req_id)
        return self.tracks[req_id]

    def _meta(self, pid: int, tid: int, what: str, name: str) -> None:
        self.events.append({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}})

    def _slice(self, pid: int, tid: int, name: str, ts: float, dur: float, args: Record) -> None:
        event = {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": round(ts, 3), "dur": round(dur, 3)}
        self.events.append({**event, "args": args} if args else event)

    def _instant(self, req_id: str, record: Record, name: str) -> None:
        event = {"ph": "i", "s": "t", "pid": REQUESTS, "tid": self._track(req_id)}
        self.events.append({**event, "name": name, "ts": round(record["t"] * 1e6, 3)})
