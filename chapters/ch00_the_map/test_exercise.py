"""The tests of chapter 0's exercise: traces written by hand, and one that a small engine wrote."""

from __future__ import annotations

import tempfile
from pathlib import Path

from exercise import stories

from minivllm import LLM, SamplingParams
from minivllm.trace import read

BY_HAND = [
    {"step": 3, "sched": [["ada", 4, 0]], "tokens": {}},  # a prompt of six, in two pieces
    {"step": 4, "sched": [["ada", 2, 4], ["ben", 3, 0]], "tokens": {"ada": [11], "ben": [21]}},
    {"step": 5, "sched": [["ada", 1, 6], ["ben", 1, 3]], "tokens": {"ada": [12], "ben": [22]},
     "finished": {"ben": ["stop", 22]}},
    {"step": 6, "sched": [], "tokens": {}},
    {"step": 7, "sched": [["ada", 1, 7]], "tokens": {"ada": [13, 14]}},  # guessed ahead: two in one step
]  # fmt: skip


def test_who_ran_and_when_each_began():
    found = stories(BY_HAND)
    assert list(found) == ["ada", "ben"]
    assert [found[name].first_step for name in found] == [3, 4]


def test_tokens_are_counted_and_not_steps():
    found = stories(BY_HAND)
    assert found["ada"].num_computed == 4 + 2 + 1 + 1
    assert found["ben"].num_computed == 3 + 1


def test_outputs_are_whole_and_in_order():
    found = stories(BY_HAND)
    assert found["ada"].output == [11, 12, 13, 14]
    assert found["ben"].output == [21, 22]


def test_who_ended_and_why():
    found = stories(BY_HAND)
    assert found["ben"].finish_reason == "stop"
    assert found["ada"].finish_reason is None


def test_a_trace_of_the_engine():
    prompts = [[5] * 30, [6, 7, 8], [9] * 17]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        sizes = {"kv.num_blocks": 16, "scheduler.max_num_batched_tokens": 20, "kv.prefix": "none"}
        with LLM("dummy:tiny", overrides={**sizes, "debug.trace": str(path)}) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        found = list(stories(read(path).steps()).values())
    for prompt, output, story in zip(prompts, outputs, found, strict=True):
        assert story.output == output.outputs[0].token_ids
        assert story.finish_reason == "length"
        # The last token is never fed back: nothing comes after it.
        assert story.num_computed == len(prompt) + 5 - 1
