"""Every operation that a traced graph may name does what its schema says (torch.library.opcheck)."""

from __future__ import annotations

import pytest
import torch
from attention.batches import CPU, Case, spec
from attention.test_backends import MIXED
from block_kinds import oracle, random_blocks

from minivllm.attention.reference import ReferenceAttention
from minivllm.compile import opaque
from minivllm.compile.context import ForwardContext, Rope, attend, attend_with_rope, forward_context
from minivllm.kernels import reference
from minivllm.kernels.cpu import blocks
from minivllm.kernels.reference import rotate
from minivllm.layers import embedding as embedding  # its operation is registered
from minivllm.layers import experts

# Never called through the dispatcher: the program that a graph becomes calls it with the layer in place of its name.
CALLED_BY_THE_PROGRAM = {"linear"}


def test_attend():
    """It writes to `out` alone as far as its arguments go, and its fake version gives the right shapes."""
    case = Case(spec(), MIXED)
    backend = ReferenceAttention([case.spec], case.kv_spec, case.num_blocks + 1, CPU)
    context = ForwardContext(backend, backend.prepare(case.batch(case.now)), [case.cache(backend)], [case.spec])
    q, k, v = case.inputs(case.now)
    with forward_context(context):
        checks = torch.library.opcheck(torch.ops.minivllm.attend.default, (q, k, v, torch.zeros_like(q), 0))
    assert set(checks.values()) == {"SUCCESS"}, checks


class Turning(ReferenceAttention):
    def rope_and_attend(self, qkv, rope, kv, meta, layer, out):
        """Unnormed: its caller gives no weight."""
        assert rope.weight is None and rope.eps == 0.5
        q, k, v = qkv.split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], 1)
        cos, sin = (table[rope.positions][:, None] for table in (rope.cos, rope.sin))
        self.forward(rotate(q, cos, sin), rotate(k, cos, sin), v, kv, meta, layer, out)


def test_attend_with_rope():
    """And it gives what attend does of what was rotated before."""
    case = Case(spec(), MIXED)
    backend = Turning([case.spec], case.kv_spec, case.num_blocks + 1, CPU)
    batch = case.batch(case.now)
    context = ForwardContext(backend, backend.prepare(batch), [case.cache(backend)], [case.spec])
    inputs, positions = case.inputs(case.now), torch.from_numpy(batch.positions)
    angles = torch.rand(int(positions.max()) + 1, case.spec.head_size // 2)
    rope = Rope(positions, angles.cos(), angles.sin(), None, 0.5)
    qkv = torch.cat(inputs, 1)
    with forward_context(context):
        arguments = (qkv, positions, torch.zeros_like(inputs[0]), *rope[1:], 0)
        checks = torch.library.opcheck(torch.ops.minivllm.attend_with_rope.default, arguments)
        cos, sin = (table[positions][:, None] for table in rope[1:3])
        q, k = (rotate(x, cos, sin) for x in inputs[:2])
        assert torch.equal(attend_with_rope(qkv, rope, case.spec.num_heads, 0), attend(q, k, inputs[2], 0))
    assert set(checks.values()) == {"SUCCESS"}, checks


def test_experts(monkeypatch):
    """The kernel's operation too, with its reference in the kernel's place: tests/kernels has the kernel."""
    x, gate_up, down = torch.randn(5, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    weights, ids = torch.randn(5, 4).softmax(-1).topk(2)
    monkeypatch.setattr(experts, "_kernel", lambda: lambda *args: args[-1].copy_(reference.experts(*args[:-1])))
    for operation in (torch.ops.minivllm.experts, torch.ops.minivllm.experts_in_kernel):
        out = torch.zeros_like(x)
        arguments = x, ids, weights, out, gate_up, down
        checks = torch.library.opcheck(operation.default, arguments)
        assert set(checks.values()) == {"SUCCESS"}, checks
        operation(*arguments)
        torch.testing.assert_close(out, reference.experts(x, ids, weights, gate_up, down).float())


@pytest.mark.skipif(blocks.unsupported_reason() is not None, reason=str(blocks.unsupported_reason()))
def test_look_up():
    stored = random_blocks("Q5_0", 20, 64)
    ids, out = torch.tensor([3, 19, 3]), torch.zeros(3, 64)
    arguments = ids, stored.rows, out, blocks.KINDS.index(stored.kind)
    checks = torch.library.opcheck(torch.ops.minivllm.look_up.default, arguments)
    assert set(checks.values()) == {"SUCCESS"}, checks
    torch.ops.minivllm.look_up(*arguments)
    assert torch.equal(out, oracle(stored)[ids])


def test_every_operation_is_checked_here():
    shipped = {name for name, run in opaque._by_name.items() if run.__module__.startswith("minivllm.")}
    assert shipped == {"attend", "attend_with_rope", "experts", "experts_in_kernel", "look_up"} | CALLED_BY_THE_PROGRAM
