"""Rule: a step finds its adapters in slots; the one that was used longest ago goes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lora.adapters import write_adapter

from minivllm.loading.dummy import dummy_spec
from minivllm.loading.dummy_weights import fill
from minivllm.lora.slots import AdapterSlots, NoAdapters
from minivllm.models import MODELS
from minivllm.plan import Join
from minivllm.request import SamplingParams


def using(adapter):
    return Join("", [1], 1, SamplingParams(), adapter)


@pytest.fixture
def slots(tmp_path):
    spec = dummy_spec("tiny")
    model = MODELS.get(spec.architecture)(spec, torch.float32, torch.device("cpu"))
    fill(model, 0)
    model.finish()
    slots = AdapterSlots(model, num_slots=2, max_rank=16, max_rows=8, dtype=torch.float32)
    for i, name in enumerate("abc"):
        targets = ("q_proj",) if name == "a" else ("v_proj", "down_proj")
        assert slots.load(name, str(write_adapter(tmp_path / name, i, rank=4 * (i + 1), targets=targets))) == 4 * (
            i + 1
        )
        slots.join(i, using(name))
    slots.join(3, using(""))
    slots.model = model
    return slots


def prepare(slots, rows, lengths):
    slots.prepare(np.array(rows), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    tasks = slots._step.tasks  # few tokens: all of them are the kernel's
    return {} if tasks is None else {slot: tasks._tokens[a:b].tolist() for slot, a, b in tasks._tasks.tolist()}


def test_slots_are_least_recently_used(slots):
    assert slots.resident == []
    for rows, resident in (([0], "a"), ([1], "ab"), ([0], "ba"), ([2], "ac"), ([3], "ac"), ([1, 2], "cb")):
        prepare(slots, rows, [1] * len(rows))
        assert slots.resident == list(resident), rows
    with pytest.raises(AssertionError, match="more adapters than there are slots"):
        prepare(slots, [0, 1, 2], [1, 1, 1])


def test_tokens_are_grouped_by_adapter_whatever_their_number(slots):
    """Several tokens a request: a chunk of a prompt, or drafts."""
    groups = prepare(slots, [1, 3, 0, 1], [2, 3, 1, 2])
    slot_of = {name: slots._slot_of[slots._loaded[name].number] for name in "ab"}
    assert groups == {slot_of["b"]: [0, 1, 6, 7], slot_of["a"]: [5]}
    assert prepare(slots, [3, 3], [4, 1]) == {}, "and nobody's groups of the step before"
    slots.join(1, using(""))
    assert list(prepare(slots, [1, 0], [2, 2]).values()) == [[2, 3]]


def test_a_slot_changes_the_layers_of_its_adapter_and_no_others(slots):
    prepare(slots, [0, 1], [1, 1])
    a, b = (slots._slot_of[slots._loaded[name].number] for name in "ab")
    attention, mlp = slots.model.layers[0].attention, slots.model.layers[0].mlp
    qkv, o, down = (module.method.products.deltas for module in (attention.qkv, attention.o, mlp.down))
    assert qkv[a].a.shape == (4, 64) and down[a] is None
    assert down[b].a.shape == (8, 128) and o[b] is None
    slots.drop("a")
    assert qkv[a] is None and slots.resident == ["b"]
    prepare(slots, [1, 2], [1, 1])
    assert sorted(slots.resident) == ["b", "c"], "the slot was free again"


def test_an_engine_without_lora_has_no_part_of_it():
    spec = dummy_spec("tiny")
    model = MODELS.get(spec.architecture)(spec, torch.float32, torch.device("cpu"))
    assert not any("lora" in type(getattr(m, "method", None)).__module__ for m in model.modules())
    NoAdapters().join(0, using(""))
    with pytest.raises(Exception, match="LoRA is off"):
        NoAdapters().join(0, using("a#1"))
