"""What does keeping weights in 4 and 8 bits change in what a model says?

The same text goes through each form of a model, and is compared position by position. The reference, in float32,
answers some chat prompts greedily. Every form is then given those texts whole, so that a difference counts once and
does not spread: `top1` is the share of the answers' positions whose likeliest token is another one than the
reference's, `logprob_rms` the root mean square difference of the text's own log-probabilities.

    python -m bench quality
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from common import emit, note, parser
from spec_decode import COPYING, FREE

from minivllm import LLM, SamplingParams
from minivllm.config import DEFAULT_MODEL

REFERENCE = {"model.dtype": "float32", "model.quantization": "none"}
BF16 = {"model.dtype": "bfloat16"}
FORMS = {
    "auto": {},  # as the engine starts on this machine
    "bf16": {**BF16, "model.quantization": "none"},
    "kept": {**BF16, "model.dense_copy": False},  # the checkpoint's own codes, where it has some
    "kept8": {**BF16, "model.dense_copy": False, "quantization.activation_bits": 8},  # and its inputs in 8 bits
    "int8": {**BF16, "model.quantization": "int8", "model.dense_copy": False},
    "int4": {**BF16, "model.quantization": "int4", "model.dense_copy": False},
}


def texts(llm: LLM, num_tokens: int) -> tuple[list[list[int]], list[int]]:
    """Prompts with their answers, and where the answers begin."""
    chats = [[{"role": "user", "content": said}] for said, _ in (*COPYING.values(), *FREE.values())]
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=num_tokens), use_tqdm=False)
    whole = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    return whole, [len(output.prompt_token_ids) for output in outputs]


def read(llm: LLM, whole: list[list[int]], starts: list[int]) -> tuple[np.ndarray, np.ndarray]:
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
    args.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    args = args.parse_args()
    with LLM(args.model, overrides={**REFERENCE, "kv.memory": "512MB"}) as llm:
        whole, starts = texts(llm, args.num_tokens)
        likeliest, own = read(llm, whole, starts)
    emit(
        "quality",
        vars_of(args),
        [compare(name, args.model, whole, starts, likeliest, own) for name in args.forms],
        args.out,
    )


def compare(
    name: str, model: str, whole: list[list[int]], starts: list[int], likeliest: np.ndarray, own: np.ndarray
) -> dict[str, Any]:
    with LLM(model, overrides={**FORMS[name], "kv.memory": "512MB"}) as llm:
        got, logprobs = read(llm, whole, starts)
        kept = next(d.value for d in llm.decisions if d.field == "model.quantization")
    row = {
        "form": name,
        "quantization": kept,
        "positions": len(own),
        "top1_percent": round(100 * float((got != likeliest).mean()), 2),
        "logprob_rms": round(float(np.sqrt(((logprobs - own) ** 2).mean())), 4),
    }
    note(f"{name:5} ({kept}): {row['top1_percent']:.2f} % of the likeliest tokens differ, rms {row['logprob_rms']}")
    return row


def vars_of(args: argparse.Namespace) -> dict[str, Any]:
    return {"model": args.model, "num_tokens": args.num_tokens, "reference": REFERENCE}


if __name__ == "__main__":
    main()
