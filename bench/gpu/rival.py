"""One engine of bench/gpu/rivals.py: a job on standard input, {"seconds": [...]} as the last line of standard output.

Each engine is called as nano-vllm's benchmark calls it: temperature 0.6, ends of text ignored, token ids in.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (0, 1, 2)]

Generate = Callable[[list[list[int]], list[int]], int]  # prompts, tokens that each asks for -> tokens that came out
TEMPERATURE = 0.6
WARM = 8, 32  # requests, and how many tokens they ask for at most


def minivllm(job: dict[str, Any]) -> Generate:
    import torch
    from serving import Requests, make_llm, run

    requests = Requests(job["prompts"], job["num_tokens"])
    llm = make_llm(job["folder"], torch.device(job["device"]), [requests], job["overrides"])
    return lambda prompts, nums: sum(map(len, run(llm, Requests(prompts, nums), TEMPERATURE)[1]))


def transformers(job: dict[str, Any]) -> Generate:
    """One static batch, padded on the left, until its longest request has ended."""
    import torch
    from transformers import AutoModelForCausalLM

    model = (
        AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.bfloat16, trust_remote_code=False)
        .to(job["device"])
        .eval()
    )
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(prompts: list[list[int]], nums: list[int]) -> int:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=job["device"])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=job["device"])
        drawn = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0}
        out = model.generate(ids, attention_mask=mask, max_new_tokens=max(nums), pad_token_id=0, **drawn)
        rows = out[:, longest:].tolist()  # waits for the device
        return sum(len(row[:n]) for row, n in zip(rows, nums, strict=True))

    return generate


def vllm(job: dict[str, Any]) -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(job["folder"], dtype="bfloat16", max_model_len=job["longest"] + 1, enable_prefix_caching=False)

    def generate(prompts: list[list[int]], nums: list[int]) -> int:
        params = [SamplingParams(temperature=TEMPERATURE, max_tokens=n, ignore_eos=True) for n in nums]
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        return sum(len(o.outputs[0].token_ids) for o in llm.generate(asked, params, use_tqdm=False))

    return generate


def nano_vllm(job: dict[str, Any]) -> Generate:
    from nanovllm import LLM, SamplingParams

    llm = LLM(job["folder"], enforce_eager=False, max_model_len=job["longest"] + 1)

    def generate(prompts: list[list[int]], nums: list[int]) -> int:
        params = [SamplingParams(temperature=TEMPERATURE, max_tokens=n, ignore_eos=True) for n in nums]
        return sum(len(o["token_ids"]) for o in llm.generate(prompts, params, use_tqdm=False))

    return generate


ENGINES = {"minivllm": minivllm, "transformers": transformers, "vllm": vllm, "nano-vllm": nano_vllm}


def main() -> None:
    job = json.loads(sys.stdin.read())
    generate = ENGINES[job["engine"]](job)
    prompts, nums = job["prompts"], job["num_tokens"]
    count, most = WARM
    generate(prompts[:count], [min(n, most) for n in nums[:count]])
    begin = time.perf_counter()
    num_tokens = generate(prompts, nums)
    seconds = time.perf_counter() - begin
    assert num_tokens == sum(nums), f"{num_tokens} tokens came, {sum(nums)} were asked for"
    print(json.dumps({"seconds": [seconds]}))


if __name__ == "__main__":  # the processes of an engine may import this file again
    main()
