"""llama.cpp through llama-cpp-python as a runner: one sequence at a time, which is what that package's class offers."""

from __future__ import annotations

from itertools import islice
from typing import Any

from peer_runner import Tokens, serve


class LlamaCpp:
    compile_seconds = 0.0
    unable = {"batch": "llama-cpp-python runs one sequence at a time"}

    @staticmethod
    def imports() -> None:
        import llama_cpp  # noqa: F401

    def __init__(self, job: dict[str, Any]):
        from llama_cpp import Llama, llama_print_system_info

        threads = job["threads"]
        self.llm = Llama(
            job["model"],
            n_ctx=job["max_len"],
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
            **job["options"],
        )
        self.settings = {"system": llama_print_system_info().decode()}

    def generate(self, prompts: Tokens, num_tokens: list[int]) -> Tokens:
        return [self._one(ids, n) for ids, n in zip(prompts, num_tokens, strict=True)]

    def _one(self, ids: list[int], num_tokens: int) -> list[int]:
        self.llm.reset()  # no prefix of the prompt before is kept
        return list(islice(self.llm.generate(ids, temp=0.0, repeat_penalty=1.0, reset=True), num_tokens))

    def score(self, texts: Tokens, starts: list[int]) -> tuple[list[int], list[float]]:
        """Loaded with the option logits_all."""
        import numpy as np

        likeliest, logprobs = [], []
        for ids, start in zip(texts, starts, strict=True):
            self.llm.reset()
            self.llm.eval(ids)
            logits = self.llm.scores[start - 1 : len(ids) - 1].astype(np.float64)
            sums = np.logaddexp.reduce(logits, axis=1)
            likeliest += logits.argmax(axis=1).tolist()
            logprobs += (logits[np.arange(len(logits)), ids[start:]] - sums).tolist()
        return likeliest, logprobs


if __name__ == "__main__":
    serve(LlamaCpp)
