"""`runner.forward=piecewise`: the model as a traced graph, cut at attention, whose pieces may be compiled.

    off         the pieces run as torch operations: the slow reference of the others
    wait        compiled before the first step
    background  eager at once; a process builds the pieces, and they are swapped in between two steps

Pieces that are in the cache are loaded at once, in milliseconds, without a compiler. What cannot be compiled here stays
eager, and `decision` says why.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from minivllm.batch import BatchKey, InputBatch
from minivllm.compile.forms import form_for
from minivllm.compile.program import Bound, Piece, Program
from minivllm.compile.store import Store
from minivllm.compile.trace import skeleton, tensors_of
from minivllm.loading.cache import Cache
from minivllm.runner.compile_job import Build, Job, job_for
from minivllm.runner.forward import ForwardOptions, first_inputs

logger = logging.getLogger("minivllm")

CANNOT_PICKLE = (pickle.PicklingError, TypeError, AttributeError)  # a lock or a lambda among a module's attributes
NOT_SENT = "the model's modules cannot be sent to a builder"
BACKGROUND_NICE = 19  # a builder takes only what the serving engine and others leave

Compiled = tuple[Program, dict[str, Piece]]


class PiecewiseForward:
    def __init__(self, model: nn.Module, device: torch.device, options: ForwardOptions):
        self.model = model
        self.device = device
        self._shapes = options.shapes
        self._forward: Callable[[Tensor, Tensor], Tensor] = options.shapes.wrap_forward(model)
        self._store = Store(Cache(options.cache), form_for(device))
        self._ready: Compiled | None = None  # set by the thread that waits for a builder, taken between two steps
        self._warmed_up = threading.Event()
        self._run_dummy: Callable[[BatchKey], None] | None = None
        self.decision = getattr(self, f"_{options.compile}")(options)

    def key_for(self, num_reqs: int, num_tokens: int, max_query: int, adapted: bool = False) -> BatchKey:
        """Asked once a step, before its inputs are prepared: the place between two steps."""
        self._warmed_up.set()  # by now also what is around this forward
        if self._ready is not None:
            compiled, self._ready = self._ready, None
            self._use(*compiled)
            self._warm()
            logger.info("compile: from this step on the model runs as compiled pieces")
        return BatchKey(self._shapes.fit(num_tokens))

    def warmup(self, run_dummy: Callable[[BatchKey], None]) -> None:
        self._run_dummy = run_dummy
        self._warm()

    def __call__(self, batch: InputBatch) -> Tensor:
        return self._forward(*first_inputs(self.model, batch, self.device, self._shapes))

    def _warm(self) -> None:
        self._shapes.open()
        for size in self._shapes.sizes or (1,):  # one token: what the first call of a library loads lazily
            self._run_dummy(BatchKey(size))
        self._shapes.seal()

    def _use(self, program: Program, pieces: dict[str, Piece]) -> None:
        # Wrapped call by call: equal pieces of two layers are one piece of code, but two captures.
        wrapped = {}
        calls = []
        for i, call in enumerate(program.calls):
            if call.kind == "piece":
                wrapped[f"{i}"] = self._shapes.wrap(pieces[call.name])
                call = call._replace(name=f"{i}")
            calls.append(call)
        self._forward = Bound(
            program._replace(calls=tuple(calls)), wrapped, tensors_of(self.model), dict(self.model.named_modules())
        )

    # --- the options of runner.compile: each returns the decision

    def _off(self, options: ForwardOptions) -> tuple[str, str]:
        from minivllm.compile.split import split
        from minivllm.compile.trace import trace

        program, graphs = split(trace(skeleton(self.model)))
        self._use(program, {digest: _as_piece(graph.module) for digest, graph in graphs.items()})
        return "piecewise", f"{_describe(program)}, not compiled (runner.compile=off)"

    def _wait(self, options: ForwardOptions) -> tuple[str, str]:
        return self._find_or(self._build_now, options, nice=0)

    def _background(self, options: ForwardOptions) -> tuple[str, str]:
        return self._find_or(self._build_meanwhile, options, BACKGROUND_NICE)

    def _find_or(self, build: Callable[[Job], tuple[str, str]], options: ForwardOptions, nice: int) -> tuple[str, str]:
        try:
            job = self._job(options, nice)
        except CANNOT_PICKLE as error:
            return "eager", f"{NOT_SENT}: {error}"
        if (compiled := self._load(job.key)) is not None:
            self._use(*compiled)
            return "piecewise", f"{_describe(compiled[0])}, compiled to {self._store.form.made}; found in the cache"
        if (why := self._store.form.unsupported_reason(self.device)) is not None:
            return "eager", why
        return build(job)

    def _build_now(self, job: Job) -> tuple[str, str]:
        begin = time.perf_counter()
        logger.info("compile: building the model's pieces, once for this machine (about a minute)")
        failure, compiled = Build(job).wait(), self._load(job.key)
        if compiled is None:
            logger.warning("compile: the model stays eager: %s", failure)
            return "eager", failure or "what was built cannot be read"
        self._use(*compiled)
        how = f"compiled to {self._store.form.made} in {time.perf_counter() - begin:.0f} s"
        return "piecewise", f"{_describe(compiled[0])}, {how}"

    def _build_meanwhile(self, job: Job) -> tuple[str, str]:
        build = Build(job)
        weakref.finalize(self, build.cancel)
        args = (weakref.ref(self), self._warmed_up, build, job.key)
        waiter = threading.Thread(target=_await, args=args, name="minivllm-compile", daemon=True)
        waiter.start()
        made = self._store.form.made
        return "eager", f"compiled pieces ({made}) are being built in the background and will be swapped in"

    def _job(self, options: ForwardOptions, nice: int) -> Job:
        return job_for(self.model, self._store.form, self.device, options.cache, options.num_threads, nice)

    def _load(self, key: str) -> Compiled | None:
        program = self._store.program(key)
        pieces = program and self._store.pieces(program)
        return (program, pieces) if pieces else None


def _await(runner: weakref.ref[PiecewiseForward], warmed_up: threading.Event, build: Build, key: str) -> None:
    failure = build.wait()
    # Loading puts kernels on the device, which CUDA allows no thread while another one captures, as warm-up does.
    while failure is None and not warmed_up.wait(1.0) and runner() is not None:
        pass
    alive = runner()
    if alive is None:
        return
    compiled = alive._load(key)
    if compiled is None:
        logger.warning("compile: the model stays eager: %s", failure or "what was built cannot be read")
    else:
        logger.info("compile: %s are ready", _describe(compiled[0]))
        alive._ready = compiled


def _as_piece(module: nn.Module) -> Piece:
    return lambda args: module(*args)


def _describe(program: Program) -> str:
    num_calls = sum(call.kind == "piece" for call in program.calls)
    return f"{num_calls} pieces, {len(program.pieces)} different"
