"""Several cores behind one link: first over links that a test plays, then over real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace

import psutil
import pytest
from lora.adapters import write_adapter

from minivllm import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from minivllm.config import EngineConfig
from minivllm.engine.core import EngineStats
from minivllm.engine.messages import (
    Abort,
    Adapters,
    Add,
    Call,
    Ended,
    Facts,
    Failure,
    Refused,
    Report,
    Returned,
)
from minivllm.engine.replicas import share, share_cores
from minivllm.engine.router import RouterLink
from minivllm.engine.routing import RoundRobin
from minivllm.errors import AdapterError, BadRequest, ConfigError, EngineDead, ModelError, ReplicaDead
from minivllm.lora.table import Adapter
from minivllm.plan import Delta
from minivllm.request import EngineRequest, Sibling
from minivllm.runner import memory
from minivllm.trace import read

TINY = {"kv.num_blocks": 60, "kv.block_size": 8, "executor.num_threads": 1, "model.dtype": "float32"}
TWO = {**TINY, "engine.core": "process", "engine.replicas": 2}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


# ---- over links that a test plays


def adapter(name, generation=1):
    return Adapter(name, f"{name}#{generation}", f"/{name}", 8)


def facts(*adapters):
    return Facts(EngineConfig(), [], 100, "m", "", {}, list(adapters))


class FakeLink:
    is_running = True

    def __init__(self):
        self.facts, self.sent = facts(), []

    def start(self, receive):
        self.say = receive

    def send(self, command):
        self.sent.append(command)

    def close(self):
        self.is_running = False


class Played:
    def __init__(self, number=2):
        self.links = [FakeLink() for _ in range(number)]
        self.router = RouterLink(self.links, RoundRobin(4), facts())
        self.got = []
        self.router.start(self.got.append)

    def add(self, req_id, **options):
        self.router.send(Add(EngineRequest(req_id, [1, 2, 3], SamplingParams(), **options)))

    def sent(self, number, kind=Add):
        return [command for command in self.links[number].sent if isinstance(command, kind)]

    def take(self, kind):
        found = [message for message in self.got if isinstance(message, kind)]
        self.got[:] = [message for message in self.got if not isinstance(message, kind)]
        return found


@pytest.fixture
def played():
    return Played()


def report(*deltas, **stats):
    return Report([Delta(*delta) for delta in deltas], EngineStats(**stats), [], 0, {})


def test_each_request_has_one_replica_and_its_abort_finds_it(played):
    for i in range(4):
        played.add(str(i))
    assert [[c.request.id for c in played.sent(n)] for n in (0, 1)] == [["0", "2"], ["1", "3"]]
    played.router.send(Abort(["2", "3", "unknown"]))
    assert [played.sent(n, Abort)[0].req_ids for n in (0, 1)] == [["2"], ["3"]]
    played.links[0].say(report(("0", [5], "stop")))
    (got,) = played.take(Report)
    assert got.replica == 0 and got.deltas[0].req_id == "0"
    assert not played.router.replicas[0].live and list(played.router.replicas[1].live) == ["1"]


def test_the_sequences_of_a_prompt_stay_together(played):
    for i in range(3):
        played.add(f"a#{i}", group="a")
    played.add("b", beam=BeamSearchParams(beam_width=3, max_tokens=4), group="b")
    assert len(played.sent(0)) == 3 and [c.request.id for c in played.sent(1)] == ["b"]
    assert list(played.router.replicas[1].live) == ["b#0", "b#1", "b#2"]


def test_sequences_that_come_together_are_counted_and_aborted_one_by_one(played):
    first = EngineRequest("a#0", [1, 2, 3], SamplingParams(seed=1), group="a")
    played.router.send(Add(first, [Sibling("a#1", 2), Sibling("a#2", 3)]))
    assert played.router.replicas[0].live == {"a#0": 3, "a#1": 3, "a#2": 3} and not played.sent(1)
    played.router.send(Abort(["a#1"]))
    assert played.sent(0, Abort)[0].req_ids == ["a#1"] and list(played.router.replicas[0].live) == ["a#0", "a#2"]


def test_the_load_counts_what_other_front_ends_have_there(played):
    played.add("a")
    played.links[0].say(report(num_running=3, num_waiting=2))
    assert played.router.replicas[0].num_others == 4
    played.links[0].say(report(("a", [1], "stop"), num_running=0))
    assert played.router.replicas[0].num_others == 0


def test_a_replicas_end_refuses_its_requests_and_no_others(played):
    for i in range(4):
        played.add(str(i))
    played.links[1].say(Ended(Failure.of(EngineDead("by signal 9"))))
    refused = played.take(Refused)
    assert {message.req_id for message in refused} == {"1", "3"}
    error = refused[0].error.exception()
    assert isinstance(error, ReplicaDead) and "replica 1" in str(error) and "signal 9" in str(error)
    assert [message.replica for message in played.take(Ended)] == [1]
    for i in range(4, 8):
        played.add(str(i))
    assert len(played.sent(0)) == 6
    played.links[1].say(facts())
    assert [message.replica for message in played.take(Facts)] == [1]
    played.add("8"), played.add("9")
    assert len(played.sent(1)) == 3


def test_without_any_replica_a_request_is_refused_at_once(played):
    for link in played.links:
        link.say(Ended(Failure.of(EngineDead("gone"))))
    played.add("late")
    (refused,) = played.take(Refused)
    assert refused.req_id == "late" and isinstance(refused.error.exception(), EngineDead)


def test_a_call_to_all_is_answered_once_all_have_answered(played):
    played.router.send(Call(7, "load_lora", ["x", "/x"]))
    calls = [played.sent(n, Call)[0] for n in (0, 1)]
    played.links[0].say(Adapters([adapter("x")]))
    assert played.take(Adapters)[0].loaded == [], "a request may go to either, so both must have it"
    played.links[0].say(Returned(calls[0].id, ["x"]))
    assert not played.take(Returned)
    played.links[1].say(Adapters([adapter("x")]))
    played.links[1].say(Returned(calls[1].id, ["x"]))
    assert played.take(Adapters)[0].loaded == [adapter("x")]
    (answer,) = played.take(Returned)
    assert (answer.id, answer.value, answer.error) == (7, ["x"], None)


def test_an_adapter_that_one_replica_cannot_load_is_unloaded_from_the_others(played):
    played.router.send(Call(7, "load_lora", ["x", "/x"]))
    calls = [played.sent(n, Call)[0] for n in (0, 1)]
    played.links[0].say(Returned(calls[0].id, ["x"]))
    played.links[1].say(Returned(calls[1].id, None, Failure.of(AdapterError("no room"))))
    (answer,) = played.take(Returned)
    assert isinstance(answer.error.exception(), AdapterError)
    assert [(c.name, c.args) for c in played.sent(0, Call)[1:]] == [("unload_lora", ["x"])]
    assert len(played.sent(1, Call)) == 1


def test_a_call_to_one_reaches_that_one(played):
    played.router.send(Call(3, "recent_steps", [5], replica=1))
    assert not played.sent(0, Call)
    played.links[1].say(Returned(played.sent(1, Call)[0].id, {"records": []}))
    assert played.take(Returned)[0].value == {"records": []}


def test_a_replica_that_dies_keeps_no_call_waiting(played):
    played.router.send(Call(1, "load_lora", ["x", "/x"]))
    played.router.send(Call(2, "recent_steps", [5], replica=1))
    played.links[1].say(Ended(Failure.of(EngineDead("gone"))))
    (answer,) = played.take(Returned)
    assert answer.id == 2 and isinstance(answer.error.exception(), ReplicaDead)
    played.links[0].say(Returned(played.sent(0, Call)[0].id, ["x"]))
    assert played.take(Returned)[0].error is None
    played.router.send(Call(3, "recent_steps", [5], replica=1))
    assert isinstance(played.take(Returned)[0].error.exception(), ReplicaDead)


def test_a_replica_that_is_back_catches_up_with_the_adapters_of_the_others(played):
    played.links[1].say(Ended(Failure.of(EngineDead("gone"))))
    played.links[0].say(Adapters([adapter("kept"), adapter("new")]))
    played.links[1].say(facts(adapter("kept"), adapter("old")))
    assert [a.name for a in played.take(Facts)[0].adapters] == ["kept"]
    calls = [(c.name, c.args[0]) for c in played.sent(1, Call)]
    assert calls[0] == ("unload_lora", "old") and calls[1][0] == "ensure_lora" and calls[1][1]["lora_name"] == "new"


# ---- the machine, divided


def test_what_is_free_is_divided_by_those_who_share_it(monkeypatch):
    """A fraction is of a replica's part; who has a device of its own says what is free there."""
    monkeypatch.setattr(memory, "free_memory", lambda device: 1 << 30)
    spec, place = SimpleNamespace(bytes_per_block=1 << 20), SimpleNamespace(type="cpu")
    sizes = {}
    for replicas, free in ((1, None), (2, None), (2, 1 << 30)):
        config = EngineConfig.build("v1", {**TWO, "engine.replicas": replicas, "kv.num_blocks": None})
        sizes[replicas, free], _ = memory.size_pool(config, spec, place, 1 << 20, free=free)
    assert sizes == {(1, None): 512, (2, None): 256, (2, 1 << 30): 512}
    place.type = "cuda"
    assert memory.size_pool(EngineConfig.build("v1", {}), spec, place, 1 << 20)[0] == 921, "0.9 of a GPU's"


