"""Chapter 4: who picks? What the default model offers at each position of a text, and how one token is taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from chapters.ch04_choosing_a_token.solution import sample_top_p
from chapters.harness import in_time, main, milliseconds, note, with_three_digits
from chapters.lab import all_logits
from minivllm import LLM, SamplingParams
from minivllm.config import DEFAULT_MODEL
from minivllm.engine.tokenizer import TextTokenizer
from minivllm.loading import load_model
from minivllm.sampling.draw import apply_filters, draw, pad_to_blocks
from minivllm.sampling.sampler import argmax

TEXT = (
    "The capital of France is Paris. My favourite colour is blue, because it reminds me of the sea. "
    "Once upon a time there was a little girl who lived in a small"
)
PROMPT = "The lighthouse keeper opened the door and saw"
TOP_P, TOP_K, MIN_P = 0.9, 40, 0.05
TEMPERATURES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
SEEDS = (1, 2, 3, 4)
NUM_NEW, SMOKE_NEW = 16, 8
NUM_DRAWS, SMOKE_DRAWS = 6000, 2000
NUM_BINS = 8  # of the chi-square: the likeliest tokens, and all others together
ROWS = 16  # requests in a step whose sampling is timed


def entropy(probs: Tensor) -> float:
    """In bits: 0 when one token is certain, 1 for a fair coin, log2(V) when all are equally likely."""
    return float(-(probs * probs.clamp_min(1e-30).log2()).sum())


def kept_of(probs: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> dict[str, float]:
    """How many tokens the engine's filters keep of one row, and how much of the probability these have."""
    row = pad_to_blocks(probs[None].log()).exp()
    apply_filters(row, np.array([top_k]), np.array([top_p]), np.array([min_p]))
    return {"tokens": int((row > 0).sum()), "percent": round(100 * float(row.sum()), 1)}


def strip(tokenizer: TextTokenizer, token_ids: list[int], probs: Tensor) -> list[dict[str, Any]]:
    """For each position but the first: the token that stands there, and what the model offered for it."""
    rows = []
    for i, token in enumerate(token_ids[1:]):
        rows.append(
            {
                "position": i + 1,
                "text": tokenizer.decode([token]),
                "kept": kept_of(probs[i], top_p=TOP_P)["tokens"],
                "rank": int((probs[i] > probs[i, token]).sum()) + 1,
                "bits": round(entropy(probs[i]), 2),
            }
        )
    return rows


def offer(tokenizer: TextTokenizer, token_ids: list[int], logits: Tensor, position: int) -> dict[str, Any]:
    """What stands before a position, the best that was offered for it, and what each filter keeps."""
    probs = logits[position - 1].softmax(-1)
    best = probs.max(-1)
    rules = {"top_k": {"top_k": TOP_K}, "top_p": {"top_p": TOP_P}, "min_p": {"min_p": MIN_P}}
    return {
        "position": position,
        "before": tokenizer.decode(token_ids[max(0, position - 6) : position]).strip(),
        "best": repr(tokenizer.decode([int(best.indices)])),
        "best_percent": round(100 * float(best.values), 1),
        **{name: kept_of(probs, **rule) for name, rule in rules.items()},
    }


def heat(logits: Tensor) -> list[dict[str, Any]]:
    """One position at several temperatures."""
    rows = []
    for temperature in TEMPERATURES:
        probs = (logits / temperature).softmax(-1)
        kept = kept_of(probs, top_p=TOP_P)["tokens"]
        best = round(100 * float(probs.max()), 1)
        rows.append({"temperature": temperature, "best": best, "kept": kept, "bits": round(entropy(probs), 2)})
    return rows


