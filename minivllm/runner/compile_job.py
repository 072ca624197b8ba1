"""Building a model's pieces in a process of its own, and waiting for it.

The engine's process never compiles: it keeps its memory, its threads and its step loop, and a crash of the compiler is
a message. It sends the model without its weights; the builder fills the cache; the engine loads from there. A builder
ends with its engine: its standard input closes, which also a kill of the engine does.

    python -m minivllm.runner.compile_job SCRATCH < job
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from minivllm import child
from minivllm.compile.forms import FORMS, Form
from minivllm.compile.store import Store, environment, program_key
from minivllm.compile.trace import skeleton
from minivllm.loading.cache import Cache
from minivllm.machine import full_disk

logger = logging.getLogger("minivllm")


# What a builder takes of a GPU while it is at work: a CUDA context (about 0.5 GB on a large card) and the kernels that
# Triton loads as it compiles them. Of tensors it makes only the tiny ones of Inductor's patterns: the model is traced
# without data, and nothing is timed. An estimate, as no card has run it; a builder that finds no room fails, not the
# engine.
GPU_BYTES = 1 << 30

# A builder says when a piece is done, which takes seconds or, beside an engine that leaves it little time, minutes.
SILENT_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Job:
    skeleton: bytes  # trace.skeleton(model)
    key: str  # of the program
    form: str  # of its pieces
    environment: str  # store.environment(): the engine's, so that both name a piece alike
    cache: Path
    num_threads: int
    nice: int  # 19: an engine is serving meanwhile


def job_for(model: nn.Module, form: Form, device: torch.device, cache: Path, num_threads: int, nice: int) -> Job:
    """Raises what pickle raises if the model's modules cannot be sent."""
    known = environment(form, device, num_threads)
    return Job(skeleton(model), program_key(model, known), form.name, known, cache, num_threads, nice)


def gpu_bytes_beside(compile: str, device: torch.device) -> int:
    """What a KV pool must leave free for a builder that works while requests are served. The others have ended, or
    never begin, before the pool is made."""
    return GPU_BYTES if compile == "background" and device.type == "cuda" else 0


class Build:
    """A builder at work."""

    def __init__(self, job: Job):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this object
        self._hangs = False
        scratch = child.make_folder()
        self._process = child.start("minivllm.runner.compile_job", scratch, stdout=subprocess.PIPE, stderr=self._errors)
        child.claimed(scratch)
        self.cancel = weakref.finalize(self, _end, self._process, scratch)
        with contextlib.suppress(BrokenPipeError):  # it has died: wait() says why
            child.send_bytes(self._process, pickle.dumps(job))

    def wait(self) -> str | None:
        """None once all is in the cache; or why it is not. Reports its progress to the log, and ends a builder that
        makes none."""
        silence = self._count_silence()
        for line in self._process.stdout:
            silence.cancel()
            logger.info("compile: %s", line.decode(errors="replace").strip())
            silence = self._count_silence()
        code = self._process.wait()
        silence.cancel()
        if code == 0:
            return None
        if self._hangs:
            return f"the builder has said nothing for {SILENT_SECONDS:g} s, and was ended"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        logger.debug("compile: %s", "\n".join(lines))
        why = full_disk("\n".join(lines)) or (lines[-1] if lines else "no message")
        return f"the builder ended with exit code {code}: {why}"

    def _count_silence(self) -> threading.Timer:
        silence = threading.Timer(SILENT_SECONDS, self._give_up)
        silence.daemon = True
        silence.start()
        return silence

    def _give_up(self) -> None:
        self._hangs = True
        self._process.kill()


def _end(process: subprocess.Popen, scratch: str) -> None:
    if process.poll() is None:
        process.terminate()
    process.wait()
    child.remove_folder(scratch)


def main(scratch: str) -> None:
    job: Job = pickle.loads(child.read_bytes([scratch]))
    child.end_with_parent([scratch])
    os.nice(job.nice)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = scratch  # read when Inductor is imported: nothing stays behind
    os.environ.pop("TRITON_CACHE_DIR", None)  # so that Triton's is in it
    try:
        build(job)
    finally:
        child.remove_folder(scratch)


def build(job: Job) -> None:
    """Trace, split, compile what the cache lacks; the program is written last."""
    begin = time.perf_counter()
    from minivllm.compile.split import split
    from minivllm.compile.trace import trace

    form = FORMS[job.form]
    store = Store(Cache(job.cache), form)
    traced = trace(job.skeleton)
    program, pieces = split(traced, job.environment)
    num_calls = sum(call.kind == "piece" for call in program.calls)
    report(f"traced in {time.perf_counter() - begin:.1f} s: {num_calls} pieces, {len(pieces)} different")
    from minivllm.compile.inductor import prepare

    prepare()
    for i, (digest, piece) in enumerate(pieces.items(), 1):
        begin = time.perf_counter()
        built = store.ensure_piece(
            digest, lambda folder, piece=piece: form.build(piece, traced.fake_mode, folder, job.num_threads)
        )
        seconds = time.perf_counter() - begin
        report(f"piece {i} of {len(pieces)} {f'compiled in {seconds:.1f} s' if built else 'found in the cache'}")
    store.ensure_program(job.key, program)


def report(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
