"""A simulated cluster: real cores on one virtual clock, in the order in which things happen."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict

import numpy as np
import pytest

from minivllm.config import EngineConfig
from minivllm.engine import build as building
from minivllm.engine.build import cluster as composition
from minivllm.engine.build.cluster import build_cluster
from minivllm.engine.build.simulated import SimulatedWorkerBuilder
from minivllm.engine.step_loop import Reporter
from minivllm.errors import ConfigError, TraceError
from minivllm.plan import Delta
from minivllm.simulate.figures import GAP_ERROR, Figures, Gaps
from minivllm.simulate.host import NO_HOST, HostCost
from minivllm.simulate.prompts import Prompts
from minivllm.simulate.workload import TraceRequest

TINY = {"model.path": "dummy:tiny-short", "executor.kind": "simulated", "kv.block_size": 8, "debug.check": True}
TINY |= {"model.max_model_len": 120, "kv.num_blocks": 40, "kv.swap_memory": "100KiB"}
LLAMA = {**TINY, "model.path": "dummy:llama-3.1-8b", "model.max_model_len": 1100, "kv.num_blocks": 150}
LLAMA["kv.swap_memory"] = "100MiB"


def config(**overrides) -> EngineConfig:
    return EngineConfig.build(overrides.pop("preset", "v1"), {**LLAMA, **overrides})


def arrivals(num: int = 60, rate: float = 40.0, seed: int = 0, longest: int = 300) -> list[TraceRequest]:
    rng, now, found = random.Random(seed), 0.0, []
    for _ in range(num):
        now += rng.expovariate(rate)
        pieces = tuple(rng.choice([(), (1,), (1, 2), (3,)]))
        found.append(TraceRequest(now, rng.randrange(1, longest), rng.randrange(1, 40), pieces, piece_tokens=32))
    return found


def run(requests, host=NO_HOST, link_seconds=0.0, replicas=1, **overrides) -> Figures:
    return build_cluster(config(**overrides), replicas, host, link_seconds).run(requests)


def said(figures: Figures) -> str:
    return json.dumps(figures.summary({"ttft": 0.1, "tpot": 0.01}), indent=1) + str(vars(figures.rows))


# ----------------------------------------------------------------------------------------------------- determinism


@pytest.mark.parametrize("router", ["round_robin", "least_loaded", "prefix"])
def test_two_runs_with_one_seed_are_equal_to_the_last_byte(router):
    options = {"replicas": 3, "engine.router": router, "kv.num_blocks": 50, "model.max_model_len": 350}
    first, second = (said(run(iter(arrivals()), HostCost(1e-3, 1e-5), 1e-4, **options)) for _ in range(2))
    assert first == second
    assert first != said(run(arrivals(seed=1), HostCost(1e-3, 1e-5), 1e-4, **options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scheduler.max_num_batched_tokens": 50},
        {"kv.num_blocks": 60, "model.max_model_len": 400, "kv.preemption": "swap"},
        {"engine.overlap": 2, "kv.num_blocks": 60, "model.max_model_len": 400},
        {"preset": "v0", "kv.num_blocks": 60, "model.max_model_len": 400},
    ],
    ids=str,
)
def test_a_worker_that_knows_lengths_alone_takes_the_time_of_one_that_builds_inputs(options, monkeypatch):
    requests = arrivals(rate=400)
    short = said(run(requests, **options))

    def with_inputs(config, make_cost):
        return lambda stopwatch: SimulatedWorkerBuilder(config, clock=stopwatch, make_cost=make_cost).build()

    monkeypatch.setattr(composition, "_workers", with_inputs)
    assert said(run(requests, **options)) == short


# ---------------------------------------------------------------------------------------- beside a real engine


class Plans(Reporter):
    """An Observer that keeps each plan as data, but for what its tokens are; and when the core's next step began."""

    def __init__(self, clock):
        self.clock, self.plans, self.ends = clock, [], []

    def on_step(self, plan, out, deltas, times):
        data = asdict(plan)
        data["joins"] = [(join.req_id, len(join.token_ids), join.num_prompt_tokens) for join in plan.joins]
        self.plans.append(data)
        self.ends.append(self.clock())


