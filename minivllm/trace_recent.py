"""The last steps of an engine that runs, for whoever asks: what `--trace` would have written of them, without tokens.

RecentSteps lives beside the engine core and keeps records of minivllm.trace/1 that lack what would be a user's text:
a join has the number of its tokens, and a step has no tokens, blocks or log-probabilities. `snapshot` is plain data,
so it can cross to the front end's process, which makes a Chrome trace of it (`chrome`).

What happened before the oldest record and is needed to draw it (who had arrived and not run, how long the prompts of
those that run are) is folded into `Before` as records are dropped, so a snapshot is drawn as if nothing were missing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from minivllm.plan import Delta, StepOutput, StepPlan
from minivllm.request import EngineRequest
from minivllm.trace import ChromeView, Record, rows_of


@dataclass(slots=True)
class Before:
    """What the records that were dropped leave behind, of requests that live."""

    arrived: dict[str, float] = field(default_factory=dict)  # those that have not run: seconds
    joins: dict[str, Record] = field(default_factory=dict)  # those that run

    def fold(self, record: Record) -> None:
        if record["type"] == "add":
            self.arrived[record["request"]["id"]] = record["t"]
        elif record["type"] == "abort":
            self.arrived.pop(record["id"], None)
        else:
            for req_id in record["leaves"]:
                self.joins.pop(req_id, None)
            self.joins |= {join["req_id"]: join for join in record["joins"]}
            for req_id, _, _ in record["sched"]:
                self.arrived.pop(req_id, None)


class RecentSteps:
    """An engine observer that remembers `num_steps` steps and what came between them. `clock` in seconds."""

    def __init__(self, num_steps: int, clock: Callable[[], float] = time.perf_counter):
        self.num_steps = num_steps
        self._clock = clock
        self._start = clock()
        self._before = Before()
        self._records: deque[Record] = deque()
        self._num_held = 0  # of the records, how many are steps

    def on_start(self, config: Mapping[str, Any], info: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...

    def on_add(self, req: EngineRequest, step: int) -> None:
        self._records.append({"type": "add", "t": self._now(), "request": {"id": req.id}})

    def on_abort(self, req_id: str) -> None:
        self._records.append({"type": "abort", "t": self._now(), "id": req_id})

    def on_step(self, plan: StepPlan, out: StepOutput, deltas: list[Delta], times: Mapping[str, float]) -> None:
        self._records.append(
            {
                "type": "step",
                "t": self._now(),
                "step": plan.step,
                "sched": rows_of(plan),
                "times": times,
                "leaves": list(plan.leaves),
                "stats": plan.stats,
                "joins": [
                    {"req_id": j.req_id, "num_tokens": len(j.token_ids), "num_prompt_tokens": j.num_prompt_tokens}
                    for j in plan.joins
                ],
                "finished": {d.req_id: [d.finish_reason, None] for d in deltas if d.finish_reason is not None},
            }
        )
        self._num_held += 1
        while self._num_held > self.num_steps:
            self._drop()

    def _drop(self) -> None:
        record = self._records.popleft()
        self._num_held -= record["type"] == "step"
        self._before.fold(record)

    def snapshot(self, num_steps: int) -> Record:
        """The last num_steps of the steps that are held, as plain data."""
        before = Before(dict(self._before.arrived), dict(self._before.joins))
        records, surplus = [], self._num_held - num_steps
        for record in self._records:
            if surplus > 0:
                before.fold(record)
                surplus -= record["type"] == "step"
            else:
                records.append(record)
        found = {"records": records, "arrived": before.arrived, "joins": list(before.joins.values())}
        return msgspec.to_builtins(found)

    def _now(self) -> float:
        return round(self._clock() - self._start, 6)


def chrome(snapshot: Record) -> bytes:
    """The snapshot as a file for chrome://tracing or ui.perfetto.dev."""
    view = ChromeView()
    for req_id, seconds in snapshot["arrived"].items():
        view.arrive(req_id, seconds)
    for join in snapshot["joins"]:
        view.join(join)
    for record in snapshot["records"]:
        view.on(record)
    return view.encode()