def drawn(logits: Tensor, num_draws: int) -> dict[str, Any]:
    """The engine's draw, many times over, against the probabilities that it should follow."""
    probs = pad_to_blocks(logits[None]).softmax(-1)
    apply_filters(probs, np.array([0]), np.array([TOP_P]), np.array([0.0]))
    expected = (probs[0] / probs.sum()).double()
    seen = torch.zeros(len(expected), dtype=torch.long)
    chunk = 50
    for start in range(0, num_draws, chunk):
        seeds = np.arange(start, start + chunk, dtype=np.uint64)
        tokens, _ = draw(probs.repeat(chunk, 1), seeds, np.full(chunk, 7))
        seen += torch.bincount(tokens, minlength=len(seen))
    top = expected.topk(NUM_BINS).indices
    wanted = [*(num_draws * expected[top]).tolist(), num_draws * (1 - float(expected[top].sum()))]
    got = [*seen[top].tolist(), num_draws - int(seen[top].sum())]
    chi = sum((g - w) ** 2 / w for g, w in zip(got, wanted, strict=True))
    return {
        "num_draws": num_draws,
        "rows": [
            {"rank": i + 1, "expected": round(100 * w / num_draws, 2), "seen": round(100 * g / num_draws, 2)}
            for i, (w, g) in enumerate(zip(wanted[:-1], got[:-1], strict=True))
        ],
        "chi_square": round(chi, 2),
        "degrees": NUM_BINS,
        "outside": int(seen[expected == 0].sum()),
    }


def stories(num_new: int) -> dict[str, Any]:
    """The same prompt under several seeds; then each seed once more, with all the others in its batch."""
    overrides = {"kv.memory": "64MiB", "kv.prefix": "none", "executor.num_threads": torch.get_num_threads()}
    greedy = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    sampled = [greedy.replace(temperature=0.8, top_p=0.95, seed=seed) for seed in SEEDS]
    with LLM(dtype="float32", quantization="none", overrides=overrides) as llm:
        alone = [llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0] for params in (greedy, *sampled)]
        many = llm.generate([PROMPT] * (1 + len(SEEDS)), [greedy, *sampled], use_tqdm=False)
    together = [output.outputs[0].token_ids for output in many]
    return {
        "prompt": PROMPT,
        "texts": {str(name): output.text.strip() for name, output in zip(("greedy", *SEEDS), alone, strict=True)},
        "num_different": len({tuple(output.token_ids) for output in alone}),
        "same_in_a_batch": [output.token_ids for output in alone] == together,
    }


def costs(logits: Tensor, seconds: float) -> dict[str, dict[str, float]]:
    """The time to pick a token for each of some rows, in ms."""
    seeds, positions = np.arange(ROWS, dtype=np.uint64), np.full(ROWS, 7)
    off, p, zero = np.zeros(ROWS, np.int64), np.full(ROWS, TOP_P), np.zeros(ROWS)

    def filtered() -> None:
        probs = pad_to_blocks(logits).softmax(-1)
        apply_filters(probs, off, p, zero)
        draw(probs, seeds, positions)

    def sorted_all() -> None:
        noise = torch.empty_like(logits).exponential_()
        sample_top_p(logits.softmax(-1), torch.full((ROWS,), TOP_P), noise)

    runs = {
        "greedy": lambda: argmax(logits),
        "a draw": lambda: draw(pad_to_blocks(logits).softmax(-1), seeds, positions),
        "top-p, a draw": filtered,
        "top-p by sorting": sorted_all,
    }
    return with_three_digits(milliseconds(runs, seconds, digits=3))


