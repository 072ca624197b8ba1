"""Steps by measured layer times: between the points, beyond them, and put together."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
from layer_tables import write_tables

from minivllm.errors import ModelError
from minivllm.loading.dummy import hf_config
from minivllm.simulate.cost import Numbers, Step
from minivllm.simulate.devices import DEVICES
from minivllm.simulate.shape import read_shape
from minivllm.simulate.tables import Grid, Line, Links, TableCost, choose_tables, read_tables

TINY = read_shape(hf_config("tiny"))  # 4 layers
MICRO = 1e-6


def cost_of(folder, links=None, pads=(), shape=TINY) -> TableCost:
    return TableCost(read_tables(folder), links, pads, DEVICES["h100"], shape, Numbers("bfloat16", 2, 2))


def step(num_new, start, num_samples=0) -> Step:
    return Step(np.array(num_new), np.array(start), num_samples)


def attention_only(chunk, before, count, context):
    return 10 + 0.5 * chunk + 0.01 * chunk * before + 2 * count * context


def test_a_time_is_linear_between_points_and_goes_on_beyond_them(caplog):
    line = Line("a table", {1: 10.0, 4: 40.0, 8: 60.0})
    assert [line(x) for x in (0, 1, 2, 4, 6, 8)] == pytest.approx([10, 10, 20, 40, 50, 60])
    with caplog.at_level(logging.WARNING, "minivllm"):
        assert [line(x) for x in (10, 12)] == pytest.approx([70, 80])
    assert [record.getMessage() for record in caplog.records] == [
        "a table: 10 lies outside of the table, which ends at 8: extended"
    ]


def test_a_grid_gives_back_what_is_linear_in_each_axis_whichever_points_are_missing():
    points = [((x, y), 3.0 + x * y) for x in (0, 1, 4) for y in (0, 2, 8) if (x, y) != (4, 8)]
    grid = Grid("a table", ("x", "y"), points)
    for x, y in ((0.5, 1), (2, 5), (4, 8), (3, 16)):
        assert grid(x, y) == pytest.approx(3 + x * y)


def test_each_layer_counts_as_often_as_a_decoder_has_it(tmp_path):
    dense = {"embedding": 1000, "final_layernorm": 300, "layernorm": 10, "qkv_proj": 5, "o_proj": 1, "down_proj": 2}
    folder = write_tables(tmp_path / "tp1", dense, {"lm_head": 70, "sampler": 7}, lambda *at: 100)
    seconds = cost_of(folder).step_seconds(step([1, 1], [5, 6], num_samples=2))
    assert seconds == pytest.approx((1300 + 4 * (2 * 10 + 5 + 1 + 2 + 100) + 77) * MICRO)


def test_decodes_take_by_the_sum_of_their_contexts(tmp_path):
    cost = cost_of(write_tables(tmp_path / "tp1", attention=attention_only))
    even, uneven = step([1] * 3, [100, 100, 100]), step([1] * 3, [10, 20, 270])
    assert cost.step_seconds(even) == pytest.approx(cost.step_seconds(uneven))
    assert cost._attention(even.num_new, even.start) == pytest.approx((10 + 2 * 300) * MICRO)


def test_prompts_of_a_step_share_one_launch_and_decodes_are_charged_by_the_longest(tmp_path):
    cost = cost_of(write_tables(tmp_path / "tp1", attention=attention_only))
    chunks = step([100, 60, 1, 1], [0, 200, 50, 70])
    prompts = 10 + 0.5 * 160 + 0.01 * 60 * 200 - 0.5 * 16  # 16: the least chunk stands for a launch
    assert cost._attention(chunks.num_new, chunks.start) == pytest.approx((prompts + 2 * 120) * MICRO)


def test_a_step_is_padded_to_the_next_captured_size_and_no_further_than_the_largest(tmp_path):
    dense = {"qkv_proj": lambda tokens: tokens, "o_proj": 0, "down_proj": 0}
    folder = write_tables(tmp_path / "tp1", dense, attention=lambda *at: 0)
    cost = cost_of(folder, pads=(1, 2, 8))
    seconds = [cost.step_seconds(step([1] * count, [0] * count)) for count in (1, 3, 8, 9)]
    assert seconds == pytest.approx([4 * padded * MICRO for padded in (1, 8, 8, 9)])


def test_devices_that_share_a_model_sum_twice_a_layer_and_gather_the_logits(tmp_path):
    cost = cost_of(write_tables(tmp_path / "tp2", attention=lambda *at: 0), Links(1e9, 1e-3))
    alone = cost_of(write_tables(tmp_path / "tp1", attention=lambda *at: 0))
    one_sum = 2 * (1e-3 + 10 * TINY.hidden_size * 2 / 2 / 1e9)
    logits = 1e-3 + 3 * TINY.vocab_size * 2 / 2 / 1e9
    what = step([10], [0], 3)
    assert cost.step_seconds(what) - alone.step_seconds(what) == pytest.approx((2 * 4 + 1) * one_sum + logits)
    assert math.isclose(cost.weight_bytes, alone.weight_bytes / 2) and (
        cost.kv_bytes_per_token == alone.kv_bytes_per_token / 2
    )


def test_a_mixture_is_looked_up_by_the_experts_that_its_tokens_draw(tmp_path):
    shape = read_shape(hf_config("tiny-moe"))
    folder = write_tables(tmp_path / "tp1", attention=lambda *at: 0, experts=lambda tokens, drawn: 100 * drawn)
    few, many = (cost_of(folder, shape=shape).step_seconds(step([1] * n, [0] * n)) for n in (1, 64))
    assert many - few == pytest.approx(3 * 100 * (8 - 2) * MICRO, rel=1e-3)
    (folder / "moe.csv").unlink()
    with pytest.raises(ModelError, match="no moe.csv"):
        cost_of(folder, shape=shape)


def test_a_model_with_parts_that_no_table_has_is_refused(tmp_path):
    with pytest.raises(ModelError, match="its dense.csv none of gate_up_proj"):
        cost_of(write_tables(tmp_path / "tp1", {"qkv_proj": 1, "o_proj": 1}))


# ---------------------------------------------------------------------------------------------------------- refused


def test_tables_are_chosen_by_the_size_that_their_name_ends_in(tmp_path):
    folders = [tmp_path / "a_tp1", tmp_path / "a_tp4"]
    assert choose_tables(folders, 4) == folders[1]
    with pytest.raises(ModelError, match="tensor_parallel_size=2: those given are of tp1, tp4"):
        choose_tables(folders, 2)
    with pytest.raises(ModelError, match="must end in tp1"):
        choose_tables([tmp_path], 1)


@pytest.mark.parametrize(
    "name, change, says",
    [
        ("dense.csv", lambda text: text.replace("time_us", "ms", 1), r"dense.csv:1: no column time_us"),
        ("dense.csv", lambda text: text.replace("qkv_proj,", "q,"), r"dense.csv: no layer qkv_proj"),
        ("attention.csv", lambda text: text.replace("\n", "\nx,0,0,0,1\n", 1), r"attention.csv:2: 'x' is no time"),
        ("attention.csv", lambda text: text + "1,2\n", r"attention.csv:\d+: 2 columns"),
        ("per_sequence.csv", lambda text: text.splitlines()[0], r"per_sequence.csv: the table is empty"),
    ],
)
def test_a_broken_table_is_a_sentence_with_its_line(tmp_path, name, change, says):
    folder = write_tables(tmp_path / "tp1")
    (folder / name).write_text(change((folder / name).read_text()))
    with pytest.raises(ModelError, match=says):
        read_tables(folder)
    (folder / name).unlink()
    with pytest.raises(ModelError, match=f"{name}: No such file"):
        read_tables(folder)
