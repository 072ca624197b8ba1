"""K and V in host memory, on the virtual clock: what the device has lost is moved back instead of computed again."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from minivllm.cli.simulate import main
from minivllm.engine.build.cluster import HostKV, build_cluster
from minivllm.engine.build.disaggregated import Counts, build_disaggregated
from minivllm.errors import ConfigError
from minivllm.simulate.cost import Step
from minivllm.simulate.workload import TraceRequest
from tests.simulate.test_cluster import arrivals, config, said

POOL = {"kv.num_blocks": 60, "model.max_model_len": 400}  # 480 tokens
AGAIN = 201  # tokens of a prompt, of which 200 are whole blocks


def visits(names: str, num_output: int = 2) -> list[TraceRequest]:
    """Prompts that are equal where their names are, a second apart."""
    return [TraceRequest(float(i), AGAIN, num_output, (ord(name),), AGAIN) for i, name in enumerate(names)]


def build(host_kv: HostKV | None, replicas: int = 1, **overrides):
    return build_cluster(config(**{**POOL, **overrides}), replicas, host_kv=host_kv)


def kv_of(cluster) -> Any:
    return cluster.replicas[0].core.scheduler.base.kv


def test_a_prompt_that_the_pool_forgot_takes_its_way_from_the_host_and_no_computing():
    cluster = build(HostKV(4000))
    figures = cluster.run(visits("abcda"))
    cost = cluster.replicas[0].core.executor.worker.cost
    step = Step(np.array([1]), np.array([AGAIN - 1]), 1)
    expected = cost.move_seconds(AGAIN - 1, across=True) + cost.step_seconds(step)
    assert math.isclose(figures.rows.first[-1] - figures.rows.arrival[-1], expected, rel_tol=1e-9)
    assert kv_of(cluster).num_fetched == 25
    assert build(None).run(visits("abcda")).summary()["prefix_hit_rate"] == 0


def test_what_a_step_copies_out_is_waited_for_by_the_next():
    with_host, without = (build(kv) for kv in (HostKV(4000), None))
    one, other = (cluster.run(visits("a", 3)) for cluster in (with_host, without))
    moving = with_host.replicas[0].core.executor.worker.cost.move_seconds(AGAIN - 1, across=True)
    assert math.isclose(one.rows.last[0] - other.rows.last[0], moving, rel_tol=1e-9)
    assert one.rows.first[0] == other.rows.first[0]


@pytest.mark.parametrize("shared", [False, True])
def test_a_shared_store_gives_what_another_replica_computed(shared):
    cluster = build(HostKV(4000, shared), 2, **{"engine.router": "round_robin"})
    hits = cluster.run(visits("ab" + "ba")).summary()["prefix_hit_rate"]
    assert (hits > 0.4) == shared


@pytest.mark.parametrize("shared", [False, True])
def test_prefill_replicas_have_host_memory_and_send_what_comes_from_there(shared):
    own = config(**{**POOL, "engine.router": "round_robin"})

    def run():
        return build_disaggregated(own, own, Counts(2, 1), host_kv=HostKV(4000, shared)).run(visits("aabbcdcdaa", 4))

    first = run()
    assert first.summary()["num_finished"] == 10 and first.summary()["prefix_hit_rate"] > 0.3
    assert said(first) == said(run())


def test_two_runs_are_equal_to_the_last_byte():
    requests = arrivals(rate=400)
    options = {"host_kv": HostKV(1000, True), "replicas": 3, "engine.router": "prefix"}
    first, second = (said(build(**options).run(requests)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("overrides", "host_kv", "what"),
    [
        ({"kv.prefix": "none"}, HostKV(4000), "need kv.prefix=hash"),
        ({"kv.prefix": "radix"}, HostKV(4000), "need kv.prefix=hash"),
        ({"kv.preemption": "swap"}, HostKV(4000), "need kv.preemption=recompute"),
        ({"executor.device": "2x1xh100"}, HostKV(4000), "no K and V in host memory in a pipeline"),
        ({}, HostKV(7), "no block of 8"),
    ],
    ids=["no keys", "radix", "swap", "pipeline", "small"],
)
def test_what_has_no_store_is_refused_in_a_sentence(overrides, host_kv, what):
    with pytest.raises(ConfigError, match=what):
        build(host_kv, **overrides)


def test_the_command_says_what_memory_there_was(tmp_path, capsys):
    file = tmp_path / "run.json"
    argv = ["dummy:llama-3.1-8b", "--num-requests", "5", "--host-kv", "100000", "--host-kv-shared", "--json", str(file)]
    main(argv)
    assert json.loads(file.read_text())["host_kv"] == {"tokens": 100000, "shared": True}
    with pytest.raises(SystemExit):
        main(["dummy:llama-3.1-8b", "--host-kv-shared"])
    assert "--host-kv-shared is of --host-kv" in capsys.readouterr().err
