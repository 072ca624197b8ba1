"""Captured calls: recorded once for each size, and done again without the host's work.

A step is padded to a captured size. Its inputs are copied to where that size's captures read them, and each function
that was wrapped then replays what it did when it was recorded. What the recording is, a `Recorder` knows:

    CudaGraphs       a graph; where something is done aside (attention), several with calls between them
    RecordedCalls    on a CPU: the call itself, done again on the arguments that it was recorded with, its results
                     copied to where the first ones lie, as a graph would leave them

The manager above is one for both, and asserts what a graph takes for granted: arguments have not moved since, and once
warm-up is over nothing is recorded any more, since a size that was not warmed up would stall a running engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from minivllm.compile.breaks import Break, broken_off
from minivllm.compile.program import Piece

Forward = Callable[[Tensor, Tensor], Tensor]  # x [T, hidden], positions [T] -> hidden [T, hidden]
Interrupt = Callable[[Break], None]


def capture_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16 ... and `most`, largest first: padding is at most a third of a step."""
    halves = chain.from_iterable((2**i, 3 * 2 ** (i - 1)) if i else (1,) for i in count())
    sizes = []
    for size in halves:
        if size >= most:
            return (most, *reversed(sizes))
        sizes.append(size)
    raise AssertionError


class Recording(NamedTuple):
    results: Sequence[Tensor]  # where they lie, after each replay too
    replay: Callable[[], None]


class Recorder(Protocol):
    def record(self, run: Callable[[], Sequence[Tensor]]) -> Recording:
        """The results are those of this call."""
        ...

    def record_around(self, run: Callable[[Interrupt], Sequence[Tensor]]) -> Recording:
        """The same, of a function that hands what no capture may hold to `Interrupt`."""
        ...

    def hold(self, tensor: Tensor) -> Tensor:
        """A tensor at the same place, for later calls to read a replay's result."""
        ...


def borrowed(tensor: Tensor) -> Tensor:
    """The same memory, without owning it."""
    memory = tensor.untyped_storage()
    place = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), tensor.device, memory.nbytes())
    return tensor.new_empty(0).set_(place, tensor.storage_offset(), tensor.shape, tensor.stride())


class CudaGraphs:
    """All graphs use one pool of memory: they never run beside each other.

    What passes from one graph to the next is known by its address alone. Were it kept, every activation of every layer
    would have memory of its own, for each size; so its memory is taken again, by later layers and by smaller sizes, as
    in a forward that is called (vLLM's weak references to what its graphs give).
    """

    def __init__(self, device: torch.device):
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # nothing may be captured on the default one

    def record(self, run: Callable[[], Sequence[Tensor]]) -> Recording:
        return self.record_around(lambda interrupt: run())

    def record_around(self, run: Callable[[Interrupt], Sequence[Tensor]]) -> Recording:
        steps: list[Callable[[], None]] = []
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            run(Break.do)  # what is loaded, compiled or set aside at the first call must not be captured
            torch.cuda.synchronize()
            graph = self._begin()

            def interrupt(broken: Break) -> None:
                nonlocal graph
                graph.capture_end()
                again = broken._replace(tensors=[borrowed(tensor) for tensor in broken.tensors])
                steps.extend((graph.replay, again.do))
                graph = self._begin()

            results = run(interrupt)
            graph.capture_end()
            steps.append(graph.replay)
        torch.cuda.synchronize()

        def replay() -> None:
            for step in steps:
                step()

        replay()  # a capture computes nothing
        return Recording(results, replay)

    def hold(self, tensor: Tensor) -> Tensor:
        return borrowed(tensor)

    def _begin(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool)
        return graph


class RecordedCalls:
    def record(self, run: Callable[[], Sequence[Tensor]]) -> Recording:
        return self.record_around(lambda interrupt: run())

    def record_around(self, run: Callable[[Interrupt], Sequence[Tensor]]) -> Recording:
        breaks: list[Break] = []

        def keep(broken: Break) -> None:
            broken.do()
            breaks.append(broken)

        results = run(keep)

        def replay() -> None:
            left = iter(breaks)
            for result, new in zip(results, run(lambda broken: next(left).do_for(broken)), strict=True):
                result.copy_(new)
            assert next(left, None) is None, "the call took a shorter way than when it was recorded"

        return Recording(results, replay)

    def hold(self, tensor: Tensor) -> Tensor:
        return tensor


def make_recorder(device: torch.device) -> Recorder:
    return CudaGraphs(device) if device.type == "cuda" else RecordedCalls()


