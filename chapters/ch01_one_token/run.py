"""Chapter 1: where does a token come from? One text on the default model, from its letters to the next token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from chapters.ch01_one_token.solution import generate_naive
from chapters.harness import in_time, main, milliseconds, note, switches, with_three_digits
from chapters.lab import NoCache, OneRequest, all_logits
from minivllm import LLM, SamplingParams
from minivllm.config import DEFAULT_MODEL
from minivllm.engine.tokenizer import TextTokenizer
from minivllm.loading import load_model

(SWITCH,) = switches("01")
PROMPT = "The capital of France is"
STORY = "The lighthouse keeper climbed the stairs, as he had done every evening for thirty years, and"
NUM_LIKELY = 8
LENGTHS, SMOKE_LENGTHS = (8, 32, 64, 128, 256, 400), (8, 128)
NUM_NEW, SMOKE_NEW = 24, 6
SECONDS, SMOKE_SECONDS = 2.0, 0.3  # for the runs of one measurement


def one_token(model: Any, tokenizer: TextTokenizer, text: str) -> str:
    token_ids = tokenizer.encode(text)  # letters to numbers
    logits = all_logits(model, token_ids)  # a score for every token there is, after each of these
    token = int(logits[-1].argmax())  # after the last one: the likeliest
    return tokenizer.decode([token])  # a number to letters


def likely(model: Any, tokenizer: TextTokenizer, text: str) -> dict[str, Any]:
    """What may follow `text`: the likeliest tokens with their probabilities, and how many there are in all."""
    probs = all_logits(model, tokenizer.encode(text))[-1].softmax(-1)
    top = probs.topk(NUM_LIKELY)
    rows = [
        {"text": repr(tokenizer.decode([token])), "token": token, "percent": round(100 * p, 2)}
        for token, p in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
    return {"prompt": text, "rows": rows, "sum_percent": round(sum(row["percent"] for row in rows), 1)}


def pieces(tokenizer: TextTokenizer, text: str) -> list[dict[str, Any]]:
    return [{"text": repr(tokenizer.decode([token])), "token": token} for token in tokenizer.encode(text)]


@torch.inference_mode()
def stages(model: Any, tokenizer: TextTokenizer, text: str, seconds: float) -> dict[str, dict[str, float]]:
    """How long each station of one token takes, in ms."""
    token_ids = tokenizer.encode(text)
    hidden = model.embedding(torch.tensor(token_ids))
    last = hidden[-1:]
    scores = model.logits(last)[0]
    token = int(scores.argmax())

    def network() -> None:  # the network alone: no logits
        OneRequest(model, lambda layer: NoCache()).hidden(token_ids)

    runs: dict[str, Callable[[], Any]] = {
        "text to tokens": lambda: tokenizer.encode(text),
        "the layers": network,
        "the scores": lambda: model.logits(last),
        "take the best": lambda: int(scores.argmax()),
        "token to text": lambda: tokenizer.decode([token]),
    }
    return with_three_digits(milliseconds(runs, seconds, digits=4))


def growth(model: Any, lengths: tuple[int, ...], vocab_size: int, seconds: float) -> list[dict[str, Any]]:
    """The time of the next token after so many, everything computed."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(1000, vocab_size, (max(lengths),), generator=generator).tolist()
    rows = []
    for n in lengths:
        note(f"  the token after {n}")

        def next_token(n: int = n) -> None:
            OneRequest(model, lambda layer: NoCache()).next_token(text[:n])

        rows.append({"tokens": n, "ms": milliseconds({"token": next_token}, seconds)["token"]})
    return rows


def others(prompt: list[int], num_new: int) -> dict[str, list[int]]:
    """The same tokens from the engine, computing by itself and with transformers' model."""
    found = {}
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    for option in SWITCH.options:
        if option == "simulated":  # which makes its tokens up
            continue
        note(f"  the engine with {SWITCH.field}={option}")
        preset = "naive" if option == "naive" else "v1"
        overrides = {SWITCH.field: option, "kv.memory": "16MiB", "executor.num_threads": torch.get_num_threads()}
        with LLM(preset=preset, dtype="float32", quantization="none", overrides=overrides) as llm:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
        found[option] = output.outputs[0].token_ids
    return found


