"""What is timed before the first request: a prefill, a block's move, steps of several sizes, and the two forms of a
linear layer. Each gives what was found and a sentence that says it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from minivllm.batch import BatchKey, InputBatch
from minivllm.loading import LoadedModel
from minivllm.quantization.crossover import TOKENS, run_layer, settle
from minivllm.runner.dummies import DummyBatches
from minivllm.runner.runner import ModelRunner
from minivllm.spec_decode.throttle import Throttle

STEP_SIZES = (1, 2, 3, 5, 9, 17, 33, 65)  # tokens in a step that are timed if drafts are to be weighed
MEASURED_TOKENS = 128  # of the prefill that is timed


class RunsModel(Protocol):
    def run_model(self, batch: InputBatch) -> torch.Tensor: ...


def measure_prefill(
    runner: RunsModel,
    dummy: InputBatch,
    num_tries: int = 2,
    logits: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden,
) -> float:
    """Seconds a token of a prefill, the fastest of some tries; logits: what else to time, on all hidden states."""
    seconds = []
    for _ in range(num_tries):
        start = time.perf_counter()
        hidden = runner.run_model(dummy)
        logits(hidden)[-1].sum().item()  # item() waits for the device
        seconds.append(time.perf_counter() - start)
    return min(seconds) / dummy.num_tokens


@torch.inference_mode()
def preemption_costs(runner: ModelRunner, dummies: DummyBatches) -> tuple[dict[str, float], str]:
    """seconds_per_token to recompute, seconds_per_block to move one way."""
    costs = {
        "seconds_per_token": measure_prefill(runner, dummies.make(MEASURED_TOKENS)),
        "seconds_per_block": runner.block_moves.measure(),
    }
    shown = f"a token recomputed in {1e3 * costs['seconds_per_token']:.3f} ms"
    return costs, f"measured: {shown}, a block moved in {1e3 * costs['seconds_per_block']:.3f} ms"


@torch.inference_mode()
def calibrate_throttle(throttle: Throttle, runner: ModelRunner, dummies: DummyBatches, most: int, k: int) -> str:
    """Time forwards of several sizes, `most` tokens at most, so that up to k drafts are only computed where they save
    time."""
    logits, key_for = runner.model.logits, runner.forward.key_for
    steps = {n: dummies.make(*key_for(1, n, n)) for n in STEP_SIZES if n <= most}
    tries = [  # in turns, so that a busy moment of the machine does not meet one size alone
        {n: dummy.num_tokens * measure_prefill(runner, dummy, 1, logits) for n, dummy in steps.items()}
        for _ in range(4)
    ]
    seconds = {n: min(found[n] for found in tries) for n in tries[0]}
    own, per_pass = runner.head.proposer, 0.0
    if hasattr(own, "run_model"):  # it computes its guesses
        per_pass = measure_prefill(own, dummies.make(1), 4, own.logits)
    throttle.calibrate(seconds, per_pass)
    grown = float(throttle.seconds(np.array(1 + k)) / throttle.seconds(np.array(1)))
    return f"at most; measured: a step of {1 + k} tokens takes {grown:.2f} times as long"


@torch.inference_mode()
def settle_linear(
    loaded: LoadedModel, dtype: torch.dtype, run_dummy: Callable[[BatchKey], None], runner: ModelRunner
) -> tuple[str, str]:
    """How linear layers keep their weights; where they do in two forms, from how many tokens on each is used."""
    (how, reason), quantised = loaded.linear, loaded.quantised
    if quantised is None or not quantised.is_dual:
        return how, reason
    key_for, lm_head = runner.forward.key_for, loaded.model.lm_head
    stack = settle(quantised.stack, lambda n: run_dummy(key_for(1, n, n)))
    reason = f"{reason}; a copy in bf16 ({quantised.copy_bytes / 2**20:.0f} MiB) {stack}"
    if quantised.head_is_dual:
        hidden = torch.randn(max(TOKENS), loaded.spec.hidden_size, dtype=dtype)
        reason += f", the LM head's {settle(quantised.head, run_layer(lm_head, hidden))}"
    return how, reason