class Exact:
    """No captures: a forward has as many rows as the step has tokens."""

    sizes: tuple[int, ...] = ()

    def fit(self, num_tokens: int) -> int:
        return num_tokens

    def room(self, num_tokens: int) -> Tensor | None:
        return None

    def inputs(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return x, positions

    def wrap(self, piece: Piece) -> Piece:
        return piece

    def wrap_forward(self, forward: Forward) -> Forward:
        return forward

    def open(self) -> None:
        """Nothing is captured."""

    def seal(self) -> None:
        """Nothing was captured."""


class Captures:
    """The captures of every function that is wrapped, one for each size."""

    def __init__(self, sizes: tuple[int, ...], recorder: Recorder):
        """sizes: largest first, the order of capture, so that the smaller ones find room in the pool. Steps of more
        tokens than the largest are not captured."""
        self.sizes = sizes
        self._recorder = recorder
        self._inputs: dict[int, tuple[Tensor, Tensor]] = {}
        self._sealed = False
        self._size: int | None = None  # of this step, if it is captured

    def fit(self, num_tokens: int) -> int:
        """Token rows of a step."""
        return min((size for size in self.sizes if size >= num_tokens), default=num_tokens)

    def room(self, num_tokens: int) -> Tensor | None:
        """Where x [num_tokens, hidden] may be written, so that `inputs` need not copy it."""
        held = self._inputs.get(num_tokens)
        return held and held[0]

    def inputs(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The size's own buffers, filled.

        Inductor's kernels read inputs at multiples of 16 bytes, and its wrappers copy an input that lies elsewhere, in
        each call. None does: these buffers, what one piece makes for the next and the model's weights each begin where
        torch's allocator begins (at a multiple of 512 bytes on a GPU). Were one to, its copy would be captured with the
        rest, and be right as long as the input stays in its place, which is asserted: slower, not wrong.
        """
        size = len(x)
        if size > self.sizes[0]:
            self._size = None
            return x, positions
        self._size = size
        if size not in self._inputs:
            self._refuse_if_sealed()
            assert size in self.sizes, f"{size} tokens were not padded to a captured size: {self.sizes}"
            self._inputs[size] = x.clone(), positions.clone()
        buffers = self._inputs[size]
        for buffer, given in zip(buffers, (x, positions), strict=True):
            if given is not buffer:
                buffer.copy_(given)
        return buffers

    def wrap(self, piece: Piece) -> Piece:
        """piece: captured whole."""
        return self._wrap(piece, lambda args: self._recorder.record(lambda: piece(args)))

    def wrap_forward(self, forward: Forward) -> Forward:
        """forward: captured between its attentions and whatever else is done aside (a breakable capture)."""

        def record(args: list[Any]) -> Recording:
            return self._recorder.record_around(lambda interrupt: (broken_off(forward, args, interrupt),))

        call = self._wrap(lambda args: (forward(*args),), record)
        return lambda x, positions: call([x, positions])[0]

    def open(self) -> None:
        """Other functions are about to be warmed up."""
        self._sealed = False

    def seal(self) -> None:
        """Warm-up is over."""
        self._sealed = True

    def _wrap(self, call: Piece, record: Callable[[list[Any]], Recording]) -> Piece:
        recorded: dict[int, tuple[list[Any], Recording]] = {}

        def replay(args: list[Any]) -> Sequence[Tensor]:
            size = self._size
            if size is None:
                return call(args)
            if size not in recorded:
                self._refuse_if_sealed()
                results, again = record(args)
                held = [self._recorder.hold(result) for result in results]
                recorded[size] = [_place(arg) for arg in args], Recording(held, again)
                return results
            places, recording = recorded[size]
            for i, (given, seen) in enumerate(zip(args, places, strict=True)):
                assert given is seen or _place(given) == seen, f"argument {i} has moved since size {size} was captured"
            recording.replay()
            return recording.results

        return replay

    def _refuse_if_sealed(self) -> None:
        assert not self._sealed, f"size {self._size} was not warmed up (sizes: {self.sizes})"


def copy_into(held: Any, new: Any) -> None:
    """Tensors of `new` to where those of `held` lie, in whatever tuples, lists and dictionaries. Of a table [R, width]
    the first columns may come alone. Anything else is part of what was captured and must be equal."""
    if isinstance(held, Tensor):
        if held.dim() == new.dim() == 2 and held.shape[1] > new.shape[1]:
            held = held[:, : new.shape[1]]
        assert (held.shape, held.dtype) == (new.shape, new.dtype), f"{held.shape} was captured, not {new.shape}"
        held.copy_(new)
    elif isinstance(held, (tuple, list)):
        for a, b in zip(held, new, strict=True):
            copy_into(a, b)
    elif isinstance(held, dict):
        assert held.keys() == new.keys()
        for name, value in held.items():
            copy_into(value, new[name])
    else:
        assert held == new, f"{held!r} was captured, not {new!r}"


def _place(value: Any) -> Any:
    """What must not change of an argument. Of a tensor it is where it lies; a packed weight, which has no address, must
    be the same one."""
    if isinstance(value, Tensor) and not value.is_mkldnn:
        return value.data_ptr(), value.shape, value.stride()
    return value
