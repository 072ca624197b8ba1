"""Rule: a name leads to the newest adapter of that name; its weights live exactly as long as somebody may need them."""

from __future__ import annotations

import pytest

from minivllm.errors import AdapterError, BadRequest, NeverFits, UnknownAdapter
from minivllm.kv.base import KVUsage
from minivllm.lora.request import LoRARequest
from minivllm.lora.scheduling import AdapterLimit, AdapterUse
from minivllm.lora.table import AdapterTable, NoAdapters
from minivllm.plan import Delta, StepOutput, StepPlan
from minivllm.request import Request, SamplingParams
from minivllm.scheduler.admission import AdmitAll


class Worker:
    """Remembers what it holds; a path "bad" cannot be loaded."""

    def __init__(self):
        self.held = []

    def call(self, method, key, path=None):
        if path == "bad":
            raise AdapterError("bad file")
        self.held.append(key) if method == "load_adapter" else self.held.remove(key)
        return [8]


@pytest.fixture
def worker():
    return Worker()


@pytest.fixture
def table(worker):
    return AdapterTable(worker.call, max_adapters=3)


def test_no_key_is_ever_used_twice(table, worker):
    keys = []
    for _ in range(3):
        keys.append(table.load("a", "path").key)
        table.unload("a")
    assert len(set(keys)) == 3 and worker.held == []


def test_an_adapter_in_use_outlives_its_name(table, worker):
    first = table.load("a", "one").key
    assert table.acquire("a") == table.acquire("a") == first
    table.unload("a")
    with pytest.raises(UnknownAdapter, match='no LoRA adapter "a" is loaded'):
        table.acquire("a")
    second = table.load("a", "two").key
    assert table.acquire("a") == second and worker.held == [first, second]
    table.release(first)
    table.check()
    assert worker.held == [first, second]
    table.release(first)
    assert worker.held == [second]
    table.check()


def test_a_full_table_refuses_or_forgets_what_came_with_a_request(table, worker):
    asked = [LoRARequest(f"r{i}", i, f"p{i}") for i in range(1, 6)]
    table.load("pinned", "p")
    table.ensure(asked[0])
    table.ensure(asked[1])
    busy = table.acquire("r1")
    table.release(table.acquire("r2"))
    with pytest.raises(AdapterError, match="bad file"):
        table.load("x", "bad")
    assert set(table.loaded) == {"pinned", "r1", "r2"}, "a failed load costs nobody a place"
    table.ensure(asked[2])
    assert set(table.loaded) == {"pinned", "r1", "r3"}, "r2 was used last, but r1 is in use"
    table.acquire("r3")
    with pytest.raises(AdapterError, match="max_cpu_loras admits no more"):
        table.ensure(asked[3])
    table.release(busy)
    table.ensure(asked[3])
    assert set(table.loaded) == {"pinned", "r3", "r4"}
    table.check()


def test_the_least_recently_used_goes_first(table):
    for i in (1, 2, 3):
        table.ensure(LoRARequest(f"r{i}", i, "p"))
    for name in ("r2", "r1", "r3", "r2"):
        table.release(table.acquire(name))
    table.ensure(LoRARequest("r4", 4, "p"))
    assert list(table.loaded) == ["r2", "r3", "r4"]


def test_names_and_ids_mean_one_adapter(table):
    assert table.ensure(LoRARequest("a", 1, "p")) == table.ensure(LoRARequest("a", 1, "p")) == "a"
    for other in (LoRARequest("a", 2, "p"), LoRARequest("a", 1, "q")):
        with pytest.raises(AdapterError, match="Unload it first"):
            table.ensure(other)
    with pytest.raises(AdapterError, match='belongs to LoRA adapter "a"'):
        table.ensure(LoRARequest("b", 1, "p"))
    with pytest.raises(AdapterError, match="loaded already"):
        table.load("a", "p")
    with pytest.raises(AdapterError, match="1 to 256"):
        table.load("", "p")
    with pytest.raises(UnknownAdapter, match='Did you mean "a"'):
        table.unload("aa")
    with pytest.raises(BadRequest, match="at least 1"):
        LoRARequest("a", 0, "p")


def test_without_lora_every_call_says_how_to_turn_it_on():
    off = NoAdapters()
    for call in (lambda: off.load("a", "p"), lambda: off.unload("a"), lambda: off.ensure(None)):
        with pytest.raises(BadRequest, match="lora.enabled=true"):
            call()
    assert not off.loaded


# --- the decorators of admission and scheduler


def request(req_id, adapter=""):
    return Request(req_id, SamplingParams(), [1], 1, adapter=adapter)


def test_a_step_never_has_more_adapters_than_slots():
    limit, usage = AdapterLimit(AdmitAll(), max_loras=2), KVUsage(10, 10, 0, 4)
    running = [request("1", "a"), request("2"), request("3", "b")]
    admitted = {key: limit.admits(request("new", key), 1, running, usage) for key in ("", "a", "b", "c")}
    assert admitted == {"": True, "a": True, "b": True, "c": False}
    assert limit.admits(request("new", "c"), 1, running[:2], usage)


class Inner:
    def add(self, req):
        if req.id == "long":
            raise NeverFits("too long")

    def abort(self, req_id):
        pass

    def update(self, plan, out):
        return [Delta("1", [5]), Delta("2", [5], finish_reason="length"), Delta("3", [], finish_reason="error")]

    def check(self):
        pass


def test_a_request_holds_its_adapter_from_arrival_to_its_end(table, worker):
    scheduler = AdapterUse(Inner(), table)
    key = table.load("a", "p").key
    for req_id in ("1", "2", "3", "4"):
        req = request(req_id, "a")
        scheduler.add(req)
        assert req.adapter == key, "what enters the prefix cache's keys"
    scheduler.add(request("5"))
    with pytest.raises(NeverFits):
        scheduler.add(request("long", "a"))
    with pytest.raises(UnknownAdapter):
        scheduler.add(request("6", "b"))
    assert table.loaded["a"].num_users == 4
    scheduler.update(StepPlan(0), StepOutput())
    assert table.loaded["a"].num_users == 2
    table.unload("a")
    scheduler.abort("4")
    scheduler.abort("4")
    assert worker.held == [key]
    scheduler.check()
    scheduler.abort("1")
    assert worker.held == []
    scheduler.check()
