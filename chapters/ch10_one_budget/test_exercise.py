"""The tests of chapter 10's exercise. They run a small model with random weights: no download, a few seconds."""

from __future__ import annotations

import random

import torch
from exercise import Request, schedule

from chapters.ch02_kv_cache.solution import KVCache
from chapters.lab import OneRequest
from minivllm.loading.load import load_model


def chat(name: str, num_tokens: int = 8) -> Request:
    """It has begun to answer: of its tokens only the newest is not computed."""
    return Request(name, list(range(num_tokens)), num_tokens - 1)


def prompt(name: str, num_tokens: int) -> Request:
    return Request(name, list(range(num_tokens)))


def test_those_that_run_come_first_and_the_prompt_takes_what_is_left():
    running, waiting = [chat("a"), chat("b")], [prompt("long", 100)]
    assert schedule(running, waiting, budget=10, max_running=8) == {"a": 1, "b": 1, "long": 8}
    assert [r.id for r in running] == ["a", "b", "long"] and waiting == []


def test_the_rest_of_a_prompt_is_computed_like_anything_else():
    running = [chat("a"), Request("long", list(range(100)), 8)]
    plan = schedule(running, [prompt("next", 20)], budget=120, max_running=8)
    assert plan == {"a": 1, "long": 92, "next": 20}


def test_nobody_is_overtaken():
    waiting = [prompt("first", 50), prompt("second", 2)]
    plan = schedule([], waiting, budget=10, max_running=8)
    assert list(plan.items()) == [("first", 10)] and [r.id for r in waiting] == ["second"]


def test_no_more_run_than_may():
    running, waiting = [chat("a")], [prompt(name, 2) for name in "bcd"]
    assert schedule(running, waiting, budget=100, max_running=3) == {"a": 1, "b": 2, "c": 2}
    assert [r.id for r in running] == ["a", "b", "c"] and [r.id for r in waiting] == ["d"]


def test_a_budget_that_is_used_up_leaves_the_others_out_of_the_plan():
    running, waiting = [chat("a"), chat("b"), chat("c")], [prompt("d", 3)]
    assert schedule(running, waiting, budget=2, max_running=8) == {"a": 1, "b": 1}
    assert [r.id for r in waiting] == ["d"]


def test_any_budget_gives_the_same_answers():
    """Three requests of a real model, served under several budgets: a schedule may change when, never what."""
    model = load_model("dummy:tiny", torch.float32, "cpu").model
    prompts = {name: random.Random(name).sample(range(256), n) for name, n in (("a", 5), ("b", 23), ("c", 11))}
    alone = {name: serve(model, {name: tokens}, 100) for name, tokens in prompts.items()}
    for budget in (1, 3, 7, 100):
        together = serve(model, prompts, budget)
        assert together == {name: alone[name][name] for name in prompts}, f"budget {budget}"


def serve(model, prompts: dict[str, list[int]], budget: int, num_new: int = 4) -> dict[str, list[int]]:
    waiting = [Request(name, list(tokens)) for name, tokens in prompts.items()]
    pasts = {r.id: OneRequest(model, lambda a: KVCache(40, a.num_kv_heads, a.head_size)) for r in waiting}
    running: list[Request] = []
    done: dict[str, list[int]] = {}
    for _ in range(200):
        if len(done) == len(prompts):
            break
        plan = schedule(running, waiting, budget, max_running=2)
        assert 0 < sum(plan.values()) <= budget
        for request in [r for r in running if r.id in plan]:
            end = request.num_computed + plan[request.id]
            token = pasts[request.id].next_token(request.tokens[request.num_computed : end])
            request.num_computed = end
            if end == len(request.tokens):  # the newest token was computed, so what follows it is known
                request.tokens.append(token)
            if len(request.tokens) == len(prompts[request.id]) + num_new:
                done[request.id] = request.tokens[-num_new:]
                running.remove(request)
    return done
