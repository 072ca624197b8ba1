"""The engines that take part, and one of them running: its process, what it may see, the memory it took.

An engine that waits for its turn is stopped (SIGSTOP): no thread of it can spin on a core that another is timed on.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
MINUTES = 10  # the longest answer that is waited for


class LeftOut(Exception):
    """An engine cannot take part, or not any more: the reason."""


@dataclass(frozen=True)
class Engine:
    """How to start one engine. Those with one `family` are settings of it: each workload counts the best of them."""

    name: str
    family: str
    runner: str  # a file of this folder
    files: str  # which model it loads: ours, folder or gguf
    what: str  # for the table
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()  # variables of the environment that it must not inherit


def known_engines(threads: int) -> dict[str, Engine]:
    """By name, in the order of the table; those of compare.LATENT only by asking for them."""
    one, many = {"VLLM_CPU_KVCACHE_SPACE": "4"}, {"OMP_NUM_THREADS": str(threads)}
    bf16, wait = {"dtype": "bfloat16", "quantization": "none"}, {"compile": "wait"}
    touched = {
        "overrides": {"kv.prefault": True}
    }  # as vLLM does: otherwise every run pays for pages that are new to it
    eight_bits = {"overrides": {"quantization.activation_bits": 8}}  # as llama.cpp does
    ours = "run_minivllm.py"
    found = [
        Engine("minivllm", "minivllm", ours, "ours", "as it starts by default", env=many),
        Engine("minivllm-8bit", "minivllm-8bit", ours, "ours", "inputs in 8 bits", eight_bits, many),
        Engine("minivllm-bf16", "minivllm-bf16", ours, "ours", "--quantization none", bf16, many),
        Engine("minivllm-prefault", "minivllm", ours, "ours", "KV pool touched at start", touched, many),
        Engine("minivllm-bf16-prefault", "minivllm-bf16", ours, "ours", "both", bf16 | touched, many),
        Engine("minivllm-compiled", "minivllm-compiled", ours, "ours", "bf16, --compile wait", bf16 | wait, many),
        Engine(
            "vllm-unbound",
            "vllm",
            "run_vllm.py",
            "folder",
            f"bf16, {threads} threads unbound",
            env=one | many | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        ),
        Engine(
            "vllm-bound",
            "vllm",
            "run_vllm.py",
            "folder",
            "bf16, as it binds its threads itself",
            env=one,
            without=("OMP_NUM_THREADS",),
        ),
        Engine("llama.cpp", "llama.cpp", "run_llama_cpp.py", "gguf", "the file, one sequence at a time", env=many),
        Engine(
            "transformers", "transformers", "run_transformers.py", "folder", "generate, static batch, bf16", env=many
        ),
    ]
    return {engine.name: engine for engine in found}


def environment(engine: Engine) -> dict[str, str]:
    """Ours less what would change an engine's own choices, and less what only a shell of this project sets. Bytecode is
    kept: what pip installed has it already, and a package that is run in place would compile itself at every start."""
    dropped = ("OMP_", "GOMP_", "KMP_", "MKL_", "VLLM_", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    env |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"} | engine.env
    if engine.files == "ours":
        env["PYTHONPATH"] = str(ROOT)
    return {name: value for name, value in env.items() if name not in engine.without}


class Running:
    """An engine in a process of its own, loaded. Raises LeftOut if it cannot."""

    def __init__(self, engine: Engine, python: str, job: dict[str, Any], log: Path):
        self.engine = engine
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with open(log, "w") as errors:
            started = time.time()
            self.process = subprocess.Popen(
                [python, str(HERE / engine.runner)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=log.parent,  # nothing of this project is importable by chance
                env=environment(engine),
                text=True,
            )
        self._lines = selectors.DefaultSelector()
        self._lines.register(self.process.stdout, selectors.EVENT_READ)
        try:
            answer = self.ask({"do": "load", "started": started, "options": engine.options, **job})
        except BaseException:
            self.close()
            raise
        self.parts: dict[str, float] = answer["parts"]
        self.settings: dict[str, str] = answer["settings"]
        self.unable: dict[str, str] = answer["unable"]

    def ask(self, job: dict[str, Any], seconds: float = MINUTES * 60) -> dict[str, Any]:
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise LeftOut(f"it ended with exit code {self.process.wait()}: {self._last_words()}") from None
        if not self._lines.select(seconds):
            raise LeftOut(f"no answer in {seconds:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise LeftOut(f"it ended with exit code {self.process.wait()}: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise LeftOut(answer["error"])
        return answer

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else "it said nothing"

    def processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        return []

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def close(self) -> None:
        """End it and all that it started."""
        self.resume()
        processes = self.processes()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.stdout.close()
        self._lines.close()

    # --- memory

    def forget_peak(self) -> None:
        """From here on `peak_mib` counts anew. Linux alone keeps a high-water mark that can be set back."""
        for process in self.processes():
            with contextlib.suppress(OSError):
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")

    def peak_mib(self) -> int | None:
        """The most memory that was resident since forget_peak, all processes of the engine together: the sum of their
        high-water marks, with pages of files and shared memory counted for the largest process only. None: not Linux.
        """
        found = [_memory(process.pid) for process in self.processes()]
        found = [memory for memory in found if memory is not None]
        if not found:
            return None
        largest = max(found, key=lambda memory: memory["VmHWM"])
        own = [m["VmHWM"] - m["RssFile"] - m["RssShmem"] for m in found if m is not largest]
        return round((largest["VmHWM"] + sum(own)) / 1024)


def _memory(pid: int) -> dict[str, int] | None:
    """KiB by name."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    found = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest}
    return found if "VmHWM" in found else None


def python_of(engine: Engine, folder: Path) -> str:
    """The interpreter of its environment. Raises LeftOut if it has none that is ready."""
    from bench.peers.install import why_not

    if engine.files == "ours":
        return sys.executable
    if reason := why_not(engine.family, folder):
        raise LeftOut(reason)
    return str((folder / engine.family / "bin" / "python").absolute())
