"""A scheduler around another one. It passes everything on; what stands around to change something overrides that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from minivllm.plan import Delta, StepOutput, StepPlan
from minivllm.request import Request
from minivllm.scheduler.protocol import InnerScheduler


class Around:
    def __init__(self, inner: InnerScheduler):
        self.inner = inner

    @property
    def requests(self) -> Mapping[str, Request]:
        return self.inner.requests

    @property
    def running(self) -> Sequence[Request]:
        return self.inner.running

    @property
    def waiting(self) -> Sequence[Request]:
        return self.inner.waiting

    def add(self, req: Request) -> None:
        self.inner.add(req)

    def abort(self, req_id: str) -> None:
        self.inner.abort(req_id)

    def hold(self, req_ids: Iterable[str]) -> None:
        self.inner.hold(req_ids)

    def let_in(self, req: Request, at_cost_of: Sequence[Request] = ()) -> None:
        self.inner.let_in(req, at_cost_of)

    def reorder(self, orders: Mapping[str, tuple]) -> None:
        self.inner.reorder(orders)

    def fork(self, forks: Sequence[tuple[str, Request]], ends: Sequence[str]) -> None:
        self.inner.fork(forks, ends)

    def schedule(self, now: float) -> StepPlan:
        return self.inner.schedule(now)

    def update(self, plan: StepPlan, out: StepOutput) -> list[Delta]:
        return self.inner.update(plan, out)

    def check(self) -> None:
        self.inner.check()
