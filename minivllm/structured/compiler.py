"""GrammarCompiler: from a specification to a compiled grammar, by the first backend that can, at most once.

Compiling takes milliseconds to seconds and happens where a request enters the core's process, never in the step loop
(engine/compilations.py). The worker that will run the request asks again and finds the result, since both share the
compiler of their vocabulary while they live in one process; a worker elsewhere compiles for itself.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from weakref import WeakValueDictionary

from minivllm.structured.base import CompiledGrammar, GrammarBackend, Unsupported, Vocabulary
from minivllm.structured.params import StructuredParams

MAX_GRAMMARS = 128  # compiled ones that are kept, the least recently used goes first


class GrammarCompiler:
    """Thread-safe. Nothing is loaded before the first request that needs it."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary], backends: Sequence[tuple[str, type[GrammarBackend]]]):
        """load_vocabulary may raise BadRequest: a model whose output cannot be constrained."""
        self._load_vocabulary = load_vocabulary
        self._classes = tuple(backends)
        self._backends: dict[str, GrammarBackend] = {}
        self._vocabulary: Vocabulary | None = None
        self._grammars: OrderedDict[Hashable, Future[CompiledGrammar]] = OrderedDict()
        self._lock = threading.Lock()  # of the dictionaries; never held while compiling
        self._loading = threading.Lock()

    @property
    def vocabulary(self) -> Vocabulary:
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = self._load_vocabulary()
            return self._vocabulary

    def has(self, params: StructuredParams) -> bool:
        """Whether compile() would return at once."""
        with self._lock:
            found = self._grammars.get(params.key)
        return found is not None and found.done() and found.exception() is None

    def compile(self, params: StructuredParams) -> CompiledGrammar:
        """Raises BadRequest, naming the request's field, for what is wrong, too large, or beyond every backend.

        Several callers with one specification at a time wait for one compilation. Failures are not kept.
        """
        key = params.key
        with self._lock:
            found = self._grammars.get(key)
            mine = found is None
            if mine:
                found = self._grammars[key] = Future()
                while len(self._grammars) > MAX_GRAMMARS:
                    self._grammars.popitem(last=False)
            else:
                self._grammars.move_to_end(key)
        if mine:
            try:
                found.set_result(self._compile(params))
            except BaseException as error:
                with self._lock:
                    if self._grammars.get(key) is found:
                        del self._grammars[key]
                found.set_exception(error)
        return found.result()

    def _compile(self, params: StructuredParams) -> CompiledGrammar:
        reasons = []
        for name, cls in self._classes:
            try:
                return self._backend(name, cls).compile(params)
            except Unsupported as e:
                reasons.append((name, str(e).removeprefix(f"{params.field}: ")))
            except RecursionError:
                reasons.append((name, f"{params.kind}: nested too deeply"))
        if len(reasons) == 1:
            raise params.error(f"{reasons[0][1]} (structured.backend={reasons[0][0]})")
        raise params.error("no backend can do this. " + "; ".join(f"{name}: {why}" for name, why in reasons))

    def _backend(self, name: str, cls: type[GrammarBackend]) -> GrammarBackend:
        vocabulary = self.vocabulary
        with self._loading:
            if name not in self._backends:
                self._backends[name] = cls(vocabulary)
            return self._backends[name]


_SHARED: WeakValueDictionary[Hashable, GrammarCompiler] = WeakValueDictionary()
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