def real_run(overrides, requests: list[TraceRequest], ends: list[float], preset: str) -> list[dict]:
    """A real model, on a clock that each step moves to where the virtual one was; it waits for arrivals as a server's
    loop does."""
    now = 0.0
    observer = Plans(lambda: now)
    engine = building.build(EngineConfig.build(preset, overrides), [observer])
    engine.core.clock = lambda: now
    prompts = Prompts(engine.info["vocab_size"])
    waiting = [(asked.arrival, prompts.request(number, asked)) for number, asked in enumerate(requests)]
    while waiting or not engine.core.is_settled:
        while waiting and waiting[0][0] <= now:
            engine.core.add(waiting.pop(0)[1])
        if engine.core.is_settled:
            now = waiting[0][0]
            continue
        deltas = engine.core.step()
        assert not [delta.error for delta in deltas if delta.error]
        now = ends[len(observer.plans) - 1]
    engine.core.shutdown()
    return observer.plans


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scheduler.max_num_batched_tokens": 16},
        {"kv.num_blocks": 16, "model.max_model_len": 100},
        {"kv.num_blocks": 16, "model.max_model_len": 100, "kv.preemption": "swap"},
        {"preset": "v0", "kv.preemption": "recompute"},
        {"preset": "orca-pow2"},
    ],
    ids=lambda options: ",".join(map(str, options.values())) or "default",
)
def test_a_real_engine_that_is_fed_the_same_step_times_makes_the_same_plans(options):
    options = {"model.dtype": "float32", **options}
    preset = options.pop("preset", "v1")
    requests = arrivals(30, rate=20_000.0, longest=50)
    cluster = build_cluster(config(preset=preset, **{**TINY, **options}), host=HostCost(1e-4))
    replica = cluster.replicas[0]
    observer = Plans(replica.clock)
    replica.core.observers.append(observer)
    cluster.run(requests)
    real = {**TINY, **options, "executor.kind": "uni", "executor.num_threads": 1}
    assert real_run(real, requests, observer.ends, preset) == observer.plans
    assert len(observer.plans) > 30 and max(plan["stats"]["num_running"] for plan in observer.plans) > 3


# ---------------------------------------------------------------------------------------------------------- time


def test_a_lone_request_takes_its_steps_its_host_and_its_links():
    free = run([TraceRequest(0.0, 100, 5)]).summary()
    slow = run([TraceRequest(0.0, 100, 5)], HostCost(1e-2, 1e-3), link_seconds=0.5).summary()
    assert math.isclose(slow["ttft"]["mean"], free["ttft"]["mean"] + 0.011 + 2 * 0.5)
    assert math.isclose(slow["tpot"]["mean"], free["tpot"]["mean"] + 0.011)
    assert slow["num_steps"] == free["num_steps"] == 6  # a last one tells the workers that it has left


@pytest.mark.parametrize("seconds, hidden", [(1e-3, True), (1e-1, False)])
def test_with_two_steps_in_flight_the_host_is_hidden_while_it_is_quicker_than_the_device(seconds, hidden):
    free = run([TraceRequest(0.0, 100, 30)], **{"engine.overlap": 2}).summary()["tpot"]["mean"]
    assert 1e-3 < free < 1e-1
    taken = run([TraceRequest(0.0, 100, 30)], HostCost(seconds), **{"engine.overlap": 2}).summary()["tpot"]["mean"]
    assert math.isclose(taken, free if hidden else seconds, rel_tol=1e-3)


def test_a_core_takes_what_came_during_a_step_before_its_next_one():
    cluster = build_cluster(config())
    steps = Plans(cluster.replicas[0].clock)
    cluster.replicas[0].core.observers.append(steps)
    cluster.run([TraceRequest(0.0, 1000, 3), TraceRequest(1e-6, 50, 3), TraceRequest(1e-5, 50, 3)])
    assert [sorted(plan["num_tokens"]) for plan in steps.plans[:2]] == [["0"], ["0", "1", "2"]]


def test_a_router_knows_of_an_end_when_its_report_has_come_and_not_before():
    first = TraceRequest(0.0, 10, 2)
    options = {"engine.router": "least_loaded"}
    ended = run([first], **options).rows.last[0]

    def placed(moment: float, link: float) -> int:
        cluster = build_cluster(config(**options), 2, link_seconds=link)
        cluster.run([first, TraceRequest(0.0, 900, 30), TraceRequest(moment, 10, 2)])
        return max(cluster.replicas, key=lambda replica: replica.core.stats.prompt_tokens).number

    assert placed(ended * 1.01, 0.0) == 1  # the longer one's place; the third went to the first one's
    late = build_cluster(config(**options), 2, link_seconds=1.0)
    late.run([first, TraceRequest(0.0, 9, 30), TraceRequest(1.5, 10, 2)])
    assert [replica.core.stats.prompt_tokens for replica in late.replicas] == [10, 19]  # 10 tokens seem to live there


def test_requests_go_where_their_prefix_is():
    requests = [TraceRequest(i / 10, 200, 2, pieces=(i % 4,), piece_tokens=192) for i in range(40)]
    hits = {}
    for router in ("prefix", "round_robin"):
        hits[router] = run(requests, replicas=3, **{"engine.router": router}).summary()["prefix_hit_rate"]
    assert hits["prefix"] > 0.8 > hits["round_robin"]


