"""Memory for packed weights, which moves into huge pages once the engine serves.

A step reads every weight once, so the processor looks up each of its pages once a step: a walk through four levels of
tables, each of whose steps is a walk of its own on a virtual machine, for every 4 KiB. Linux's transparent huge pages
have 2 MiB: 512 times fewer walks. Matrices smaller than a page share one: they are cut from chunks in the order in
which they are packed, which is the order in which a step reads them.

A fresh huge page can take long, where a virtual machine's host has to find it first, and the first token would wait for
all of them. So weights are packed into small pages, as ever, and a thread of the running engine asks the system to put
huge ones in their place (madvise's MADV_COLLAPSE, Linux 6.1: a copy of 2 MiB each, which nobody sees but by the clock).
Older systems do the same by themselves in minutes (khugepaged).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")
MADV_COLLAPSE = 25
LINE = 64  # bytes of the cache: where each matrix begins
CHUNK = 64 << 20  # bytes, of which only those that are written take memory


def page_size() -> int:
    """Bytes of a huge page; 0: the system has none, or its administrator wants none."""
    try:
        wanted, size = (SYSTEM / "enabled").read_text(), (SYSTEM / "hpage_pmd_size").read_text()
    except OSError:
        return 0
    return 0 if "[never]" in wanted else int(size)


@dataclass
class Chunk:
    memory: Tensor  # uint8, of its own
    used: int = 0  # bytes of it

    @property
    def left(self) -> int:
        return len(self.memory) - self.used

    def take(self, size: int) -> Tensor:
        found = self.memory[self.used : self.used + size]
        self.used = min(len(self.memory), self.used + -(-size // LINE) * LINE)
        return found


class Arena:
    """Hands out pieces of chunks. A chunk goes back to the system with the last tensor that lies in it.

    page: bytes of a huge page."""

    def __init__(self, page: int):
        self._page, self._chunks = page, list[Chunk]()

    def take(self, size: int) -> Tensor:
        """uint8 [size > 0], not initialised, beginning with a line of the cache. Raises OSError if memory is short."""
        import torch

        if not self._chunks or self._chunks[-1].left < size:
            whole = -(-max(size, CHUNK) // self._page) * self._page  # so the system lets it begin with a huge page
            pages = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._chunks.append(Chunk(torch.frombuffer(pages, dtype=torch.uint8)))
        return self._chunks[-1].take(size)

    def move(self) -> threading.Thread | None:
        """Put what has been handed out into huge pages, all but what fills none, in a thread that ends by itself; None:
        there is nothing to move. The last call."""
        chunks, self._chunks = [chunk for chunk in self._chunks if chunk.used >= self._page], []
        if not chunks:
            return None
        thread = threading.Thread(target=_collapse, args=(chunks, self._page), name="huge-pages", daemon=True)
        thread.start()
        return thread


def _collapse(chunks: list[Chunk], page: int) -> None:
    madvise = ctypes.CDLL(None, use_errno=True).madvise  # Python's own keeps the interpreter's lock
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for chunk in chunks:
        begin = chunk.memory.data_ptr()
        first, end = -(-begin // page) * page, begin + chunk.used
        size = (end - first) // page * page
        madvise(first, size, mmap.MADV_HUGEPAGE)  # for khugepaged: this fails on older systems, or leaves pages out
        madvise(first, size, MADV_COLLAPSE)  # at once: each call has the system tidy up on every core before it begins


_arena: ContextVar[Arena | None] = ContextVar("arena", default=None)


@contextlib.contextmanager
def in_huge_pages(wanted: bool = True) -> Iterator[None]:
    """What is packed inside moves into huge pages once this ends, if they are wanted and the system has some."""
    page = page_size() if wanted else 0
    arena = Arena(page) if page else None
    token = _arena.set(arena)
    try:
        yield
    finally:
        _arena.reset(token)
    if arena is not None:
        arena.move()


def empty(size: int) -> Tensor:
    """uint8 [size], not initialised: for a matrix that is being packed."""
    import torch

    arena = _arena.get()
    if arena is not None and size > 0:
        with contextlib.suppress(OSError):  # too little is left for a chunk, but perhaps not for this
            return arena.take(size)
    return torch.empty(size, dtype=torch.uint8)
