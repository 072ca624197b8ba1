"""Every pair of a bound on encoding and an option of the control plane, on a tiny random Whisper: what is written of a
recording is what transformers writes, however many recordings a step encodes. More pairs: test_fake_model.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conformance.cover import all_pairs, axes, label
from models.speech import CONFIG, START, greedy_oracle, recording, save_whisper

from minivllm import LLM, SamplingParams
from minivllm.features import Feature

EACH = CONFIG.max_source_positions
OPTIONS = {"model.dtype": "float32", "kv.num_blocks": 20, "kv.block_size": 8, "executor.num_threads": 1}
OPTIONS |= {"engine.core": "inproc", "debug.check": True, "scheduler.max_num_seqs": 4}
SOME = {"spec_decode": ("none", "ngram"), "preemption": ("recompute", "swap")}
NAMES = "scheduler", "chunked_prefill", "preemption", "overlap", "preempt_every", "spec_decode"
BUDGETS = Feature("encoder_budget", "scheduler.encoder_budget", (None, 2 * EACH, 1000 * EACH), None, "one, two, all")
AXES = [*(replace(axis, options=SOME.get(axis.name, axis.options)) for axis in axes(*NAMES)), BUDGETS]
NUM_TOKENS = 9
ASKED = [(0, [START]), (1, [START, *range(20, 40)]), (2, [START, 7]), (0, [START, 9]), (3, [START]), (4, [START, 5, 6])]


@pytest.fixture(scope="module")
def whisper(tmp_path_factory) -> tuple[Path, list[list[int]]]:
    """(folder, what transformers writes of each)."""
    folder = tmp_path_factory.mktemp("whisper")
    oracle: Any = save_whisper(folder)
    return folder, [greedy_oracle(oracle, recording(seed), prompt, NUM_TOKENS) for seed, prompt in ASKED]


@pytest.mark.parametrize("config", all_pairs(AXES), ids=label)
def test_a_bound_on_encoding_changes_no_token(config, whisper):
    folder, expected = whisper
    prompts = [{"prompt_token_ids": ids, "multi_modal_data": {"audio": recording(seed)}} for seed, ids in ASKED]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(folder), overrides=OPTIONS | config) as llm:
        plans, submit = [], llm._core.executor.submit
        llm._core.executor.submit = lambda plan: plans.append(plan) or submit(plan)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    most = max(1, (config["scheduler.encoder_budget"] or EACH) // EACH)
    assert 1 <= max(len(plan.encode) for plan in plans) <= most