def test_threads_and_traces_are_divided():
    config = EngineConfig.build("v1", {**TWO, "executor.num_threads": None, "debug.trace": "out/run.jsonl"})
    parts = [share(config, i) for i in range(2)]
    assert all(part.executor.num_threads >= 1 for part in parts)
    assert [part.debug.trace for part in parts] == ["out/run.0.jsonl", "out/run.1.jsonl"]
    assert share(EngineConfig.build("v1", {**TWO, "executor.num_threads": 5}), 0).executor.num_threads == 5


def test_cores_are_divided_where_there_are_enough(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6, 7, 9}, raising=False)
    assert share_cores(2) == [[4, 5], [6, 7]]
    assert share_cores(6) == [None] * 6


def test_replicas_need_processes():
    with pytest.raises(ConfigError, match="engine.core=process"):
        EngineConfig.build("v1", {"engine.replicas": 3})
    with pytest.raises(ConfigError, match="router"):
        EngineConfig.build("v1", {"engine.router": "prefixes"})


# ---- over real processes


async def drain(engine, request_id, params, prompt=(1, 2, 3)):
    return [output async for output in engine.generate(list(prompt), params, request_id, output_kind="delta")]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    recent = {"debug.recent_steps": 50, "engine.router": "round_robin", "lora.enabled": True}
    engine = AsyncLLM("dummy:tiny", overrides={**TWO, **recent})
    yield engine
    engine.close()


