"""Rules: one trace holds for every number of tokens; equal layers share a piece; the split model computes the same."""

import pytest
import torch
from naive_attention import hidden_of

from minivllm.compile.forms import form_for
from minivllm.compile.opaque import find, opaque
from minivllm.compile.program import Bound, Program
from minivllm.compile.split import split
from minivllm.compile.store import describe, environment, program_key
from minivllm.compile.trace import _SkeletonPickler, skeleton, tensors_of, trace

CASES = [1, 2, 3, 7, 8, 31, 130]


@pytest.fixture(scope="module")
def split_tiny(tiny):
    return split(trace(skeleton(tiny)))


def test_n_layers_give_n_plus_one_pieces_of_three_kinds(split_tiny):
    kinds = [call.kind for call in split_tiny.program.calls]
    assert kinds == ["piece", "op"] * 4 + ["piece"]
    assert [call.args[-1] for call in split_tiny.program.calls if call.kind == "op"] == [0, 1, 2, 3]
    names = [call.name for call in split_tiny.program.calls if call.kind == "piece"]
    assert len(split_tiny.pieces) == len(set(names)) == 3
    assert names[1] == names[2] == names[3]


def test_other_flags_give_other_hashes(tiny, split_tiny):
    assert not set(split(trace(skeleton(tiny)), "avx2").pieces) & set(split_tiny.pieces)


def test_values_that_are_dead_give_their_slots_back(split_tiny):
    assert split_tiny.program.num_slots < 12  # of some 30 values


@pytest.mark.parametrize("num_tokens", CASES)
def test_pieces_that_are_not_compiled_compute_what_the_model_does(tiny, split_tiny, num_tokens):
    pieces = {name: (lambda args, module=piece.module: module(*args)) for name, piece in split_tiny.pieces.items()}
    program = Program.from_json(split_tiny.program.to_json())
    forward = Bound(program, pieces, tensors_of(tiny), dict(tiny.named_modules()))
    torch.testing.assert_close(
        hidden_of(tiny, forward, num_tokens), hidden_of(tiny, tiny, num_tokens), rtol=1e-5, atol=1e-5
    )


def test_a_forward_that_branches_on_the_number_of_tokens_is_refused():
    with pytest.raises(Exception, match="data-dependent|unbacked"):
        trace(skeleton(Branching()))


class NoEmbedding(torch.nn.Module):
    def embed(self, token_ids):
        return token_ids


class Branching(NoEmbedding):
    def forward(self, x, positions):
        return positions * 2 if x.shape[0] > 4 else positions


def test_a_model_is_traced_for_the_device_that_it_is_on(tiny, monkeypatch):
    """Else a tensor that its forward makes would be made on a CPU. This torch has no device but one without memory."""
    persistent_id = _SkeletonPickler.persistent_id

    def elsewhere(pickler, value):
        key = persistent_id(pickler, value)
        return (*key[:-1], "meta") if isinstance(value, torch.Tensor) else key

    monkeypatch.setattr(_SkeletonPickler, "persistent_id", elsewhere)
    traced = trace(skeleton(tiny))
    values = [node.meta.get("val") for node in traced.graph.graph.nodes]
    assert {str(value.device) for value in values if isinstance(value, torch.Tensor)} == {"meta"}
    assert {call.kind for call in split(traced).program.calls} == {"piece", "op"}


def test_the_key_changes_with_what_the_graph_depends_on(tiny):
    here, threads = (environment(form_for(tiny.norm.weight.device), tiny.norm.weight.device, n) for n in (1, 2))
    key = program_key(tiny, here)
    assert key == program_key(tiny, here) != program_key(tiny, threads)
    tiny.layers[1].mlp_norm.eps *= 2
    try:
        assert program_key(tiny, here) != key
    finally:
        tiny.layers[1].mlp_norm.eps /= 2
    assert program_key(tiny, here) == key
    assert not any(" at 0x" in line for line in describe(tiny)), "an address would change the key in each process"


chosen_product = opaque(
    "test_chosen_product(Tensor x, Tensor weight, Tensor? bias, int threshold) -> Tensor",
    run=lambda x, weight, bias, threshold: (
        torch.nn.functional.linear(x, weight, bias) * (1 if len(x) < threshold else 2)
    ),
    fake=lambda x, weight, bias, threshold: x.new_empty(x.shape[0], weight.shape[0]),
)


class Dual(NoEmbedding):
    """A layer whose operation depends on the number of tokens, and shares a plain tensor attribute."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.packed = torch.randn(8, 8)

    def forward(self, x, positions):
        x = positions.unsqueeze(1) * self.weight[0]
        x = chosen_product(torch.relu(x), self.packed, None, 5)
        return chosen_product(x, self.weight, self.weight[1], 3) + x


def test_an_opaque_operation_may_do_what_a_trace_cannot():
    model = Dual()
    program, graphs = split(trace(skeleton(model)))
    assert [call.name for call in program.calls if call.kind == "op"] == ["test_chosen_product"] * 2
    pieces = {name: (lambda args, module=piece.module: module(*args)) for name, piece in graphs.items()}
    forward = Bound(Program.from_json(program.to_json()), pieces, tensors_of(model), dict(model.named_modules()))
    for n in range(8):
        inputs = torch.arange(n), torch.arange(n)
        torch.testing.assert_close(forward(*inputs), model(*inputs), rtol=0, atol=0)


def test_the_operations_are_registered_as_torch_wants_them():
    assert torch.library.opcheck(chosen_product, (torch.ones(4, 8), torch.ones(8, 8), None, 3))
    with pytest.raises(KeyError):
        find("nobody_registered_this")
