"""Every operation that a traced graph may name does what its schema says (torch.library.opcheck)."""

from __future__ import annotations

import torch
from attention.batches import CPU, Case, spec
from attention.test_backends import MIXED

from minivllm.attention.reference import ReferenceAttention
from minivllm.compile import opaque
from minivllm.compile.context import ForwardContext, Turn, attend, attend_turned, forward_context
from minivllm.kernels import twins
from minivllm.kernels.twins import rotate
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
    def turn_and_attend(self, qkv, turn, kv, meta, layer, out):
        """Unnormed: its caller gives no weight."""
        assert turn.weight is None and turn.eps == 0.5
        q, k, v = qkv.split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], 1)
        cos, sin = (table[turn.positions][:, None] for table in (turn.cos, turn.sin))
        self.forward(rotate(q, cos, sin), rotate(k, cos, sin), v, kv, meta, layer, out)


def test_attend_turned():
    """And it gives what attend does of what was turned before."""
    case = Case(spec(), MIXED)
    backend = Turning([case.spec], case.kv_spec, case.num_blocks + 1, CPU)
    batch = case.batch(case.now)
    context = ForwardContext(backend, backend.prepare(batch), [case.cache(backend)], [case.spec])
    inputs, positions = case.inputs(case.now), torch.from_numpy(batch.positions)
    angles = torch.rand(int(positions.max()) + 1, case.spec.head_size // 2)
    turn = Turn(positions, angles.cos(), angles.sin(), None, 0.5)
    qkv = torch.cat(inputs, 1)
    with forward_context(context):
        arguments = (qkv, positions, torch.zeros_like(inputs[0]), *turn[1:], 0)
        checks = torch.library.opcheck(torch.ops.minivllm.attend_turned.default, arguments)
        cos, sin = (table[positions][:, None] for table in turn[1:3])
        q, k = (rotate(x, cos, sin) for x in inputs[:2])
        assert torch.equal(attend_turned(qkv, turn, case.spec.num_heads, 0), attend(q, k, inputs[2], 0))
    assert set(checks.values()) == {"SUCCESS"}, checks


def test_experts(monkeypatch):
    """The kernel's operation too, with its twin in the kernel's place: tests/kernels has the kernel."""
    x, gate_up, down = torch.randn(5, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    weights, ids = torch.randn(5, 4).softmax(-1).topk(2)
    monkeypatch.setattr(experts, "_kernel", lambda: lambda *args: args[-1].copy_(twins.experts(*args[:-1])))
    for operation in (torch.ops.minivllm.experts, torch.ops.minivllm.experts_in_kernel):
        out = torch.zeros_like(x)
        arguments = x, ids, weights, out, gate_up, down
        checks = torch.library.opcheck(operation.default, arguments)
        assert set(checks.values()) == {"SUCCESS"}, checks
        operation(*arguments)
        torch.testing.assert_close(out, twins.experts(x, ids, weights, gate_up, down).float())


def test_every_operation_is_checked_here():
    shipped = {name for name, run in opaque._by_name.items() if run.__module__.startswith("minivllm.")}
    assert shipped == {"attend", "attend_turned", "experts", "experts_in_kernel"} | CALLED_BY_THE_PROGRAM