def test_offline_batches_have_the_tokens_of_one_core(tmp_path):
    prompts = [[1, 2, 3], [4, 5], [6] * 30, [7, 8]]
    sampled = GREEDY.replace(temperature=1.0, seed=5, n=2)
    params = [GREEDY, sampled, BeamSearchParams(beam_width=2, max_tokens=6), GREEDY]
    tokens = []
    trace = str(tmp_path / "trace.jsonl")
    for overrides in (TINY, {**TWO, "engine.router": "round_robin", "debug.trace": trace}):
        with LLM("dummy:tiny", overrides=overrides) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            tokens.append([[c.token_ids for c in output.outputs] for output in outputs])
            generated = [part.generation_tokens for part in llm.stats.parts]
    assert tokens[0] == tokens[1]
    assert len(generated) == 2 and all(generated)
    assert all(sum(1 for _ in read(tmp_path / f"trace.{i}.jsonl").steps()) for i in range(2))


def test_what_cannot_be_built_is_told_once_and_nothing_is_left():
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(ModelError, match="no-such-shape"):
        LLM("dummy:no-such-shape", overrides=TWO)
    assert {child.pid for child in psutil.Process().children()} <= before


def test_steps_stats_and_a_replica_by_number(two):
    async def run():
        before = [part.generation_tokens for part in two.stats.parts], two.stats.generation_tokens
        await asyncio.gather(*(drain(two, f"s{i}", GREEDY) for i in range(4)))
        snapshots = [await two.recent_steps(10, replica) for replica in range(2)]
        assert all(snapshot["records"] for snapshot in snapshots)
        names = [{r["request"]["id"] for r in s["records"] if r["type"] == "add"} for s in snapshots]
        assert not names[0] & names[1]
        assert [part.generation_tokens for part in two.stats.parts] == [num + 24 for num in before[0]]
        assert two.stats.generation_tokens == before[1] + 48 and two.stats.num_total_blocks == 120

    asyncio.run(run())


