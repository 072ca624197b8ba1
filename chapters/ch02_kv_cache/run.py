"""Chapter 2: why is token 500 slower than token 5? One request on the default model, with and without a KV cache."""

from __future__ import annotations

from typing import Any

import torch

from chapters.ch02_kv_cache.solution import KVCache
from chapters.harness import in_time, main, milliseconds, note, switches
from chapters.lab import OneRequest
from minivllm import LLM, SamplingParams
from minivllm.attention.base import KVSpec
from minivllm.config import DEFAULT_MODEL
from minivllm.errors import ConfigError
from minivllm.loading import load_model

(SWITCH,) = switches("02")
LENGTHS, SMOKE_LENGTHS = (5, 32, 64, 128, 256, 500), (5, 256)
NUM_NEW, SMOKE_NEW = 16, 6
SECONDS, SMOKE_SECONDS = 2.0, 0.3  # for the runs of one length
POOL = "16MiB"
PROMPT = "The lighthouse keeper climbed the stairs, as he had done every evening for thirty years, and"


def new_request(model: Any, capacity: int) -> OneRequest:
    return OneRequest(model, lambda layer: KVCache(capacity, layer.num_kv_heads, layer.head_size))


def generate_without(model, prompt: list[int], num_new: int):
    tokens = list(prompt)
    for _ in range(num_new):
        request = new_request(model, len(tokens))
        tokens.append(request.next_token(tokens))
    return tokens[len(prompt) :]


def generate_with(model, prompt: list[int], num_new: int):
    request = new_request(model, len(prompt) + num_new)
    new = [request.next_token(prompt)]
    while len(new) < num_new:
        new.append(request.next_token(new[-1:]))
    return new


def time_of_a_token(model: Any, text: list[int], length: int, seconds: float) -> dict[str, Any]:
    """The token that follows `length` tokens: all of them computed, or the last of them over a cache of the rest.

    The ratio is of the fastest runs: other programs only ever add time.
    """
    past = new_request(model, length)
    past.next_token(text[: length - 1])

    def cached() -> None:
        past.next_token(text[length - 1 : length])
        for cache in past.caches:  # the next round computes the same token
            cache.length = length - 1
        past.num_tokens = length - 1

    def recomputed() -> None:
        new_request(model, length).next_token(text[:length])

    times = milliseconds({"without": recomputed, "with": cached}, seconds)
    return {"tokens": length, **times, "ratio": round(times["without"]["min"] / times["with"]["min"], 2)}


def memory(spec: Any) -> dict[str, Any]:
    """What a token weighs, and after how many the cache outweighs the model (both in bfloat16)."""
    kept = {
        name: KVSpec(spec.num_layers, spec.num_kv_heads, spec.head_size, 1, dtype).bytes_per_block
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("int8", torch.int8))
    }
    model = 2 * spec.num_parameters
    return {
        "num_layers": spec.num_layers,
        "num_kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "bytes_per_token": kept,
        "model_mib": round(model / 2**20),
        "longest": spec.max_position,
        "longest_mib": round(kept["bfloat16"] * spec.max_position / 2**20),
        "tokens_as_heavy_as_the_model": model // kept["bfloat16"],
    }


def engine(num_new: int) -> dict[str, Any]:
    """The chapter's switch on the real engine: the same pool of memory, K and V kept in each of its ways."""
    found: dict[str, Any] = {}
    for option in SWITCH.options:
        note(f"  the engine with {SWITCH.field}={option}")
        overrides = {SWITCH.field: option, "kv.memory": POOL, "executor.num_threads": torch.get_num_threads()}
        try:
            llm = LLM(dtype="bfloat16", quantization="none", overrides=overrides)
        except ConfigError as e:  # no backend here reads it
            found[option] = {"refused": str(e)}
            continue
        with llm:
            (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=num_new), use_tqdm=False)
            found[option] = {"pool_tokens": llm.info["kv_tokens"], "token_ids": output.outputs[0].token_ids}
    return found


