"""The share of time in which a GPU computes or copies, from torch's profiler: what the device did, when, in a window of
steps that are all decodes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from minivllm.engine.core import Observer

ON_THE_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of the profiler's events


def share(spans: Iterable[tuple[float, float]]) -> float | None:
    """Of the time from the first begin to the last end, the part in which at least one (begin, end) runs."""
    spans = sorted(spans)
    if not spans:
        return None
    busy, reached = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return busy / (reached - spans[0][0]) if reached > spans[0][0] else None


def spans_of(trace: dict) -> list[tuple[float, float]]:
    """Of a Chrome trace as the profiler writes it, in microseconds."""
    events = (event for event in trace["traceEvents"] if event.get("cat") in ON_THE_DEVICE)
    return [(event["ts"], event["ts"] + event["dur"]) for event in events]


class BusyWatch(Observer):
    """Profiles `num_steps` steps of an engine core in this process, once `num_requests` decode together."""

    def __init__(self, device: torch.device, num_requests: int, num_steps: int, skip: int = 4):
        self.num_requests, self.first, self.last = num_requests, skip, skip + num_steps
        on_gpu = device.type == "cuda"
        self._profile = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
        self._seen, self._began = 0, False
        self.busy: float | None = None
        self.ended = False

    def on_start(self, config, info) -> None: ...
    def on_add(self, req, step) -> None: ...
    def on_abort(self, req_id) -> None: ...
    def close(self) -> None: ...

    def on_step(self, plan, out, deltas, times) -> None:
        if self.ended or not plan.total_tokens == len(plan.num_tokens) == self.num_requests:
            return
        self._seen += 1
        if self._seen == self.first:
            self._profile.start()
            self._began = True
        elif self._seen == self.last:
            self.end()

    def end(self) -> None:
        """Also where the run was shorter than the window."""
        if not self._began or self.ended:
            return
        self.ended = True
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            self.busy = share(spans_of(json.loads(path.read_text())))