def measure(smoke: bool) -> dict[str, Any]:
    loaded = load_model(DEFAULT_MODEL, torch.float32, "cpu", quantization="none")
    model, spec = loaded.model, loaded.spec
    tokenizer = TextTokenizer.load(loaded.tokenizer_dir)
    seconds, num_new = (SMOKE_SECONDS, SMOKE_NEW) if smoke else (SECONDS, NUM_NEW)
    one_token(model, tokenizer, PROMPT)  # the first forward of a process is slower than the others
    note("  one token, and its stations")
    prompt = tokenizer.encode(STORY)
    found = likely(model, tokenizer, PROMPT)
    at = stages(model, tokenizer, STORY, seconds)
    whole = sum(times["min"] for times in at.values())
    rows = growth(model, SMOKE_LENGTHS if smoke else LENGTHS, spec.vocab_size, seconds)
    note("  a text, by the plainest loop")
    new = generate_naive(lambda ids: all_logits(model, ids), prompt, num_new)
    return {
        "model": DEFAULT_MODEL,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "vocab_size": spec.vocab_size,
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "pieces": pieces(tokenizer, PROMPT),
        "next": one_token(model, tokenizer, PROMPT),
        "likely": found,
        "stages": at,
        "stages_at": len(prompt),
        "model_percent": round(100 * (at["the layers"]["min"] + at["the scores"]["min"]) / whole, 1),
        "growth": rows,
        "growth_ratio": round(rows[-1]["ms"]["min"] / rows[0]["ms"]["min"], 1),
        "story": {
            "prompt": STORY,
            "text": tokenizer.decode(new),
            "num_prompt": len(prompt),
            "num_new": len(new),
            "tokens_fed": sum(range(len(prompt), len(prompt) + len(new))),
            "token_ids": new,
        },
        "same": {"field": SWITCH.field, "token_ids": others(prompt, num_new)},
    }


def check(results: dict[str, Any]) -> None:
    """What the text claims, true on any machine."""
    rows = results["likely"]["rows"]
    assert [row["percent"] for row in rows] == sorted((row["percent"] for row in rows), reverse=True)
    assert repr(results["next"]) == rows[0]["text"], "the token that came out is not the likeliest one"
    assert results["likely"]["sum_percent"] < 100, "a handful of tokens has all of the probability"
    in_time(results["model_percent"] > 80, "the model is not where the time goes")
    in_time(max(results["stages"], key=lambda at: results["stages"][at]["min"]) == "the layers", "nor are the layers")
    in_time(results["growth_ratio"] > 1.5, "a longer text does not take longer")
    story = results["story"]
    for option, token_ids in results["same"]["token_ids"].items():
        assert token_ids == story["token_ids"], f"{option} gives other tokens than the loop"
    assert story["tokens_fed"] > story["num_prompt"] + story["num_new"]


def tell(results: dict[str, Any]) -> str:
    found, story = results["likely"], results["story"]
    lines = [
        f'"{found["prompt"]}" is {len(results["pieces"])} tokens: '
        + ", ".join(f"{piece['text']} {piece['token']}" for piece in results["pieces"]),
        "",
        f"what may come next, of {results['vocab_size']:,} tokens:",
        *(f"    {row['percent']:6.2f} %  {row['text']}" for row in found["rows"]),
        f"    {100 - found['sum_percent']:6.2f} %  all the others",
        "",
        f"the stations of one token, after a text of {results['stages_at']}:",
        *(f"    {times['min']:9.3f} ms  {name}" for name, times in results["stages"].items()),
        "",
        "everything computed again, for one token more:",
        *(f"    after {row['tokens']:3} tokens {row['ms']['min']:7.0f} ms" for row in results["growth"]),
        "",
        f"{story['prompt']} ...",
        f"... {story['text'].strip()!r}",
        f"{story['num_new']} tokens; {story['tokens_fed']} went through the model",
        *(f"the same ids with {results['same']['field']}={option}" for option in results["same"]["token_ids"]),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main("01", measure, check, tell)
