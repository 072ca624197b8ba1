"""Prompts on some replicas, answers on others: real cores, and K and V on a wire between them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from minivllm.cli.simulate import main
from minivllm.config import EngineConfig
from minivllm.engine.build.cluster import build_cluster
from minivllm.engine.build.disaggregated import Counts, build_disaggregated
from minivllm.errors import ConfigError
from minivllm.simulate.host import NO_HOST, HostCost
from minivllm.simulate.wire import WIRES, Wire, parse_wire
from minivllm.simulate.workload import TraceRequest
from tests.simulate.test_cluster import arrivals, config, said

WIRE = Wire(1e9, 1e-3)
NO_CACHE = {"kv.prefix": "none"}


def build(prefill=1, decode=1, wire=WIRE, host=NO_HOST, link_seconds=0.0, prompts=None, **overrides):
    own = config(**{**NO_CACHE, **overrides})
    return build_disaggregated(own.override(prompts or {}), own, Counts(prefill, decode), host, link_seconds, wire)


def run(requests, **options):
    return build(**options).run(requests)


def bytes_per_token(cluster) -> float:
    return cluster.replicas[0].core.executor.worker.cost.kv_bytes_per_token


# ----------------------------------------------------------------------------------------------------------- times


def test_a_lone_request_takes_as_long_as_on_one_replica_and_its_way_there():
    lone = [TraceRequest(0.0, 300, 6)]
    alone = build_cluster(config(**NO_CACHE))
    together, apart = alone.run(lone).summary(), run(lone).summary()
    assert apart["ttft"] == together["ttft"]
    way = WIRE.seconds(300 * bytes_per_token(alone))
    assert math.isclose(apart["latency"]["mean"], together["latency"]["mean"] + way)
    sent = apart["kv_transfers"]
    assert sent["num"] == 1 and math.isclose(sent["seconds"]["mean"], way) and sent["waited"]["mean"] == 0


def test_a_run_may_give_up_though_requests_are_between_replicas():
    crowd = arrivals(200, rate=4000.0)
    figures = build(wire=Wire(1e6, 1e-3)).run(crowd, gives_up=True)
    assert figures.gave_up and figures.queue_grew and figures.num_live


def test_an_answer_of_one_token_is_sent_nowhere():
    cluster = build()
    found = cluster.run([TraceRequest(0.0, 300, 1)] * 3).summary()
    assert found["num_finished"] == 3 and not found["kv_transfers"]["num"]
    assert cluster.replicas[1].core.stats.num_steps == 0


def test_what_leaves_one_replica_leaves_one_after_the_other():
    cluster = build(decode=2)
    found = cluster.run([TraceRequest(0.0, 100, 4), TraceRequest(0.0, 100, 4)]).summary()["kv_transfers"]
    way = WIRE.seconds(100 * bytes_per_token(cluster))
    assert math.isclose(found["waited"]["mean"], way / 2)  # none and one way: they were computed in one step


def test_a_long_prompt_does_not_hold_up_who_answers():
    chat = TraceRequest(0.0, 20, 40)
    requests = [chat, *(TraceRequest(0.05 + i / 40, 1000, 2) for i in range(6))]
    pool = {**NO_CACHE, "kv.num_blocks": 600, "model.max_model_len": 1100, "scheduler.max_num_batched_tokens": 1100}

    def of_chat(cluster, asked) -> float:
        rows = cluster.run(asked).rows
        at = rows.num_output.index(40)
        return rows.last[at] - rows.first[at]

    alone = of_chat(build(wire=WIRE, **pool), [chat])
    assert of_chat(build(wire=WIRE, **pool), requests) < 1.02 * alone  # it shares steps with six others' second tokens
    assert of_chat(build_cluster(config(**pool), 2), requests) > 1.15 * alone


def test_each_side_has_options_of_its_own():
    lone = [TraceRequest(0.0, 1000, 20)]
    slow, quick = run(lone).summary(), run(lone, prompts={"executor.device": "4xh100"}).summary()
    assert quick["ttft"]["mean"] < 0.7 * slow["ttft"]["mean"]
    way = slow["kv_transfers"]["seconds"]["mean"]  # one device takes all, however many send it
    rest = [each["latency"]["mean"] - each["ttft"]["mean"] - way for each in (slow, quick)]
    assert math.isclose(*rest)


# ----------------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize("overrides", [{}, {"preset": "v0"}, {"engine.overlap": 2}, {"preset": "distserve"}], ids=str)
def test_two_runs_are_equal_to_the_last_byte_and_nothing_is_left(overrides):
    options = {"prefill": 2, "decode": 2, "host": HostCost(1e-3, 1e-5), "link_seconds": 1e-4, **overrides}
    clusters = [build(**options) for _ in range(2)]
    first, second = (said(cluster.run(iter(arrivals()))) for cluster in clusters)
    assert first == second and json.loads(first.partition("\n}")[0] + "}")["num_finished"] == 60
    cluster: Any = clusters[0]
    for replica in cluster.replicas:
        base = replica.core.scheduler.base
        assert base.kv.usage.num_free == base.kv.usage.num_total and not base.kv.tables and not base.kv.num_lent
        assert not base.requests
    assert not cluster._requests and not any(cluster._queues.values())
    routers = cluster._router, cluster._hall.router
    assert not any(ledger.live for router in routers for ledger in router._ledgers)


@pytest.mark.parametrize("overrides", [{"kv.preemption": "swap"}, {}, {"kv.prefix": "hash"}, {"preset": "v0"}], ids=str)
def test_pools_that_are_too_small_for_all_serve_all_in_the_end(overrides):
    small = {"kv.num_blocks": 44, "model.max_model_len": 340, **overrides}
    figures = run(arrivals(rate=2000), decode=1, wire=Wire(2e8, 1e-3), **small)
    found = figures.summary()
    assert found["num_finished"] == 60 and not found["num_cut"] and found["kv_usage"]["max"] > 0.9
    asked = sorted((request.num_prompt, request.num_output) for request in arrivals(rate=2000))
    assert sorted(zip(figures.rows.num_prompt, figures.rows.num_output, strict=True)) == asked


def test_a_prefix_that_the_decode_replica_has_is_not_sent_again():
    requests = [TraceRequest(i / 2, 200, 2, pieces=(7,), piece_tokens=192) for i in range(10)]
    sent = {prefix: run(requests, **{"kv.prefix": prefix}).summary() for prefix in ("none", "hash")}
    amounts = {prefix: found["kv_transfers"]["bytes_a_device"] for prefix, found in sent.items()}
    assert amounts["hash"] < 0.2 * amounts["none"]
    assert sent["hash"]["prefix_hit_rate"] > 0.8 and sent["none"]["prefix_hit_rate"] == 0  # what was sent is no hit


def test_what_can_never_run_is_refused_and_what_fills_the_length_ends_there():
    long = {"model.max_model_len": 100, "kv.num_blocks": 20}
    figures = run([TraceRequest(0.0, 100, 2), TraceRequest(0.0, 99, 5), TraceRequest(0.0, 98, 5)], **long)
    found = figures.summary()
    assert (found["num_refused"], found["num_finished"], found["num_cut"]) == (1, 2, 2)
    tight = build(prompts={"kv.num_blocks": 150}, **{"kv.num_blocks": 10, "model.max_model_len": None})
    assert tight.run([TraceRequest(0.0, 200, 5), TraceRequest(0.0, 20, 5)]).num_refused == 1  # no decode replica could


@pytest.mark.parametrize(
    "options, words",
    [
        ({"prompts": {"kv.dtype": "int8"}}, "kv.dtype must be the same"),
        ({"kv.allocation": "pow2", "preset": "orca-pow2"}, "kv.allocation=paged"),
        ({"prefill": 0}, "--prefill-replicas 0"),
        ({"spec_decode.method": "ngram"}, "guesses are not handed over"),
        ({"model.path": "dummy:tiny-qwen3.5"}, "a recurrent state takes on the wire"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_is_refused_in_a_sentence(options, words):
    with pytest.raises(ConfigError, match=words):
        build(**options)


def test_a_wire_is_a_name_or_two_numbers():
    assert parse_wire("nvlink4") is WIRES["nvlink4"]
    assert parse_wire("25,10").seconds(50e9) == 2.00001
    for wrong in ("infiniband", "0,1", "1", "inf,0", "1,-1"):
        with pytest.raises(ConfigError, match="no wire"):
            parse_wire(wrong)


# --------------------------------------------------------------------------------------------------------- command

SMALL = ["dummy:llama-3.1-8b", "--preset", "distserve", "--set", "kv.num_blocks=400", "--max-model-len", "600"]
SMALL += ["--num-requests", "30", "--rate", "50", "--output-len", "10"]


def test_the_command_says_what_was_sent_and_writes_it(capsys, tmp_path):
    apart = ["--prefill-replicas", "2", "--decode-replicas", "1", "--prefill-set", "executor.device=2xh100"]
    assert main([*SMALL, *apart, "--kv-wire", "nvlink4", "--json", str(tmp_path / "run.json")]) == 0
    shown = capsys.readouterr().out
    assert "2 for prompts behind prefix, 1 for answers" in shown and "KV sent" in shown
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["result"]["kv_transfers"]["num"] == 30 and set(record["result"]["device_busy_by"]) == {
        "prefill",
        "decode",
    }
    assert (record["num_prefill_replicas"], record["prefill"]) == (2, {"executor.device": "2xh100"})
    assert record["kv_wire"]["bytes_per_s"] == 450e9


@pytest.mark.parametrize(
    "given, words",
    [
        (["--prefill-replicas", "2"], "come together"),
        (["--kv-wire", "ib-200"], "are of a cluster with --prefill-replicas"),
        (["--prefill-replicas", "2", "--decode-replicas", "1", "--replicas", "3"], "leave it out"),
    ],
)
def test_options_that_say_nothing_there_are_refused(given, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*SMALL, *given])
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_the_preset_is_what_a_replica_of_either_kind_does():
    preset = EngineConfig.build("distserve")
    assert not preset.scheduler.chunked_prefill and preset.kv.prefix == "none"
