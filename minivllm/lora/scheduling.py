"""What LoRA adds to scheduling, as two decorators: no scheduler knows of adapters."""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.kv.base import KVUsage
from minivllm.lora.table import AdapterTable
from minivllm.plan import Delta, StepOutput, StepPlan
from minivllm.request import Request
from minivllm.scheduler.admission import Admission
from minivllm.scheduler.protocol import Scheduler


class AdapterLimit:
    """At most `max_loras` different adapters run at once, so that a step finds a slot for each of its own.

    Who would be one too many waits at the head of the queue, and those behind it wait too: nobody is passed over for
    ever. (vLLM skips it and goes on with the next, which fills a step better and lets a rare adapter starve.)
    """

    def __init__(self, inner: Admission, max_loras: int):
        self.inner = inner
        self.max_loras = max_loras

    def admits(self, req: Request, new_tokens: int, running: Sequence[Request], usage: KVUsage) -> bool:
        adapters = {r.adapter for r in (req, *running)} - {""}
        return len(adapters) <= self.max_loras and self.inner.admits(req, new_tokens, running, usage)


class AdapterUse:
    """A Scheduler around another one: gives each request its adapter's key, and keeps the adapter while it lives."""

    def __init__(self, inner: Scheduler, table: AdapterTable):
        self.inner = inner
        self.table = table
        self._key_of: dict[str, str] = {}  # of live requests

    def add(self, req: Request) -> None:
        """Raises UnknownAdapter beside what the inner scheduler raises."""
        req.adapter = key = self.table.acquire(req.adapter)
        try:
            self.inner.add(req)
        except Exception:
            self.table.release(key)
            raise
        self._key_of[req.id] = key

    def abort(self, req_id: str) -> None:
        self.inner.abort(req_id)
        self._release(req_id)

    def schedule(self, now: float) -> StepPlan:
        return self.inner.schedule(now)

    def update(self, plan: StepPlan, out: StepOutput) -> list[Delta]:
        deltas = self.inner.update(plan, out)
        for delta in deltas:
            if delta.finish_reason is not None:
                self._release(delta.req_id)
        return deltas

    def check(self) -> None:
        self.inner.check()
        self.table.check()
        num_users = sum(adapter.num_users for adapter in self.table.loaded.values())
        assert num_users <= sum(map(bool, self._key_of.values())), "an adapter is kept for a request that has ended"

    def _release(self, req_id: str) -> None:
        self.table.release(self._key_of.pop(req_id, ""))
