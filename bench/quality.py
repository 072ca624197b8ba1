"""What does keeping weights in 4 and 8 bits change in what a model says?

The same text goes through each form of a model, and is compared position by position. The reference, in float32,
answers some chat prompts greedily. Every form is then given those texts whole, so that a difference counts once and
does not spread: `top1` is the share of the answers' positions whose likeliest token is another one than the
reference's, `logprob_rms` the root mean square difference of the text's own log-probabilities.

llama.cpp, on the same file, is one more form, where `make peers` has installed it.

    python -m bench quality
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, emit, note, parser
from spec_decode import COPYING, FREE

from minivllm import LLM, SamplingParams
from minivllm.config import DEFAULT_MODEL
from minivllm.errors import ModelError
from minivllm.machine import num_cores

sys.path.insert(0, str(ROOT))  # bench.peers is a package of the project's root

from bench.peers.engines import LeftOut, Running, known_engines, python_of
from bench.peers.install import FOLDER, NotInstalled, gguf_file

REFERENCE = {"model.dtype": "float32", "model.quantization": "none"}
BF16 = {"model.dtype": "bfloat16"}
FORMS = {
    "auto": {},  # as the engine starts on this machine
    "bf16": {**BF16, "model.quantization": "none"},
    "kept": {**BF16, "model.dense_copy": False},  # the checkpoint's own codes, where it has some
    "kept8": {**BF16, "model.dense_copy": False, "quantization.activation_bits": 8},  # and its inputs in 8 bits
    "single8": {"model.dtype": "float32", "quantization.activation_bits": 8},  # the same, all else in fp32
    "int8": {**BF16, "model.quantization": "int8", "model.dense_copy": False},
    "int4": {**BF16, "model.quantization": "int4", "model.dense_copy": False},
}
Read = tuple[np.ndarray, np.ndarray]  # int64, float64 [positions]: the likeliest token, the own one's log-probability
LLAMA_CPP = "llama.cpp"  # rounds inputs to 8 bits


def texts(llm: LLM, num_tokens: int) -> tuple[list[list[int]], list[int]]:
    """Prompts with their answers, and where the answers begin."""
    chats = [[{"role": "user", "content": said}] for said, _ in (*COPYING.values(), *FREE.values())]
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=num_tokens), use_tqdm=False)
    whole = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    return whole, [len(output.prompt_token_ids) for output in outputs]


def read(llm: LLM, whole: list[list[int]], starts: list[int]) -> Read:
    """Of all answers' positions: the likeliest token, and the log-probability of the one that is there."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    likeliest, own = [], []
    for tokens, start, output in zip(whole, starts, llm.generate(whole, params, use_tqdm=False), strict=True):
        for token, found in zip(tokens[start:], output.prompt_logprobs[start:], strict=True):
            likeliest.append(max(found, key=lambda t: found[t].logprob))
            own.append(found[token].logprob)
    return np.array(likeliest), np.array(own)


def main() -> None:
    args = parser(__doc__.splitlines()[0], "quality")
    args.add_argument("--model", default=DEFAULT_MODEL)
    args.add_argument("--num-tokens", type=int, default=200, help="of an answer, at most")
    args.add_argument("--forms", nargs="+", default=[*FORMS, LLAMA_CPP], choices=[*FORMS, LLAMA_CPP])
    args.add_argument("--peers", type=Path, default=FOLDER, help="the folder that `make peers` filled")
    args = args.parse_args()
    with LLM(args.model, overrides={**REFERENCE, "kv.memory": "512MB"}) as llm:
        whole, starts = texts(llm, args.num_tokens)
        reference = read(llm, whole, starts)
    rows = []
    for name in args.forms:
        try:
            kept, found = (read_peer if name == LLAMA_CPP else read_form)(name, args, whole, starts)
        except LeftOut as e:
            note(f"{name}: left out: {e}")
            continue
        rows.append(compare(name, kept, found, reference))
    emit("quality", {"model": args.model, "num_tokens": args.num_tokens, "reference": REFERENCE}, rows, args.out)


def read_form(name: str, args: argparse.Namespace, whole: list[list[int]], starts: list[int]) -> tuple[str, Read]:
    with LLM(args.model, overrides={**FORMS[name], "kv.memory": "512MB"}) as llm:
        kept = next(d.value for d in llm.decisions if d.field == "model.quantization")
        return kept, read(llm, whole, starts)


def read_peer(name: str, args: argparse.Namespace, whole: list[list[int]], starts: list[int]) -> tuple[str, Read]:
    """Raises LeftOut."""
    engine = replace(known_engines(num_cores())[name], options={"logits_all": True})
    try:
        file = gguf_file(args.model)
    except (ModelError, NotInstalled, StopIteration) as e:
        raise LeftOut(f"no model file for it: {e}") from e
    job = {"model": str(file), "threads": num_cores(), "max_len": max(map(len, whole))}
    log = (args.peers / "logs" / f"quality-{name}.log").resolve()
    with closing(Running(engine, python_of(engine, args.peers), job, log)) as running:
        found = running.ask({"do": "score", "texts": whole, "starts": starts})
    return "kept", (np.array(found["likeliest"]), np.array(found["logprobs"]))


def compare(name: str, kept: str, found: Read, reference: Read) -> dict[str, Any]:
    (got, logprobs), (likeliest, own) = found, reference
    row = {
        "form": name,
        "quantization": kept,
        "positions": len(own),
        "top1_percent": round(100 * float((got != likeliest).mean()), 2),
        "logprob_rms": round(float(np.sqrt(((logprobs - own) ** 2).mean())), 4),
    }
    note(f"{name:5} ({kept}): {row['top1_percent']:.2f} % of the likeliest tokens differ, rms {row['logprob_rms']}")
    return row


if __name__ == "__main__":
    main()
