"""Chapter 9: how can two strangers share memory? Prompts with a common beginning, with the prefix cache off and on."""

from __future__ import annotations

import time
from typing import Any

import torch

from bench.common import spread
from chapters.crowd import Guest, House, Run, random_tokens
from chapters.harness import in_time, main, note
from minivllm.config import DEFAULT_MODEL
from minivllm.features import KEY_HASHES
from minivllm.kv.manager import PagedKVManager
from minivllm.kv.prefix_hash import HashPrefix
from minivllm.request import Request, SamplingParams

BLOCK_SIZE = 16
SHARED, SMOKE_SHARED = (0, 96, 192, 288, 384), (0, 96, 192)  # the last is the whole prompt
NUM_NEW, APART = 2, 4  # tokens of an answer, and steps between two arrivals: nobody meets anybody

# vLLM's example (its documentation, "Automatic Prefix Caching"): ten blocks of four tokens.
FIRST = list("ABCDEFGHIJKLMNOP")
SECOND = list("ABCDEFGHIJwxyz")
THIRD = list("ABCDEFGHIJKLabcdefghijklmnopq")


def guests(shares: tuple[int, ...]) -> list[Guest]:
    """Somebody, and then strangers that begin as that one did: for as many tokens as `shares` say."""
    length = shares[-1]
    common = random_tokens(length, 0)
    strangers = [common[:num] + random_tokens(length - num, 1 + i) for i, num in enumerate(shares)]
    prompts = {"somebody": common, **{str(num): prompt for num, prompt in zip(shares, strangers, strict=True)}}
    return [Guest(name, prompt, NUM_NEW, APART * i) for i, (name, prompt) in enumerate(prompts.items())]


