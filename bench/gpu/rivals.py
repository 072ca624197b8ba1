"""Part `peers` of bench/gpu/run.py: nano-vllm's requests on this engine and on those that are installed beside it.

Each runs in a process of its own over the same files (random weights, written once), one after the other and the whole
row twice, so that no engine has the card's coolest minute alone: once each time, after a few requests to warm up. What
is not installed is said to be, not left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from card import NOT_MEASURED
from case import NO_TIME, Rows
from common import note, spread
from serving import OVERRIDES, Requests, nano_requests

from minivllm.loading.dummy import hf_config, write_tokenizer
from minivllm.loading.dummy_weights import fill
from minivllm.models import MODELS, read_spec

PACKAGES = {"minivllm": "minivllm", "transformers": "transformers", "vllm": "vllm", "nano-vllm": "nanovllm"}
PASSES = 2


def peers(args: Namespace, device: torch.device, rows: Rows) -> None:
    tiny = device.type == "cpu"
    requests = nano_requests(4, 3, 12, 500) if tiny else nano_requests()
    found: dict[str, list[float]] = {}
    failed = {name: "not installed" for name, package in PACKAGES.items() if find_spec(package) is None}
    with tempfile.TemporaryDirectory() as folder:
        export("tiny" if tiny else "qwen3-0.6b", Path(folder), device)
        for pass_ in range(PASSES):
            for name in PACKAGES:
                if name in failed or rows.left <= 0:
                    continue
                note(f"pass {pass_ + 1} of {PASSES}: {name}")
                answer = _ask(name, folder, device, requests, args, rows.left)
                if "error" in answer:
                    failed[name] = answer["error"]
                found.setdefault(name, []).extend(answer.get("seconds", []))
    for name in PACKAGES:
        rows.add(_row(name, found.get(name, []), failed.get(name), requests, tiny))


def _row(name: str, seconds: list[float], failure: str | None, requests: Requests, tiny: bool) -> dict[str, Any]:
    if failure is not None or tiny or not seconds:
        why = failure or ("a CPU stands in for the card" if seconds else NO_TIME)
        return {"engine": name, "tokens_per_s": NOT_MEASURED, "why": why}
    rates = spread([sum(requests.num_tokens) / s for s in seconds], 1)
    return {"engine": name, "tokens_per_s": rates["median"], "why": "", "spread": rates}


def export(name: str, folder: Path, device: torch.device) -> None:
    """A folder as those of the Hugging Face Hub, in bfloat16."""
    from safetensors.torch import save_file

    spec = read_spec(hf_config(name), where=name)
    model = MODELS.get(spec.architecture)(spec, torch.bfloat16, device)
    fill(model, seed=0)
    tensors = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in model.checkpoint_tensors().items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    model_type = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}[spec.architecture]
    (folder / "config.json").write_text(json.dumps(hf_config(name) | {"model_type": model_type}))
    write_tokenizer(folder, spec.vocab_size)


def _ask(
    name: str, folder: str, device: torch.device, requests: Requests, args: Namespace, seconds: float
) -> dict[str, Any]:
    job = {"engine": name, "folder": folder, "device": device.type, "longest": requests.longest}
    job |= {"prompts": requests.prompts, "num_tokens": requests.num_tokens, "overrides": OVERRIDES | args.overrides}
    command = [sys.executable, str(Path(__file__).with_name("rival.py"))]
    with tempfile.TemporaryFile("w+") as said:
        try:
            pipes = {"input": json.dumps(job), "stdout": subprocess.PIPE, "stderr": said, "text": True}
            done = subprocess.run(command, **pipes, timeout=seconds, env=_env())
        except subprocess.TimeoutExpired:
            return {"error": f"no answer in the {seconds:.0f} s that were left"}
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        said.seek(0)
        lines = [line.strip() for line in said.read().splitlines() if line.strip()]
    return {"error": f"exit code {done.returncode}: {lines[-1][:200] if lines else 'it said nothing'}"}


def _env() -> dict[str, str]:
    return os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DO_NOT_TRACK": "1"}
