"""Cut a trace at its opaque operations (attention first of all) into pieces; equal pieces are one piece.

n equal layers give n + 1 pieces of three kinds: from the embeddings to the first attention, from one attention to the
next, from the last one to the final norm. A piece is known by the hash of its text, in which values have numbers
instead of names: layers that do the same have the same text and are compiled once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from minivllm.compile.opaque import is_opaque, name_of
from minivllm.compile.program import Call, Program, Slot, Submodule, Weight
from minivllm.compile.trace import INPUTS, Trace


class PieceGraph(NamedTuple):
    module: fx.GraphModule  # takes tensors, returns a tuple of tensors
    inputs: list[Any]  # a fake tensor each
    text: str


class Split(NamedTuple):
    program: Program
    pieces: dict[str, PieceGraph]  # by hash


def split(trace: Trace, salt: str = "") -> Split:
    """salt: whatever else the compiled form of a piece depends on (versions, flags); it goes into the hashes."""
    placeholders = [node for node in trace.graph.graph.nodes if node.op == "placeholder"]
    names = dict(zip(placeholders, [*INPUTS, *trace.weights], strict=True))
    pieces: dict[str, PieceGraph] = {}
    steps: list[tuple[str, str, list[Any], list[fx.Node]]] = []  # kind, name, args (nodes or constants), results
    for region in _regions(trace.graph.graph):
        if isinstance(region, fx.Node):
            results = [region] if region.target._schema.returns else []
            steps.append(("op", name_of(region.target), _arguments(region), results))
        elif results := _results(region):
            piece, inputs = _extract(region, results)
            digest = hashlib.sha256(f"{salt}\0{piece.text}".encode()).hexdigest()[:32]
            pieces.setdefault(digest, piece)
            steps.append(("piece", digest, inputs, results))
    (output,) = (node.args[0] for node in trace.graph.graph.nodes if node.op == "output")
    return Split(_program(steps, placeholders[: len(INPUTS)], names, output), pieces)


def _regions(graph: fx.Graph) -> Iterator[list[fx.Node] | fx.Node]:
    """Runs of nodes, and the opaque ones between them, in order."""
    run: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        assert node.op == "call_function", f"a trace holds operations only, not {node.format_node()}"
        if is_opaque(node.target):
            yield run
            yield node
            run = []
        else:
            run.append(node)
    yield run


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _results(region: list[fx.Node]) -> list[fx.Node]:
    """Tensors that somebody outside of the region reads. A size is made anew wherever it is wanted."""
    inside = set(region)

    def is_read(node: fx.Node) -> bool:
        return any(user not in inside and not _is_size(user) for user in node.users)

    return [node for node in region if is_read(node) and not _is_size(node)]


def _arguments(node: fx.Node) -> list[Any]:
    """Of an opaque operation, in the order of its schema: nodes and constants."""
    schema = node.target._schema.arguments
    given = [*node.args, *(node.kwargs.get(a.name, a.default_value) for a in schema[len(node.args) :])]
    for arg in given:
        assert not isinstance(arg, fx.Node) or not _is_size(arg), f"{node.format_node()}: a size cannot be passed"
    return given


def _extract(region: list[fx.Node], results: list[fx.Node]) -> tuple[PieceGraph, list[fx.Node]]:
    inside = set(region)
    reads = (a for node in region if not _is_size(node) for a in node.all_input_nodes)
    inputs = list(dict.fromkeys(a for a in reads if a not in inside and not _is_size(a)))
    graph, copies = fx.Graph(), {}
    for i, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"a{i}")
        copies[node].meta["val"] = node.meta["val"]
    has_tokens = (node for node in inputs if isinstance(next(iter(node.meta["val"].shape), 0), torch.SymInt))
    sized = copies.get(next(has_tokens, None))

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies and node.target is torch.ops.aten.sym_size.int:
            # There is one symbol, the number of tokens; the tensor that it was read from may live in another piece.
            assert sized is not None, "a piece that needs the number of tokens has no input with that many rows"
            copies[node] = graph.call_function(node.target, (sized, 0))
            copies[node].meta["val"] = sized.meta["val"].shape[0]
            assert str(node.meta["val"]) == str(copies[node].meta["val"]), "a size other than the number of tokens"
        elif node not in copies:
            copies[node] = graph.node_copy(node, copy)
        return copies[node]

    for node in region:
        if not _is_size(node):
            copy(node)
    graph.output(tuple(copies[node] for node in results))
    fakes = [node.meta["val"] for node in inputs]
    return PieceGraph(fx.GraphModule({}, graph), fakes, _text(graph, fakes)), inputs


def _text(graph: fx.Graph, inputs: list[Any]) -> str:
    number = {node: f"n{i}" for i, node in enumerate(graph.nodes)}
    lines = [f"{tuple(fake.shape)} {fake.stride()} {fake.dtype} {fake.device}" for fake in inputs]
    for node in graph.nodes:
        args = fx.map_arg((node.args, dict(node.kwargs)), number.__getitem__)
        lines.append(f"{number[node]} = {node.op} {'' if node.op == 'placeholder' else node.target} {args}")
    return "\n".join(lines)


def _program(steps: list[Any], inputs: list[fx.Node], names: dict[fx.Node, str], output: fx.Node) -> Program:
    """Give each value a slot, from its making to its last use."""
    last_use = {arg: i for i, (_, _, args, _) in enumerate(steps) for arg in args if isinstance(arg, fx.Node)}
    last_use[output] = len(steps)
    slots = {node: i for i, node in enumerate(inputs)}
    free: list[int] = []
    num_slots = len(slots)
    calls = []
    for i, (kind, name, args, results) in enumerate(steps):
        encoded = [_value(arg, slots, names) for arg in args]
        for node in dict.fromkeys(a for a in args if isinstance(a, fx.Node) and a in slots and last_use[a] == i):
            free.append(slots[node])
        for node in results:
            slots[node] = free.pop() if free else num_slots
            num_slots += slots[node] == num_slots
        calls.append(Call(kind, name, tuple(encoded), tuple(slots[node] for node in results)))
    return Program(tuple(calls), num_slots, slots[output])


def _value(arg: Any, slots: dict[fx.Node, int], names: dict[fx.Node, str]) -> Any:
    if isinstance(arg, str):
        return Submodule(arg)
    if not isinstance(arg, fx.Node):
        return arg
    return Slot(slots[arg]) if arg in slots else Weight(names[arg])
