"""Rules: the ranks of a placement hold each part of a model once, or say in a sentence why they cannot."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from minivllm.errors import ConfigError
from minivllm.loading.dummy import dummy_spec
from minivllm.parallel.placement import Placement

SPEC = dummy_spec("tiny-moe")  # 4 heads, 2 KV heads, 4 layers, 128 inner; 8 experts of 48


def every(placement: Placement) -> list[Placement]:
    return [replace(placement, rank=rank) for rank in range(placement.size)]


@pytest.mark.parametrize("placement", [Placement(tp=4, pp=2), Placement(tp=2, pp=2, dp=3, cp=2), Placement()], ids=str)
def test_ranks_are_numbered_with_tensor_parallelism_innermost(placement):
    seen = [(p.dp_rank, p.pp_rank, p.cp_rank, p.tp_rank) for p in every(placement)]
    assert seen == sorted(seen) and len(set(seen)) == placement.size


@pytest.mark.parametrize("axis", ["tp", "pp", "dp", "cp"])
def test_peers_differ_along_one_axis_alone(axis):
    others = {"tp", "pp", "dp", "cp"} - {axis}
    for own in every(Placement(tp=2, pp=3, dp=2, cp=2)):
        peers = [replace(own, rank=rank) for rank in own.peers(axis)]
        assert own in peers and [getattr(p, f"{axis}_rank") for p in peers] == list(range(getattr(own, axis)))
        assert all(getattr(p, f"{other}_rank") == getattr(own, f"{other}_rank") for p in peers for other in others)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_heads_and_vocabulary_are_held_once_and_kv_heads_follow_their_query_heads(size):
    ranks = every(Placement(tp=size))
    assert [h for p in ranks for h in range(*p.part(8)[:2])] == list(range(8))
    assert [t for p in ranks for t in range(*p.vocabulary(321)[:2])] == list(range(321))
    for num_kv in (1, 2, 4, 8):
        for own in ranks:
            query, kv = own.part(8), own.kv_heads(num_kv)
            assert {h * num_kv // 8 for h in range(query.start, query.stop)} == set(range(kv.start, kv.stop))


@pytest.mark.parametrize("placement, num_layers", [(Placement(pp=2), 4), (Placement(pp=3, stages=(1, 4, 2)), 7)])
def test_stages_hold_every_layer_once_and_in_order(placement, num_layers):
    spans = [p.layers(num_layers) for p in every(placement)]
    assert [i for span in spans for i in range(span.start, span.stop)] == list(range(num_layers))


@pytest.mark.parametrize(
    "placement",
    [Placement(tp=4), Placement(tp=2, ep=2), Placement(tp=4, ep=2), Placement(tp=4, dp=2, ep=4), Placement(dp=2, ep=2)],
    ids=str,
)
def test_the_devices_of_one_stage_hold_each_number_of_each_expert_once(placement):
    held = [(e, i) for p in every(placement) for e in range(*p.experts(8)[:2]) for i in range(*p.expert_part(48)[:2])]
    assert sorted(held) == [(e, i) for e in range(8) for i in range(48)]


def test_without_expert_parallelism_every_replica_has_all_experts():
    for own in every(Placement(dp=2, tp=2)):
        assert own.experts(8)[:2] == (0, 8) and own.expert_part(48).size == 24


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 3}, "tp=3 does not divide the model's 4 attention heads"),
        ({"tp": 8}, "tp=8 does not divide the model's 4 attention heads"),
        ({"pp": 3}, "pp=3 does not divide the model's 4 layers: say how many each stage has"),
        ({"pp": 2, "stages": (2, 1)}, r"stages=\(2, 1\) have 3 layers, the model has 4"),
        ({"cp": 2}, "cp=2: no attention backend spreads a request's keys over devices yet"),
        ({"dp": 3, "ep": 3}, "ep=3 does not divide the model's 8 experts"),
    ],
)
def test_a_model_that_cannot_be_spread_is_refused_in_a_sentence(sizes, message):
    with pytest.raises(ConfigError, match=message):
        Placement(**sizes).check(SPEC)


@pytest.mark.parametrize(
    ("change", "sizes", "message"),
    [
        (
            {"num_heads": 12, "num_kv_heads": 3},
            {"tp": 2},
            "neither divides nor is a multiple of the model's 3 KV heads",
        ),
        ({"intermediate_size": 129}, {"tp": 2}, "does not divide the MLP's 129 intermediate numbers"),
        ({"vocab_size": 5}, {"tp": 4}, "tp=4 leaves a device none of the vocabulary's 5 tokens"),
        ({"experts": None}, {"tp": 2, "ep": 2}, "ep=2: the model has no experts"),
        ({"num_heads": 32, "num_kv_heads": 32}, {"tp": 32}, "48 intermediate numbers cannot be cut into 32"),
    ],
)
def test_other_models_that_cannot_be_spread(change, sizes, message):
    with pytest.raises(ConfigError, match=message):
        Placement(**sizes).check(replace(SPEC, **change))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"rank": 2, "tp": 2}, "rank 2 is not one of 2"),
        ({"tp": 0}, "tp=0: a model is spread over at least one device"),
        ({"tp": 2, "ep": 3}, "ep=3 must be dp=1 times a divisor of tp=2"),
        ({"dp": 2, "ep": 3}, "ep=3 must be dp=2 times a divisor of tp=1"),
        ({"pp": 2, "stages": (4,)}, "a positive number of layers for each of pp=2"),
    ],
)
def test_a_placement_that_is_none_is_refused_in_a_sentence(sizes, message):
    with pytest.raises(ConfigError, match=message):
        Placement(**sizes)


def test_a_placement_and_a_group_load_no_torch():
    code = "import sys, minivllm.parallel.placement, minivllm.parallel.group; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