@torch.inference_mode()
def measure(smoke: bool) -> dict[str, Any]:
    loaded = load_model(DEFAULT_MODEL, torch.float32, "cpu", quantization="none")
    tokenizer = TextTokenizer.load(loaded.tokenizer_dir)
    token_ids = tokenizer.encode(TEXT)
    note("  one pass over a text: what the model offers at each position")
    logits = all_logits(loaded.model, token_ids)
    found = strip(tokenizer, token_ids, logits.softmax(-1))
    sure = min(found, key=lambda row: row["bits"])
    unsure = max(found, key=lambda row: row["bits"])
    note("  the engine's draw, many times")
    draws = drawn(logits[unsure["position"] - 1], SMOKE_DRAWS if smoke else NUM_DRAWS)
    time = costs(logits[:ROWS].clone(), 0.5 if smoke else 4.0)
    note("  the same prompt under several seeds")
    return {
        "model": DEFAULT_MODEL,
        "threads": torch.get_num_threads(),
        "vocab_size": loaded.spec.vocab_size,
        "top_p": TOP_P,
        "top_k": TOP_K,
        "min_p": MIN_P,
        "strip": found,
        "num_certain": sum(row["kept"] == 1 for row in found),
        "sure": offer(tokenizer, token_ids, logits, sure["position"]) | {"bits": sure["bits"]},
        "unsure": offer(tokenizer, token_ids, logits, unsure["position"]) | {"bits": unsure["bits"]},
        "heat": heat(logits[unsure["position"] - 1]),
        "draws": draws,
        "stories": stories(SMOKE_NEW if smoke else NUM_NEW),
        "rows": ROWS,
        "costs": time,
        "sorting_ratio": round(time["top-p by sorting"]["min"] / time["top-p, a draw"]["min"], 1),
    }


def check(results: dict[str, Any]) -> None:
    """What the text claims, true on any machine."""
    sure, unsure = results["sure"], results["unsure"]
    assert sure["top_p"]["tokens"] == 1 and unsure["top_p"]["tokens"] > 50, "top-p keeps as many everywhere"
    assert sure["top_k"]["tokens"] == unsure["top_k"]["tokens"] == TOP_K
    assert sure["top_k"]["percent"] > 99 > 80 > unsure["top_k"]["percent"], "top-k cuts both alike"
    for name in ("kept", "bits"):
        values = [row[name] for row in results["heat"]]
        assert values == sorted(values) and values[0] < values[-1], "heat does not open the choice"
    best = [row["best"] for row in results["heat"]]
    assert best == sorted(best, reverse=True)
    # Twice the mean of a chi-square with 8 degrees and then some: by chance once in a hundred thousand runs.
    assert results["draws"]["chi_square"] < 37 and results["draws"]["outside"] == 0, "the draws are not fair"
    assert results["stories"]["num_different"] > 2, "seeds change nothing"
    assert results["stories"]["same_in_a_batch"], "a neighbour changed a draw"
    in_time(results["costs"]["greedy"]["min"] < results["costs"]["top-p, a draw"]["min"], "a draw costs nothing")
    in_time(results["sorting_ratio"] > 1.5, "sorting the vocabulary is no dearer")


def tell(results: dict[str, Any]) -> str:
    lines = [f"how many tokens have {100 * results['top_p']:.0f} % of the probability, before each token of the text:"]
    line = ""
    for row in results["strip"]:
        piece = f"{row['text'].strip()}[{row['kept']}] "
        if len(line) + len(piece) > 90:
            lines.append("    " + line.rstrip())
            line = ""
        line += piece
    lines += ["    " + line.rstrip(), ""]
    for where in ("sure", "unsure"):
        at = results[where]
        lines.append(f'after "... {at["before"]}": best {at["best"]}, {at["best_percent"]} %, {at["bits"]} bits')
        for name in ("top_k", "top_p", "min_p"):
            kept = at[name]
            lines.append(f"    {name}={results[name]:<4g} keeps {kept['tokens']:5} tokens, {kept['percent']:5.1f} %")
    lines += ["", "the second of these, by temperature:"]
    lines += [
        f"    {row['temperature']:4.2f}: the best has {row['best']:5.1f} %, top-p keeps {row['kept']:6}"
        for row in results["heat"]
    ]
    draws = results["draws"]
    lines += ["", f"{draws['num_draws']} draws: chi-square {draws['chi_square']} at {draws['degrees']} degrees", ""]
    lines.append(results["stories"]["prompt"] + " ...")
    lines += [f"    {name:6} ... {text!r}" for name, text in results["stories"]["texts"].items()]
    lines += ["    each seed in a batch with all the others: the same tokens", "", f"picking {results['rows']} tokens:"]
    lines += [f"    {name:18} {times['min']:8.2f} ms" for name, times in results["costs"].items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main("04", measure, check, tell)