def test_adapters_are_loaded_everywhere_and_a_wrong_one_nowhere(two, tmp_path):
    folder = str(write_adapter(tmp_path / "a", 1, 4))

    async def run():
        loaded = await two.load_lora("a", folder)
        assert loaded.name == "a" and [a.name for a in two.list_loras()] == ["a"]
        plain, with_a = [await drain_all(two, f"l{name}", lora_request=name) for name in (None, "a")]
        assert len({tuple(tokens) for tokens in plain}) == len({tuple(tokens) for tokens in with_a}) == 1
        assert plain[0] != with_a[0]
        with pytest.raises(AdapterError):
            await two.load_lora("wrong", str(tmp_path / "missing"))
        await two.unload_lora("a")
        assert not two.list_loras()
        with pytest.raises(BadRequest):
            await drain_all(two, "late", lora_request="a")

    asyncio.run(run())


async def drain_all(engine, prefix, **options):
    """The tokens of one prompt, twice: once from each replica."""
    found = []
    for i in range(2):
        outputs = [o async for o in engine.generate([9, 8, 7], GREEDY, f"{prefix}{i}", **options)]
        found.append(outputs[-1].outputs[0].token_ids)
    return found


def test_killing_a_replica_ends_its_streams_only_and_it_comes_back(two):
    async def run():
        tasks = [asyncio.create_task(drain(two, f"k{i}", GREEDY.replace(max_tokens=400))) for i in range(4)]
        before = two.stats.generation_tokens
        while two.stats.generation_tokens < before + 8:
            await asyncio.sleep(0.01)
        links = [replica.link for replica in two._link.replicas]
        doomed, theirs = links[1].pid, set(two._link.replicas[1].live)
        os.kill(doomed, signal.SIGKILL)
        dead = [task for i, task in enumerate(tasks) if f"k{i}" in theirs]
        ends = await asyncio.gather(*dead, return_exceptions=True)
        assert len(ends) == 2 and all(isinstance(e, ReplicaDead) and "signal 9" in str(e) for e in ends)
        assert two.is_running and two.dead_replicas == {1}
        assert two.stats.parts[1].num_running == 0
        during = await asyncio.gather(*(drain(two, f"d{i}", GREEDY) for i in range(2)))
        assert all(outputs[-1].finished for outputs in during)
        others = [outputs for outputs in await asyncio.gather(*tasks, return_exceptions=True) if outputs not in ends]
        assert len(others) == 2 and all(outputs[-1].finished for outputs in others)
        while two.dead_replicas:
            await asyncio.sleep(0.05)
        assert links[1].pid != doomed and not psutil.pid_exists(doomed)
        after = [await drain(two, f"a{i}", GREEDY) for i in range(2)]
        assert all(outputs[-1].finished for outputs in after)
        assert two.stats.parts[1].generation_tokens, "the new one serves"

    asyncio.run(run())


def test_closing_leaves_no_process_behind():
    engine = AsyncLLM("dummy:tiny", overrides=TWO)
    pids = [replica.link.pid for replica in engine._link.replicas]
    engine.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not engine.is_running
