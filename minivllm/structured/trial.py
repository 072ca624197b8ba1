"""What a child does with a specification that a stranger has sent: read it, choose a backend, compile it once.

Work for minivllm/sandbox.py, whose limits hold here, and which kills this process when they are passed. It is told the
vocabulary and the backends, and answers with what the engine's process needs to build the same grammar, or with why
there is none.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import msgspec

from minivllm.errors import BadRequest
from minivllm.structured.base import Vocabulary
from minivllm.structured.compiler import GrammarCompiler
from minivllm.structured.params import StructuredParams
from minivllm.structured.without_torch import import_xgrammar


class Setup(msgspec.Struct, array_like=True):
    tokens: list[bytes]
    eos_ids: tuple[int, ...]
    backends: list[tuple[str, str]]  # name, "module:class"; in the order in which they are asked


class Passed(msgspec.Struct, array_like=True, tag=True):
    backend: str
    source: bytes  # what its `translate` gave


class Refused(msgspec.Struct, array_like=True, tag=True):
    message: str
    param: str | None


def setup_of(compiler: GrammarCompiler) -> bytes:
    backends = [(name, f"{cls.__module__}:{cls.__qualname__}") for name, cls in compiler.backends.items()]
    vocabulary = compiler.vocabulary
    return msgspec.msgpack.encode(Setup(list(vocabulary.tokens), vocabulary.eos_ids, backends))


def answer_of(answer: bytes) -> tuple[str, bytes]:
    """Which backend, and its translation. Raises BadRequest if the specification was refused."""
    found = msgspec.msgpack.decode(answer, type=Passed | Refused)
    if isinstance(found, Refused):
        raise BadRequest(found.message, found.param)
    return found.backend, found.source


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """In the child, which will never load torch: nowhere else."""
    told = msgspec.msgpack.decode(setup, type=Setup)
    if any(name == "xgrammar" for name, _ in told.backends):
        import_xgrammar()
    return make_work(setup)


def make_work(setup: bytes) -> Callable[[bytes], bytes]:
    told = msgspec.msgpack.decode(setup, type=Setup)
    vocabulary = Vocabulary(told.tokens, told.eos_ids)
    backends = [(name, _imported(place)) for name, place in told.backends]
    compiler = GrammarCompiler(lambda: vocabulary, backends)
    compiler.load()  # so that no task's time goes to imports

    def work(task: bytes) -> bytes:
        try:
            backend, source, _ = compiler.choose(msgspec.msgpack.decode(task, type=StructuredParams))
            return msgspec.msgpack.encode(Passed(backend, source))
        except BadRequest as error:
            return msgspec.msgpack.encode(Refused(str(error), error.param))

    return work


def _imported(place: str) -> type:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