# ------------------------------------------------------------------------------------------------------- figures


def test_all_percentiles_are_those_of_what_happened():
    figures, rng = Figures(1), np.random.default_rng(0)
    times = {}
    for i in range(200):
        asked = TraceRequest(float(i), 10, 5)
        figures.arrived(str(i), asked)
        times[i] = asked.arrival + np.cumsum(rng.exponential(size=5))
        for n, now in enumerate(times[i]):
            figures.told([Delta(str(i), [1], "length" if n == 4 else None)], float(now))
    found = figures.summary({"ttft": 1.0})
    ttft, gaps = np.array([t[0] - i for i, t in times.items()]), np.concatenate([np.diff(t) for t in times.values()])
    assert math.isclose(found["ttft"]["p99"], np.percentile(ttft, 99))
    assert math.isclose(found["tpot"]["p50"], np.percentile([(t[4] - t[0]) / 4 for t in times.values()], 50))
    assert found["attained"] == (ttft <= 1.0).mean()
    for p in (50, 90, 99):
        exact = np.percentile(gaps, p, method="inverted_cdf")
        assert math.isclose(found["itl"][f"p{p}"], exact, rel_tol=1.01 * GAP_ERROR)
    assert math.isclose(found["itl"]["mean"], gaps.mean()) and math.isclose(found["itl"]["max"], gaps.max())


def test_gaps_of_nothing_count():
    gaps = Gaps()
    gaps.add(0.0, 60)
    gaps.add(2.0, 40)
    assert gaps.summary()["p50"] == 0.0 and gaps.summary()["mean"] == 0.8


def test_a_rate_that_nothing_holds_shows_as_a_queue_that_grew_throughout():
    def grew(rate: float) -> bool:
        return run(arrivals(80, rate=rate, longest=50), **{"scheduler.max_num_seqs": 2}).queue_grew

    assert grew(200.0) and not grew(5.0)
    assert not run([TraceRequest(0.0, 10, 2)] * 50, **{"scheduler.max_num_seqs": 2}).queue_grew  # a burst has no rate


def test_requests_that_can_never_run_are_counted_and_answers_that_do_not_fit_are_cut():
    figures = run([TraceRequest(0.0, 1500, 2), TraceRequest(0.0, 1090, 50), TraceRequest(0.0, 10, 2)])
    found = figures.summary()
    assert (found["num_refused"], found["num_cut"], found["num_finished"]) == (1, 1, 2)
    assert "max_model_len is 1100" in figures.why_refused


def test_nothing_is_kept_of_a_request_that_has_ended():
    cluster = build_cluster(config(), 2)
    figures = cluster.run(arrivals())
    assert not figures._live and not cluster._events._heap
    assert not any(ledger.live for ledger in cluster._router._ledgers)
    assert all(not replica.core.executor.worker._prompts for replica in cluster.replicas)
    assert all(not replica.core.scheduler.base.requests for replica in cluster.replicas)


# -------------------------------------------------------------------------------------------------------- refused


def test_requests_are_taken_one_by_one_and_must_come_in_their_order():
    taken = []

    def trace():
        for arrival in (0.0, 2.0, 1.0):
            taken.append(arrival)
            yield TraceRequest(arrival, 10, 2)

    with pytest.raises(TraceError, match="request 2 of the trace arrives at 1 s, before"):
        run(trace())
    assert taken == [0.0, 2.0, 1.0]


def test_what_has_no_virtual_clock_is_refused():
    with pytest.raises(ConfigError, match="has no virtual clock"):
        build_cluster(EngineConfig.build())
    with pytest.raises(ConfigError, match="records one replica"):
        build_cluster(config(**{"debug.trace": "x.jsonl"}), 2)
    with pytest.raises(ConfigError, match="has --replicas"):
        build_cluster(config(**{"engine.replicas": 2, "engine.core": "process"}))


# ------------------------------------------------------------------------------------------------------- giving up


def test_a_run_that_gives_up_does_so_at_the_last_arrival_if_the_queue_has_grown_until_then():
    """Else it is the run that it would have been."""
    crowd, few = arrivals(200, rate=4000.0), arrivals(30, rate=1.0)
    whole, cut = (build_cluster(config()).run(crowd, gives_up=gives_up) for gives_up in (False, True))
    assert whole.queue_grew and cut.queue_grew and cut.gave_up and not whole.gave_up
    assert cut.num_live and not whole.num_live and cut.num_steps < whole.num_steps
    assert said(build_cluster(config()).run(few, gives_up=True)) == said(build_cluster(config()).run(few))
