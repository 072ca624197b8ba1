"""kernels/cpu/memory.py: where packed weights lie."""

import ctypes
import errno
import mmap
from pathlib import Path

import pytest
import torch

from minivllm import LLM
from minivllm.kernels.cpu import linear, memory
from minivllm.kernels.cpu.memory import CHUNK, LINE, Arena

PAGE = 2 << 20
needs_huge_pages = pytest.mark.skipif(memory.page_size() != PAGE, reason="the system has no huge pages of 2 MiB")


def mapping(at: int) -> dict[str, int]:
    """{"Rss", "AnonHugePages" ...: KiB} of that part of this process's memory that has the address; {}: nothing has."""
    found, inside = {}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            first, _, end = name.partition("-")
            inside = int(first, 16) <= at < int(end, 16)
        elif inside and values[-1] == "kB":
            found[name[:-1]] = int(values[0])
    return found


def pages_in(begin: int, size: int) -> list[int]:
    first = -(-begin // PAGE) * PAGE
    return list(range(first, begin + size - PAGE + 1, PAGE))


def test_pieces_begin_with_lines_and_share_nothing():
    arena, sizes = Arena(PAGE), [1, 64, 65, 3 << 20, CHUNK - PAGE, CHUNK, CHUNK + 1, 7]
    pieces = [arena.take(size) for size in sizes]
    for i, piece in enumerate(pieces):
        piece[-1] = piece[0] = i + 1
    for i, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
        assert piece.dtype is torch.uint8 and piece.shape == (size,) and piece.data_ptr() % LINE == 0
        assert piece[0] == piece[-1] == i + 1


def test_small_pieces_follow_each_other():
    arena = Arena(PAGE)
    first, second = arena.take(100), arena.take(100)
    assert second.data_ptr() - first.data_ptr() == 2 * LINE


@needs_huge_pages
def test_a_chunk_goes_back_with_the_last_tensor_in_it():
    arena = Arena(PAGE)
    kept, dropped = arena.take(100), arena.take(CHUNK - PAGE)
    at = kept.data_ptr()
    dropped[:] = 1
    del arena, dropped
    assert mapping(at)["Rss"] >= (CHUNK - PAGE) // 1024
    del kept
    assert mapping(at) == {}


def can_collapse() -> bool:
    """Whether the kernel knows how, since Linux 6.1, and has a page left."""
    pages, madvise = mmap.mmap(-1, 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    begin = torch.frombuffer(pages, dtype=torch.uint8).fill_(1).data_ptr()
    return madvise(pages_in(begin, 2 * PAGE)[0], PAGE, memory.MADV_COLLAPSE) == 0


@needs_huge_pages
def test_what_was_packed_moves_into_huge_pages():
    if not can_collapse():
        pytest.skip("a kernel before 6.1, or no memory in one piece")
    arena, content = Arena(PAGE), torch.randint(0, 256, (3 * PAGE + 5000,), dtype=torch.uint8)
    piece = arena.take(len(content))
    piece.copy_(content)
    arena.move().join()
    pages = pages_in(piece.data_ptr(), len(piece))
    assert mapping(pages[0])["AnonHugePages"] == len(pages) * PAGE // 1024  # and not what fills none
    assert torch.equal(piece, content)


def test_less_than_a_page_stays_where_it_is():
    arena = Arena(PAGE)
    arena.take(PAGE - LINE)[:] = 1
    assert arena.move() is None


def test_a_system_that_cannot_still_hears_what_is_wanted(monkeypatch):
    """A kernel before 6.1 moves by itself what it has been told of."""
    asked = []

    def madvise(at: int, size: int, advice: int) -> int:
        asked.append((at, size, advice))
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: type("Libc", (), {"madvise": madvise}))
    arena, expected = Arena(PAGE), []
    for size in (4 * PAGE, CHUNK):
        pages = pages_in(arena.take(size).data_ptr(), size)
        expected += [(pages[0], len(pages) * PAGE, advice) for advice in (mmap.MADV_HUGEPAGE, memory.MADV_COLLAPSE)]
    arena.move().join()
    assert asked == expected


@pytest.mark.parametrize("enabled, size", [("always [madvise] never", PAGE), ("always madvise [never]", 0), (None, 0)])
def test_an_administrator_is_obeyed(monkeypatch, tmp_path, enabled, size):
    if enabled is not None:
        (tmp_path / "enabled").write_text(enabled + "\n")
        (tmp_path / "hpage_pmd_size").write_text(f"{PAGE}\n")
    monkeypatch.setattr(memory, "SYSTEM", tmp_path)
    assert memory.page_size() == size
    arenas = []
    monkeypatch.setattr(Arena, "take", lambda arena, size: arenas.append(arena) or torch.zeros(size, dtype=torch.uint8))
    with memory.in_huge_pages():
        assert len(memory.empty(100)) == 100
    assert len(arenas) == (size > 0)


def test_short_memory_is_torchs_affair(monkeypatch):
    """A chunk is more than is needed: a limit may allow the one and not the other."""
    monkeypatch.setattr(memory, "page_size", lambda: PAGE)
    monkeypatch.setattr(mmap, "mmap", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOMEM, "no memory")))
    with memory.in_huge_pages():
        assert len(memory.empty(100)) == 100


@pytest.mark.skipif(linear.unsupported_reason() is not None, reason="nothing is packed here")
@pytest.mark.parametrize("wanted", [True, False])
def test_an_engines_packed_weights_lie_there_if_wanted(monkeypatch, wanted):
    moved = []
    monkeypatch.setattr(memory, "page_size", lambda: PAGE)
    monkeypatch.setattr(Arena, "move", lambda arena: moved.append(sum(chunk.used for chunk in arena._chunks)))
    with LLM("dummy:tiny", dtype="bfloat16", quantization="int8", overrides={"model.huge_pages": wanted}):
        pass
    assert len(moved) == wanted and all(used > 10_000 for used in moved)


def test_the_thread_keeps_no_process_alive():
    arena = Arena(PAGE)
    arena.take(2 * PAGE)[:] = 1
    thread = arena.move()
    assert thread.daemon
    thread.join()
