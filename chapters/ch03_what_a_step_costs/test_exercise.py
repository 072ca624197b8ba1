"""The tests of chapter 3's exercise: your count against a network that counts what it does while it runs."""

from __future__ import annotations

from dataclasses import replace

import torch
from exercise import step_cost
from torch import Tensor, nn

from chapters.lab import OneRequest
from minivllm.attention.base import AttentionSpec
from minivllm.attention.reference import visible
from minivllm.loading import load_model
from minivllm.loading.dummy import dummy_spec

SPEC = dummy_spec("tiny")


class Counter:
    """Watches a network: the multiplications and additions of its linear layers and of its attention."""

    def __init__(self, model: nn.Module):
        self.matrices = self.attention = self.kv_numbers = 0
        for module in model.modules():
            if hasattr(module, "method"):  # a linear layer, the LM head among them
                module.register_forward_hook(self.on_linear)

    def on_linear(self, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        (x,) = args
        self.matrices += 2 * x.shape[0] * x.shape[1] * out.shape[1]


class CountingCache:
    """Keeps K and V, and counts what attention will do with them."""

    def __init__(self, counter: Counter, layer: AttentionSpec):
        self.counter, self.layer = counter, layer
        self.k = self.v = torch.empty(0, layer.num_kv_heads, layer.head_size)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.k, self.v = torch.cat([self.k, k]), torch.cat([self.v, v])
        seen = int(visible(len(k), len(self.k), None, k.device).sum())
        self.counter.attention += seen * self.layer.num_heads * 4 * self.layer.head_size
        self.counter.kv_numbers += self.k.numel() + self.v.numel()
        return self.k, self.v


def counted(*texts: tuple[int, int]) -> Counter:
    """What the network does for requests of (tokens now, tokens computed before)."""
    model = load_model("dummy:tiny", torch.float32, "cpu").model
    counter = Counter(model)
    for now, before in texts:
        request = OneRequest(model, lambda layer: CountingCache(counter, layer))
        earlier = vars(counter).copy()
        if before:
            request.next_token([3] * before)
        vars(counter).update(earlier)  # what came before this step is not part of it
        request.next_token([3] * now)
    return counter


def assert_flops(*requests: tuple[int, int]) -> None:
    did, said = counted(*requests), step_cost(SPEC, requests).flops
    told = f"for {requests} the network did {did.matrices:,} FLOPs in its matrices and {did.attention:,} in attention"
    assert said == did.matrices + did.attention, told


def weights() -> int:
    """Of the matrices that a step reads: all but the embedding, which `tiny` does not share with its LM head."""
    return SPEC.num_parameters - SPEC.vocab_size * SPEC.hidden_size


def test_the_flops_of_one_token_are_those_that_the_network_did():
    for before in (0, 1, 20):
        assert_flops((1, before))


def test_the_flops_of_a_prompt_and_of_a_piece_of_one():
    for request in ((12, 0), (5, 7)):
        assert_flops(request)


def test_the_flops_of_a_batch_are_those_of_its_requests():
    assert_flops((1, 9), (4, 0), (3, 6))


def test_a_batch_reads_the_weights_once_and_each_requests_k_and_v():
    batch = [(1, 9), (4, 0), (3, 6)]
    kv = counted(*batch).kv_numbers
    told = f"there are {weights():,} weights, and {kv:,} numbers of K and V"
    assert step_cost(SPEC, batch, weight_bytes=4, kv_bytes=2).bytes == 4 * weights() + 2 * kv, told
    assert step_cost(SPEC, batch, weight_bytes=1, kv_bytes=4).bytes == weights() + 4 * kv, told


def test_a_tied_lm_head_is_read_like_any_other():
    tied = replace(SPEC, tie_embeddings=True)
    assert step_cost(tied, [(1, 3)]) == step_cost(SPEC, [(1, 3)])
