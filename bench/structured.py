"""What does structured output cost: the mask of a step, and compiling a specification, cold and cached?

Rows follow JSON texts token by token, each at a place of its own, as requests that are being served do. A step's mask
is filled for all rows (the grammars' part) and applied to the logits (the sampler's part); both are timed, beside the
argmax over the same logits. Cold: the backend has never seen the specification. Cached: what the worker, and any later
request, pays.

    python -m bench structured --num-rows 64 --backends xgrammar llguidance dfa
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from common import emit, note, parser, spread

from minivllm.config import DEFAULT_MODEL
from minivllm.engine.tokenizer import TextTokenizer
from minivllm.engine.vocabulary import make_vocabulary
from minivllm.features import GRAMMARS
from minivllm.loading import resolve
from minivllm.request import SamplingParams
from minivllm.sampling.grammar_mask import GrammarMask, choose_apply
from minivllm.sampling.sampler import argmax
from minivllm.structured.compiler import GrammarCompiler, is_installed
from minivllm.structured.params import StructuredParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "lat": {"type": "number"}, "lon": {"type": "number"}},
            "required": ["city", "lat", "lon"],
        },
        "kind": {"enum": ["person", "company", "other"]},
    },
    "required": ["name", "age", "tags", "place", "kind"],
}
WORDS = ["the", "sea", "is", "a", "place", "of", "endless", "wonder", "full", "of", "secrets", "and", "mysteries"]
SPECIFICATIONS = {
    "schema": StructuredParams(json=SCHEMA),
    "json_object": StructuredParams(json_object=True),
    "regex": StructuredParams(regex=r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{1,6})?(Z|[+-]\d{2}:\d{2})"),
    "choice": StructuredParams(choice=["positive", "negative", "neutral"]),
    "grammar": StructuredParams(grammar='root ::= e\ne ::= t ("+" t)*\nt ::= [0-9]+ | "(" e ")"\n'),
}


def text(rng: random.Random) -> str:
    """An instance of SCHEMA, as a model would write it."""

    def some(low: int, high: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))

    place = {"city": some(1, 2), "lat": round(rng.uniform(-90, 90), 4), "lon": round(rng.uniform(-180, 180), 4)}
    value = {"name": some(1, 8), "age": rng.randint(1, 99), "tags": [some(1, 3) for _ in range(rng.randint(1, 4))]}
    return json.dumps({**value, "place": place, "kind": rng.choice(["person", "company", "other"])})


def measure_masks(compiler: GrammarCompiler, encode: Callable, vocab_size: int, num_rows: int, num_steps: int) -> dict:
    """Milliseconds of each step."""
    step, rng = GrammarMask(compiler, vocab_size, choose_apply(torch.device("cpu"))), random.Random(0)
    params = SamplingParams(structured=SPECIFICATIONS["schema"])
    todo: dict[int, list[int]] = {}
    rows = np.arange(num_rows)

    def begin(row: int) -> None:
        step.leave(row)
        tokens = encode(text(rng))
        start = rng.randrange(len(tokens)) if row not in todo else 0
        step.join(row, params, [0, *tokens[:start]], 1)
        todo[row] = tokens[start:]

    for row in range(num_rows):
        begin(row)
    logits = torch.randn(num_rows, vocab_size)
    work = logits.clone()
    times: dict[str, list[float]] = {"fill": [], "apply": [], "mask": [], "observe": [], "argmax": []}
    for _ in range(num_steps):
        work.copy_(logits)  # not a fresh clone: the first touch of new memory is no part of a mask
        t0 = time.perf_counter()
        users, masks = step.fill(rows)
        t1 = time.perf_counter()
        step.apply_masks(work, users, masks)
        t2 = time.perf_counter()
        tokens = [todo[row].pop(0) for row in range(num_rows)]
        assert all(work[row, token] > float("-inf") for row, token in enumerate(tokens)), "a text is not admitted"
        t3 = time.perf_counter()
        for row, token in enumerate(tokens):
            step.observe(row, token)
        t4 = time.perf_counter()
        argmax(work)
        t5 = time.perf_counter()
        for name, seconds in zip(times, (t1 - t0, t2 - t1, t2 - t0, t4 - t3, t5 - t4), strict=True):
            times[name].append(1e3 * seconds)
        for row in range(num_rows):
            if not todo[row]:
                begin(row)
    return {f"{k}_ms": {"median": med(v), "p99": round(float(np.percentile(v, 99)), 4)} for k, v in times.items()}


def med(values: list[float]) -> float:
    return round(float(np.median(values)), 4)


def measure_compiling(make: Callable[[], GrammarCompiler], num_runs: int) -> dict:
    """Milliseconds. Cold does not hold what happens once a process: importing the library, reading the vocabulary."""
    found = {}
    warm = make()
    for name, params in SPECIFICATIONS.items():
        try:
            warm.compile(params)
        except Exception as e:
            found[name] = {"refused": str(e)[:120]}
            continue
        cold, cached = [], []
        for _ in range(num_runs):
            compiler = make()
            compiler.compile(StructuredParams(choice=["warm"]))
            begin = time.perf_counter()
            compiler.compile(params)
            cold.append(1e3 * (time.perf_counter() - begin))
            begin = time.perf_counter()
            compiler.compile(params)
            cached.append(1e3 * (time.perf_counter() - begin))
        found[name] = {"cold_ms": spread(cold), "cached_ms": spread(cached, 5)}
    return found


def main() -> None:
    args = parser(__doc__.splitlines()[0], Path(__file__).stem)
    args.add_argument("--num-rows", type=int, nargs="+", default=[1, 64], help="requests in a step")
    args.add_argument("--num-steps", type=int, default=300, help="steps measured")
    args.add_argument("--num-runs", type=int, default=7, help="compilations measured")
    args.add_argument("--backends", nargs="+", default=list(GRAMMARS.names()), help="of structured.backend")
    args = args.parse_args()
    files = resolve(DEFAULT_MODEL)
    tokenizer, vocab_size = TextTokenizer.load(files.tokenizer_dir), files.spec.vocab_size
    vocabulary = make_vocabulary(tokenizer, vocab_size)
    vocabulary.trie  # noqa: B018, made once a process
    results = []
    for name in args.backends:
        if not is_installed(GRAMMARS.get(name)):
            note(f"{name} is not installed")
            continue

        def make(name: str = name) -> GrammarCompiler:
            return GrammarCompiler(lambda: vocabulary, [(name, GRAMMARS.get(name))])

        row = {"backend": name, "compile": measure_compiling(make, args.num_runs), "masks": []}
        compiler = make()
        for num_rows in args.num_rows:
            encode = lambda t: tokenizer.encode(t, add_special_tokens=False)  # noqa: E731
            times = measure_masks(compiler, encode, vocab_size, num_rows, args.num_steps)
            row["masks"].append({"num_rows": num_rows, **times})
            note(f"{name:10} {num_rows:4} rows: " + ", ".join(f"{k} {v['median']:.3f}" for k, v in times.items()))
        for spec, times in row["compile"].items():
            shown = (
                times.get("refused")
                or f"{times['cold_ms']['median']:.2f} ms, {times['cached_ms']['median']:.4f} cached"
            )
            note(f"{name:10} {spec:12} {shown}")
        results.append(row)
    emit("structured", {"num_steps": args.num_steps, "vocab_size": vocab_size}, results, args.out)


if __name__ == "__main__":
    main()
