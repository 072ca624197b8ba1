"""transformers' generate as a runner: one static batch, padded on the left, until its longest request ends."""

from __future__ import annotations

from typing import Any

from peer_runner import Tokens, serve


class Transformers:
    compile_seconds = 0.0
    unable: dict[str, str] = {}

    @staticmethod
    def imports() -> None:
        import torch  # noqa: F401
        from transformers import AutoModelForCausalLM  # noqa: F401

    def __init__(self, job: dict[str, Any]):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(job["threads"])
        options = {"dtype": torch.bfloat16, **job["options"]}
        self.model = AutoModelForCausalLM.from_pretrained(job["model"], trust_remote_code=False, **options).eval()
        self.model.generation_config.eos_token_id = None  # ignore_eos
        self.settings = {"attention": self.model.config._attn_implementation}

    def generate(self, prompts: Tokens, num_tokens: list[int]) -> Tokens:
        import torch

        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])  # [R, T]
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=max(num_tokens), pad_token_id=0
            )
        return [row[:n] for row, n in zip(out[:, longest:].tolist(), num_tokens, strict=True)]


if __name__ == "__main__":
    serve(Transformers)
