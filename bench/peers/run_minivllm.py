"""minivllm as a runner. options: LLM's own keyword arguments."""

from __future__ import annotations

import re
from typing import Any

from peer_runner import Tokens, serve


class MiniVLLM:
    unable: dict[str, str] = {}

    @staticmethod
    def imports() -> None:
        import torch  # noqa: F401

        import minivllm.engine.llm  # noqa: F401

    def __init__(self, job: dict[str, Any]):
        from minivllm import LLM

        options = dict(job["options"])
        overrides = {"executor.num_threads": job["threads"], **options.pop("overrides", {})}
        self.llm = LLM(job["model"], max_model_len=job["max_len"], overrides=overrides, **options)
        self.settings = {decision.field: f"{decision.value}: {decision.reason}" for decision in self.llm.decisions}
        found = re.search(r"compiled in (\d+) s", self.settings.get("runner.forward", ""))
        self.compile_seconds = float(found.group(1)) if found else 0.0

    def generate(self, prompts: Tokens, num_tokens: list[int]) -> Tokens:
        from minivllm import SamplingParams

        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in num_tokens]
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    serve(MiniVLLM)