def first_tokens(shares: tuple[int, ...]) -> tuple[list[dict[str, Any]], bool]:
    """(a row for each shared length, whether the outputs are equal)"""
    house = House(num_blocks=(len(shares) + 1) * (shares[-1] // BLOCK_SIZE + 1), kv__block_size=BLOCK_SIZE)
    runs: dict[str, list[Run]] = {"none": [], "hash": []}
    house.serve(guests((32,)))  # the first forwards of a process are slower than the others
    for i in range(2):
        for option in runs:
            note(f"  kv.prefix={option}, run {i + 1} of 2")
            runs[option].append(house.serve(guests(shares), rules={"kv.prefix": option}))
    house.close()
    rows = [
        {
            "shared": num,
            "cached": runs["hash"][0].visits[str(num)].num_cached,
            **{option: spread([run.visits[str(num)].first for run in found], 1) for option, found in runs.items()},
        }
        for num in shares
    ]
    return rows, all(run.tokens == runs["none"][0].tokens for found in runs.values() for run in found)


def hashing(length: int) -> dict[str, float]:
    """ms to make all keys of a prompt that nobody has seen, the fastest of ten."""
    prompt, found = random_tokens(length, 5), {}
    for name in KEY_HASHES.names():
        index, times = HashPrefix(KEY_HASHES.get(name)), []
        for i in range(10):
            req = request(str(i), prompt)
            begin = time.perf_counter()
            index.keys(req, length // BLOCK_SIZE, BLOCK_SIZE)
            times.append(1e3 * (time.perf_counter() - begin))
        found[name] = round(min(times), 3)
    return found


def request(name: str, tokens: list[Any]) -> Request:
    return Request(name, SamplingParams(), list(tokens), len(tokens))


def compute(kv: PagedKVManager, req: Request, num_new: int) -> list[int]:
    """A step of one request: its new blocks."""
    blocks = kv.allocate(req, num_new)
    assert blocks is not None
    req.num_computed_tokens += num_new
    kv.commit(req)
    return list(blocks)


def admit(kv: PagedKVManager, req: Request) -> tuple[int, list[int]]:
    """(tokens found, its block table), once all its prompt is computed."""
    num_found = kv.lookup(req)
    blocks = kv.allocate(req, req.num_tokens - num_found)
    assert blocks is not None
    req.num_computed_tokens = req.num_tokens
    kv.commit(req)
    return num_found, list(blocks)


def ten_blocks() -> list[dict[str, Any]]:
    """vLLM's example on this engine's KV manager: what each moment found, the tables, and the free blocks in order."""
    kv = PagedKVManager(10, 4, HashPrefix(seed="the book"))
    moments: list[dict[str, Any]] = []

    def moment(what: str, found: int = 0, table: list[int] | None = None) -> None:
        moments.append({"what": what, "found": found, "table": table or [], "free": list(kv.pool.free_list())})

    first, second, third = request("first", FIRST[:15]), request("second", SECOND), request("third", THIRD)
    found, table = admit(kv, first)
    moment("the first comes, 15 tokens", found, table)
    first.token_ids += ["P", "Q"]
    table = table + compute(kv, first, 2)
    moment("it grows by two tokens", 0, table)
    found, table = admit(kv, second)
    moment("the second comes, 14 tokens, 10 as the first", found, table)
    kv.free(first)
    moment("the first has ended")
    kv.free(second)
    moment("the second has ended")
    found, table = admit(kv, third)
    moment("the third comes, 29 tokens, 12 as the first", found, table)
    kv.check()
    return moments


def forgetting() -> list[dict[str, int]]:
    """A prompt of 16 blocks in a pool of 64, then strangers of 8 blocks each: how much of the prompt is still found?"""
    kv = PagedKVManager(64, BLOCK_SIZE, HashPrefix(seed="the book"))
    prompt = list(range(16 * BLOCK_SIZE + 1))
    once = request("once", prompt)
    admit(kv, once)
    kv.free(once)
    rows = []
    for i in range(10):
        rows.append({"strangers": i, "found": kv.lookup(request(f"again {i}", prompt))})
        stranger = request(f"stranger {i}", [1000 + i] * (8 * BLOCK_SIZE))
        admit(kv, stranger)
        kv.free(stranger)
    return rows


def measure(smoke: bool) -> dict[str, Any]:
    shares = SMOKE_SHARED if smoke else SHARED
    rows, equal = first_tokens(shares)
    return {
        "model": DEFAULT_MODEL,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "block_size": BLOCK_SIZE,
        "num_prompt": shares[-1],
        "rows": rows,
        "equal": equal,
        "hashing_ms": hashing(shares[-1]),
        "ten_blocks": ten_blocks(),
        "forgetting": forgetting(),
    }


def check(results: dict[str, Any]) -> None:
    rows, size, length = results["rows"], results["block_size"], results["num_prompt"]
    assert results["equal"], "a cached block changed the output"
    for row in rows:
        assert row["cached"] == min(row["shared"], length - 1) // size * size, "not the whole blocks of what is shared"
    none, most = rows[0], rows[-1]
    in_time(most["hash"]["min"] < most["none"]["min"] / 2, "a cached prompt is no faster")
    in_time(most["hash"]["min"] < none["hash"]["min"] / 2, "sharing more is no faster")
    in_time(results["hashing_ms"]["sha256_cbor"] < 0.05 * none["none"]["min"], "keys cost more than they can save")
    moments = results["ten_blocks"]
    assert [m["table"] for m in moments if m["table"]] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4],
        [0, 1, 5, 6],
        [0, 1, 2, 7, 8, 9, 4, 3],
    ], "not what vLLM's example says"
    assert moments[4]["free"] == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0] and [m["found"] for m in moments] == [0, 0, 8, 0, 0, 12]
    found = [row["found"] for row in results["forgetting"]]
    assert found == sorted(found, reverse=True) and found[0] > 0 == found[-1], "nothing was forgotten"
    assert any(0 < num < found[0] for num in found), "a prefix was forgotten from its beginning"


def tell(results: dict[str, Any]) -> str:
    lines = [
        f"a prompt of {results['num_prompt']} tokens, somebody has been here with the same beginning",
        "",
        "the same      found in    first token, cache off   cache on",
    ]
    for row in results["rows"]:
        lines.append(
            f"{row['shared']:5} tokens {row['cached']:5} tokens {row['none']['min']:17.0f} ms "
            f"{row['hash']['min']:9.0f} ms"
        )
    for name, ms in results["hashing_ms"].items():
        lines.append(f"keys of the whole prompt by {name}: {ms:.3f} ms")
    lines += ["", "ten blocks of four tokens:"]
    for moment in results["ten_blocks"]:
        table = f"found {moment['found']:2}, table {' '.join(map(str, moment['table']))}" if moment["table"] else ""
        lines += [f"  {moment['what']}", f"      {table:35} free {' '.join(map(str, moment['free']))}".rstrip()]
    counts = ", ".join(str(row["found"]) for row in results["forgetting"])
    lines += ["", f"tokens found again after 0, 1, 2 ... strangers: {counts}"]
    lines.append("the same tokens, cache off and on" if results["equal"] else "the tokens differ")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main("09", measure, check, tell)
