"""What forwards take beside weights and KV: found by running them, before the KV pool gets what is left.

The same forward runner is built, warmed up and run on a step as large as any, over a KV cache of one block, and thrown
away. So captures are counted by making them: their pool holds the memory of the largest one and the results of all.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor, nn

from minivllm.batch import BatchKey, InputSizes
from minivllm.compile.context import run_forward
from minivllm.runner.dummies import DummyBatches
from minivllm.runner.forward_graphs import Graphed


@torch.inference_mode()
def profile_run(
    model: nn.Module,
    graphed: Graphed,
    caches: list[Tensor],
    sizes: InputSizes,
    num_tokens: int,
) -> None:
    """caches: of one block, the spare one, for each layer. num_tokens: the most that a step has."""
    forward, attention = graphed.forward, graphed.attention
    dummies = DummyBatches(sizes.spare_block, sizes.block_size, sizes.max_model_len, sizes.num_groups)

    def run(key: BatchKey) -> None:
        run_forward(forward, dummies.make(*key), attention, caches, model.attention_layers)

    forward.warmup(run)
    run(forward.key_for(1, num_tokens, num_tokens))


def peak_of(run: Callable[[], None], device: torch.device) -> int:
    """Bytes that run() took from a GPU at its worst, and gave back. 0 on a CPU, where run() is not called: its pool is
    bounded, and nothing says what a forward took."""
    if device.type != "cuda":
        return 0
    _give_back()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device) - before
    _give_back()
    return peak


def _give_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()
