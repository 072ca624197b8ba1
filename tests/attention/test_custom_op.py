"""Every operation that a traced graph may name does what its schema says (torch.library.opcheck)."""

from __future__ import annotations

import torch
from attention.batches import CPU, Case, spec
from attention.test_backends import MIXED

from minivllm.attention.reference import ReferenceAttention
from minivllm.compile import opaque
from minivllm.compile.context import ForwardContext, forward_context

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


def test_every_operation_is_checked_here():
    shipped = {name for name, run in opaque._by_name.items() if run.__module__.startswith("minivllm.")}
    assert shipped == {"attend"} | CALLED_BY_THE_PROGRAM
