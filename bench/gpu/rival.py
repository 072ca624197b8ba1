"""One engine of bench/gpu/rivals.py: a job on standard input, {"seconds": [...]} as the last line of standard output.

Each engine is called as its users would: greedy, ends of text ignored, token ids in.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (0, 1, 2)]

Generate = Callable[[], int]  # -> tokens that came out


def minivllm(job: dict[str, Any]) -> Generate:
    import torch
    from serving import Requests, make_llm, run

    requests = Requests(job["prompts"], job["num_tokens"])
    llm = make_llm(job["folder"], torch.device(job["device"]), requests, job["overrides"])
    return lambda: sum(map(len, run(llm, requests)[1]))


def transformers(job: dict[str, Any]) -> Generate:
    """One static batch, padded on the left, until its longest request has ended."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.bfloat16).to(job["device"]).eval()
    model.generation_config.eos_token_id = None
    longest = max(map(len, job["prompts"]))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in job["prompts"]], device=job["device"])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in job["prompts"]], device=job["device"])

    @torch.inference_mode()
    def generate() -> int:
        most = max(job["num_tokens"])
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=most, pad_token_id=0)
        rows = out[:, longest:].tolist()  # waits for the device
        return sum(len(row[:n]) for row, n in zip(rows, job["num_tokens"], strict=True))

    return generate


def vllm(job: dict[str, Any]) -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(job["folder"], dtype="bfloat16", max_model_len=job["longest"] + 1, enable_prefix_caching=False)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in job["num_tokens"]]
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    return lambda: sum(len(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False))


def nano_vllm(job: dict[str, Any]) -> Generate:
    from nanovllm import LLM, SamplingParams

    llm = LLM(job["folder"], enforce_eager=False, max_model_len=job["longest"] + 1)
    params = [SamplingParams(temperature=0.6, max_tokens=n, ignore_eos=True) for n in job["num_tokens"]]
    return lambda: sum(len(o["token_ids"]) for o in llm.generate(job["prompts"], params, use_tqdm=False))


ENGINES = {"minivllm": minivllm, "transformers": transformers, "vllm": vllm, "nano-vllm": nano_vllm}


def main() -> None:
    job = json.loads(sys.stdin.read())
    generate = ENGINES[job["engine"]](job)
    seconds = []
    for _ in range(job["rounds"] + 1):
        begin = time.perf_counter()
        num_tokens = generate()
        seconds.append(time.perf_counter() - begin)
        wanted = sum(job["num_tokens"])
        assert num_tokens == wanted, f"{num_tokens} tokens came, {wanted} were asked for"
    print(json.dumps({"seconds": seconds[1:]}))  # the first one warmed up


if __name__ == "__main__":  # the processes of an engine may import this file again
    main()
