"""A workload's requests as OpenAI's API has them, for whoever serves it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import httpx
from http_load import Wanted
from workloads import Arrival

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


async def served(http: httpx.AsyncClient) -> dict[str, Any]:
    """The first model that the server lists."""
    reply = await http.get("/v1/models")
    reply.raise_for_status()
    return reply.json()["data"][0]


async def texts_of(http: httpx.AsyncClient, arrivals: Sequence[Arrival]) -> list[str]:
    """The prompts as text: random ids spell no words, and give about as many tokens again."""
    found = []
    for arrival in arrivals:
        reply = await http.post("/detokenize", json={"tokens": arrival.prompt_token_ids})
        if reply.status_code != 200:
            raise SystemExit("error: --endpoint chat needs a server with /detokenize (minivllm, vLLM)")
        found.append(reply.json()["prompt"])
    return found


async def requests_of(
    http: httpx.AsyncClient, model: str, arrivals: Sequence[Arrival], args: argparse.Namespace
) -> list[Wanted]:
    texts = await texts_of(http, arrivals) if args.endpoint == "chat" else [""] * len(arrivals)
    return [
        Wanted(arrival.time_s, json.dumps(body_of(model, arrival, text, args)).encode(), arrival.n)
        for arrival, text in zip(arrivals, texts, strict=True)
    ]


def body_of(model: str, arrival: Arrival, text: str, args: argparse.Namespace) -> dict[str, Any]:
    """Greedy, or n sampled sequences."""
    body: dict[str, Any] = {"model": model, "max_tokens": arrival.max_tokens, "stream": True, "n": arrival.n}
    body |= {"temperature": 1.0, "seed": 0} if arrival.n > 1 else {"temperature": 0.0}
    body["stream_options"] = {"include_usage": True}
    if args.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = arrival.prompt_token_ids
    return body if args.plain else body | {"ignore_eos": True, "return_token_ids": True, "priority": arrival.priority}
