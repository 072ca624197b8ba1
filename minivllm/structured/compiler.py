"""GrammarCompiler: from a specification to a compiled grammar, by the first backend that can, at most once.

Compiling takes milliseconds to seconds and happens where a request enters the core's process, never in the step loop
(engine/compilations.py). The worker that will run the request asks again and finds the result: both share the compiler
of their vocabulary, and what was compiled is kept as long as the request's params live.

What strangers send is read and compiled in a child first, under limits (trial.py, engine/grammar_trials.py). Compiled
grammars cannot be sent from there at a reasonable price: XGrammar's 2 MB of a schema with a hundred objects are 880 MB
of its JSON. So the child is a trial. It tells which backend can and how it translated the specification, and only what
has passed is built here as well, by the library, which gives the interpreter's lock back meanwhile.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec

import msgspec

from minivllm.structured.base import CompiledGrammar, GrammarBackend, Unsupported, Vocabulary
from minivllm.structured.calls import CompiledCalls, CompiledEither
from minivllm.structured.escape import CompiledEscape
from minivllm.structured.params import StructuredParams
from minivllm.structured.prelude import CompiledFree, CompiledPrelude

# Of compiled ones that are kept though nobody uses them, the least recently used goes first.
MAX_GRAMMARS, MAX_BYTES = 128, 256 << 20
# Which backend holds an output to these params, by its name, and how it translates them. Raises BadRequest.
Choose = Callable[[StructuredParams], tuple[str, bytes]]


class GrammarCompiler:
    """Thread-safe. Nothing is loaded before the first request that needs it."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary], backends: Sequence[tuple[str, type[GrammarBackend]]]):
        """load_vocabulary may raise BadRequest: a model whose output cannot be constrained."""
        self._load_vocabulary = load_vocabulary
        self._classes = dict(backends)
        self._backends: dict[str, GrammarBackend] = {}
        self._vocabulary: Vocabulary | None = None
        self._grammars: weakref.WeakValueDictionary[Hashable, Future[CompiledGrammar]] = weakref.WeakValueDictionary()
        self._recent: OrderedDict[Hashable, Future[CompiledGrammar]] = OrderedDict()  # of these, kept in any case
        self._used: dict[int, Future[CompiledGrammar]] = {}  # and by params that live, by their ids
        self._lock = threading.Lock()  # of the dictionaries; never held while compiling
        self._loading = threading.Lock()

    @property
    def vocabulary(self) -> Vocabulary:
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = self._load_vocabulary()
            return self._vocabulary

    @property
    def backends(self) -> dict[str, type[GrammarBackend]]:
        """In the order in which they are asked."""
        return dict(self._classes)

    def load(self) -> None:
        """Vocabulary and backends, which the first request of a kind would wait for otherwise."""
        for name in self._classes:
            self._backend(name)

    def has(self, params: StructuredParams) -> bool:
        """Whether compile() would return at once, as it then will as long as `params` lives."""
        with self._lock:
            found = self._grammars.get(params.key)
        is_there = found is not None and found.done() and found.exception() is None
        if is_there:
            self._keep(params, found)
        return is_there

    def compile(self, params: StructuredParams, choose: Choose | None = None) -> CompiledGrammar:
        """Raises BadRequest, naming the request's field, for what is wrong, too large, or beyond every backend.

        Several callers with one specification at a time wait for one compilation. Failures are not kept. choose: None:
        it is done here, without any limit but those of the backends.
        """
        key = params.key
        with self._lock:
            found = self._grammars.get(key)
            mine = found is None
            if mine:
                found = self._grammars[key] = Future()
            self._recent[key] = found
            self._recent.move_to_end(key)
            self._forget_some()
        if mine:
            try:
                found.set_result(self._compile(params, choose))
                with self._lock:
                    self._forget_some()
            except BaseException as error:
                with self._lock:
                    if self._grammars.get(key) is found:
                        del self._grammars[key]
                        self._recent.pop(key, None)
                found.set_exception(error)
        compiled = found.result()
        self._keep(params, found)
        return compiled

    def _forget_some(self) -> None:
        """With the lock. The newest stays, as whoever asked for it is about to use it."""
        recent = self._recent
        sizes = [found.result().num_bytes if found.done() else 0 for found in recent.values()]
        total = sum(sizes)
        for size in sizes[:-1]:
            if len(recent) <= MAX_GRAMMARS and total <= MAX_BYTES:
                return
            recent.popitem(last=False)
            total -= size

    def _keep(self, params: StructuredParams, found: Future[CompiledGrammar]) -> None:
        if id(params) not in self._used:
            self._used[id(params)] = found
            weakref.finalize(params, self._used.pop, id(params), None).atexit = False

    def _compile(self, params: StructuredParams, choose: Choose | None) -> CompiledGrammar:
        if params.prelude is not None:
            return self._behind_prelude(params, choose)
        if params.calls is not None:
            inner = self.compile(msgspec.structs.replace(params, calls=None), choose)
            calls = CompiledCalls(params.calls, partial(self.compile, choose=choose), self.vocabulary)
            return CompiledEither(inner, calls)
        bare = msgspec.structs.replace(params, escapes=())
        if choose is None:
            compiled = self.choose(bare)[2]
        else:
            name, source = choose(bare)
            compiled = self._backend(name).build(bare, source)
        return CompiledEscape(compiled, params.escapes, self.vocabulary) if params.escapes else compiled

    def choose(self, params: StructuredParams) -> tuple[str, bytes, CompiledGrammar]:
        """The first backend that can, how it translates these params (without prelude and escapes), and what that
        compiles to."""
        reasons = []
        for name in self._classes:
            try:
                backend = self._backend(name)
                source = backend.translate(params)
                return name, source, backend.build(params, source)
            except Unsupported as e:
                reasons.append((name, str(e).removeprefix(f"{params.field}: ")))
            except RecursionError:
                reasons.append((name, f"{params.kind}: nested too deeply"))
            except UnicodeEncodeError:
                raise params.no_text() from None
        if len(reasons) == 1:
            raise params.error(f"{reasons[0][1]} (structured.backend={reasons[0][0]})")
        raise params.error("no backend can do this. " + "; ".join(f"{name}: {why}" for name, why in reasons))

    def translate_by_library(self, params: StructuredParams) -> tuple[str, bytes] | None:
        """As `choose` does, by the first backend, unless that is this package's own or does not take these params."""
        name, cls = next(iter(self._classes.items()))
        if cls.requires is None:
            return None
        try:
            return name, self._backend(name).translate(params)
        except Unsupported:
            return None

    def _behind_prelude(self, params: StructuredParams, choose: Choose | None) -> CompiledGrammar:
        """Preludes differ, in their budgets above all: what follows them is compiled once."""
        prelude, vocabulary = params.prelude, self.vocabulary
        if params.kind is None:
            inner: CompiledGrammar = CompiledFree(vocabulary)
        else:
            inner = self.compile(msgspec.structs.replace(params, prelude=None), choose)
        compiled = CompiledPrelude(prelude, inner, vocabulary)
        return CompiledEscape(inner, prelude.openings, vocabulary, compiled) if prelude.openings else compiled

    def _backend(self, name: str) -> GrammarBackend:
        vocabulary = self.vocabulary
        with self._loading:
            if name not in self._backends:
                self._backends[name] = self._classes[name](vocabulary)
            return self._backends[name]


_SHARED: weakref.WeakValueDictionary[Hashable, GrammarCompiler] = weakref.WeakValueDictionary()
_SHARED_LOCK = threading.Lock()


def shared_compiler(key: Hashable, make: Callable[[], GrammarCompiler]) -> GrammarCompiler:
    """The compiler of this process with this key (vocabulary and backends), as long as anybody holds it."""
    with _SHARED_LOCK:
        found = _SHARED.get(key)
        if found is None:
            found = _SHARED[key] = make()
        return found


def is_installed(backend: type[GrammarBackend]) -> bool:
    return backend.requires is None or find_spec(backend.requires) is not None
