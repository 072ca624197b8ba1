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


def test_a_full_table_forgets_what_came_with_a_request_and_is_not_in_use(table, worker):
    asked = [LoRARequest(f"r{i}", i, f"p{i}") for i in range(1, 6)]
    for request in asked[:3]:
        table.ensure(request)
    busy = table.acquire("r1")
    table.acquire("r2")
    with pytest.raises(AdapterError, match="bad file"):
        table.load("x", "bad")
    assert set(table.loaded) == {"r1", "r2", "r3"}, "a failed load costs nobody a place"
    table.ensure(asked[3])
    assert set(table.loaded) == {"r1", "r2", "r4"}, "r3 was used last, but the others are in use"
    table.acquire("r4")
    with pytest.raises(AdapterError, match="max_cpu_loras admits no more"):
        table.ensure(asked[4])
    table.release(busy)
    table.ensure(asked[4])
    assert set(table.loaded) == {"r2", "r4", "r5"}
    table.check()


def test_what_was_loaded_by_name_gives_its_place_away_and_comes_back_with_its_next_request(table, worker):
    first = {name: table.load(name, f"p {name}").key for name in ("a", "b", "c")}
    table.release(table.acquire("a"))
    table.load("d", "p d")
    assert list(table.loaded) == ["a", "b", "c", "d"], "the names stay"
    assert first["b"] not in worker.held and len(worker.held) == 3, "b was used least recently"
    again = table.acquire("b")
    assert again != first["b"], "its old KV is not found"
    assert again in worker.held and first["c"] not in worker.held
    table.check()
    table.unload("c")  # not in memory
    table.unload("b")  # in use
    table.release(again)
    assert sorted(table.loaded) == ["a", "d"] and len(worker.held) == 2
    table.check()


def test_an_adapter_that_cannot_come_back_costs_nobody_a_place(table, worker):
    for name in ("a", "b", "c", "d"):
        table.load(name, "p")
    table.loaded["a"].path = "bad"
    held = list(worker.held)
    for _ in range(2):
        with pytest.raises(AdapterError, match="bad file"):
            table.acquire("a")
    assert worker.held == held and not table.loaded["a"].num_users
    table.check()


def test_the_number_of_names_is_bounded(table, monkeypatch):
    monkeypatch.setattr("minivllm.lora.table.MAX_NAMES", 5)
    for i in range(5):
        table.load(f"a{i}", "p")
    with pytest.raises(AdapterError, match="which is the most"):
        table.load("one more", "p")


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
