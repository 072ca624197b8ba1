"""vLLM's CPU build as a runner, as its users start it: the engine core in a process of its own."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from peer_runner import Tokens, serve


class VLLM:
    unable: dict[str, str] = {}

    @staticmethod
    def imports() -> None:
        from vllm import LLM, SamplingParams  # noqa: F401 - vllm imports its parts when they are asked for

    def __init__(self, job: dict[str, Any]):
        from vllm import LLM

        self.llm = LLM(job["model"], dtype="bfloat16", max_model_len=job["max_len"], **job["options"])
        self.compile_seconds = compile_seconds()
        chosen = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE")
        self.settings = {name: os.environ.get(name, "") for name in chosen}

    def generate(self, prompts: Tokens, num_tokens: list[int]) -> Tokens:
        from vllm import SamplingParams

        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in num_tokens]
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def compile_seconds() -> float:
    """What vLLM's log says of torch.compile: the log is this process's standard error, a file."""
    with contextlib.suppress(OSError):
        found = re.findall(
            r"torch\.compile (?:takes|took|and .*? took) ([\d.]+) s", Path("/proc/self/fd/2").read_text()
        )
        return float(found[-1]) if found else 0.0
    return 0.0


if __name__ == "__main__":  # its processes are spawned: they import this file again
    serve(VLLM)