def measure(smoke: bool) -> dict[str, Any]:
    loaded = load_model(DEFAULT_MODEL, torch.float32, "cpu", quantization="none")
    model, spec = loaded.model, loaded.spec
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(1000, spec.vocab_size, (max(LENGTHS),), generator=generator).tolist()
    new_request(model, 8).next_token(text[:8])  # the first forward of a process is slower than the others
    lengths, num_new = (SMOKE_LENGTHS, SMOKE_NEW) if smoke else (LENGTHS, NUM_NEW)
    rows = []
    for length in lengths:
        note(f"  the token after {length}")
        rows.append(time_of_a_token(model, text, length, SMOKE_SECONDS if smoke else SECONDS))
    note("  the same text, both ways")
    prompt = text[:16]
    without, with_cache = generate_without(model, prompt, num_new), generate_with(model, prompt, num_new)
    return {
        "model": DEFAULT_MODEL,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "rows": rows,
        "generate": {
            "num_prompt": len(prompt),
            "num_new": num_new,
            "equal": without == with_cache,
            "tokens_fed": {
                "without": sum(range(len(prompt), len(prompt) + num_new)),
                "with": len(prompt) + num_new - 1,
            },
        },
        "memory": memory(spec),
        "engine": {"field": SWITCH.field, "pool": POOL, "num_new": num_new, "options": engine(num_new)},
    }


def check(results: dict[str, Any]) -> None:
    """What the text claims, true on any machine."""
    first, last = results["rows"][0], results["rows"][-1]
    assert results["generate"]["equal"], "a cache changed the output"
    in_time(last["without"]["min"] > 2 * first["without"]["min"], "recomputing more tokens takes no longer")
    in_time(last["with"]["min"] < last["without"]["min"], "the cache does not help at the longest context")
    in_time(last["with"]["min"] < 2 * first["with"]["min"], "with a cache a token's price is not nearly flat")
    in_time(last["ratio"] > first["ratio"], "the cache's gain does not grow with the context")
    fed = results["generate"]["tokens_fed"]
    assert fed["with"] < fed["without"]
    kept = results["memory"]["bytes_per_token"]
    assert kept["float32"] == 2 * kept["bfloat16"] and kept["bfloat16"] > kept["int8"] > kept["bfloat16"] / 2
    options = results["engine"]["options"]
    if "refused" not in options["int8"]:
        assert options["int8"]["pool_tokens"] > 1.5 * options["auto"]["pool_tokens"]


def tell(results: dict[str, Any]) -> str:
    lines = ["the token after   without a cache   with a cache     ratio"]
    for row in results["rows"]:
        lines.append(
            f"{row['tokens']:9} tokens {row['without']['min']:14.0f} ms {row['with']['min']:11.0f} ms "
            f"{row['ratio']:7.1f} x"
        )
    generate, kept = results["generate"], results["memory"]
    lines += [
        "",
        f"{generate['num_new']} tokens after a prompt of {generate['num_prompt']}: the same ids both ways",
        f"    tokens through the model: {generate['tokens_fed']['without']} without, "
        f"{generate['tokens_fed']['with']} with a cache",
        "",
        *(f"a token's K and V in {name:8}: {size:6,} bytes" for name, size in kept["bytes_per_token"].items()),
        f"a request of {kept['longest']:,} tokens: {kept['longest_mib']} MiB; the model: {kept['model_mib']} MiB",
        "",
    ]
    base = results["engine"]["options"]["auto"].get("token_ids", [])
    for option, found in results["engine"]["options"].items():
        if "refused" in found:
            lines.append(f"kv.dtype={option}: not here ({found['refused']})")
            continue
        equal = next((i for i, (a, b) in enumerate(zip(base, found["token_ids"], strict=False)) if a != b), len(base))
        lines.append(
            f"kv.dtype={option:5} {found['pool_tokens']:5,} tokens in {results['engine']['pool']}; "
            f"the first {equal} of {len(base)} tokens equal those of auto"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main("02", measure, check, tell)
