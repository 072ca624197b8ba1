"""The tests of chapter 11's exercise: a batch of arrays that is kept must equal one that is made anew."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from exercise import Batch

SIZE = 4  # tokens a block
MAX_ROWS, MAX_BLOCKS = 8, 6


@dataclass
class Request:
    """What a rebuild starts from: lists."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)


class Crowd:
    """The same requests twice: in a batch that is kept, and as lists."""

    def __init__(self, seed: int = 0):
        self.batch = Batch(MAX_ROWS, MAX_BLOCKS * SIZE, MAX_BLOCKS)
        self.requests: dict[str, Request] = {}
        self.rng, self.num_blocks = random.Random(seed), 0

    def blocks(self, num: int) -> list[int]:
        self.num_blocks += num
        return list(range(self.num_blocks - num + 1, self.num_blocks + 1))

    def add(self, name: str, num_tokens: int) -> None:
        tokens = [self.rng.randrange(1, 1000) for _ in range(num_tokens)]
        self.requests[name] = request = Request(tokens, self.blocks(-(-num_tokens // SIZE)))
        self.batch.add(name, request.tokens, request.blocks)

    def extend(self, name: str) -> None:
        request, token = self.requests[name], self.rng.randrange(1, 1000)
        blocks = self.blocks(1) if len(request.tokens) % SIZE == 0 else []
        request.tokens.append(token)
        request.blocks += blocks
        self.batch.extend(name, token, blocks)

    def remove(self, *names: str) -> list[tuple[int, int]]:
        for name in names:
            del self.requests[name]
        return self.batch.remove(names)

    def check(self) -> None:
        """The kept batch gives the inputs that a rebuild from the lists gives, for the same requests in its order."""
        batch = self.batch
        assert sorted(batch.req_ids) == sorted(self.requests), "not those who stay"
        assert batch.row_of == {name: row for row, name in enumerate(batch.req_ids)}, "somebody is looked for elsewhere"
        kept, rebuilt = gathered(batch), made_anew([self.requests[name] for name in batch.req_ids])
        for name in rebuilt:
            assert np.array_equal(kept[name], rebuilt[name]), f"{name}: {kept[name]}, rebuilt {rebuilt[name]}"
        for row, name in enumerate(batch.req_ids):
            tokens = self.requests[name].tokens
            assert batch.tokens[row, : len(tokens)].tolist() == tokens, f"{name} has another's tokens"


def gathered(batch: Batch) -> dict[str, np.ndarray]:
    """The inputs of a step in which everybody decodes: whole arrays, no loop."""
    n = len(batch.req_ids)
    rows, at = np.arange(n), batch.num_tokens[:n] - 1
    width = int(batch.num_blocks[:n].max(initial=0))
    return {
        "token_ids": batch.tokens[rows, at],
        "positions": at,
        "slots": batch.blocks[rows, at // SIZE] * SIZE + at % SIZE,
        "tables": batch.blocks[:n, :width],
    }


def made_anew(requests: list[Request]) -> dict[str, np.ndarray]:
    """The same from lists, one request after the other: slow, and obviously right."""
    last = [len(request.tokens) - 1 for request in requests]
    width = max((len(request.blocks) for request in requests), default=0)
    tables = [request.blocks + [0] * (width - len(request.blocks)) for request in requests]
    return {
        "token_ids": np.array([request.tokens[at] for request, at in zip(requests, last, strict=True)]),
        "positions": np.array(last),
        "slots": np.array([r.blocks[at // SIZE] * SIZE + at % SIZE for r, at in zip(requests, last, strict=True)]),
        "tables": np.array(tables, np.int32).reshape(len(requests), width),
    }


def crowd(*lengths: int) -> Crowd:
    """a, b, c ... with so many tokens."""
    made = Crowd()
    for name, num_tokens in zip("abcdefgh", lengths, strict=False):
        made.add(name, num_tokens)
    return made


def test_the_last_row_fills_the_hole():
    made = crowd(3, 9, 5, 4)
    assert made.remove("b") == [(3, 1)]
    assert made.batch.req_ids == ["a", "d", "c"]
    made.check()


def test_whoever_has_the_last_row_leaves_without_a_move():
    made = crowd(3, 9, 5)
    assert made.remove("c") == []
    made.check()


def test_nobody_moves_who_need_not_and_nobody_who_leaves():
    made = crowd(3, 9, 5, 4, 6, 7)
    assert made.remove("b", "e", "f") == [(3, 1)]
    made.check()
    assert made.remove("a", "c") == [(1, 0)]
    made.check()


def test_all_may_leave_and_others_come():
    made = crowd(9, 9, 9)
    assert made.remove("a", "b", "c") == []
    made.check()
    made.add("new", 2)
    made.check()
    made.add("other", 3)
    assert made.remove("new") == [(1, 0)]
    made.extend("other")
    made.check()


def test_after_any_adds_and_removes_it_equals_a_rebuild():
    for seed in range(20):
        made = Crowd(seed)
        for i in range(60):
            here, rng = list(made.requests), made.rng
            if len(here) < MAX_ROWS and rng.random() < 0.6:
                made.add(f"r{i}", rng.randrange(1, 12))
            elif here:
                made.remove(*rng.sample(here, rng.randrange(1, len(here) + 1)))
            for name, request in made.requests.items():
                if len(request.tokens) < MAX_BLOCKS * SIZE:
                    made.extend(name)
            made.check()


def test_what_others_keep_by_row_follows():
    """A sampler has a temperature for each row. It is not in the batch, and moves along."""
    for seed in range(5):
        made, rng = Crowd(seed), random.Random(seed)
        temperatures, wanted = [0.0] * MAX_ROWS, {}
        for i in range(40):
            if len(made.requests) < MAX_ROWS:
                made.add(f"r{i}", 3)
                wanted[f"r{i}"] = temperatures[made.batch.row_of[f"r{i}"]] = rng.random()
            leaving = rng.sample(list(made.requests), rng.randrange(0, 3)) if len(made.requests) > 3 else []
            num_left = len(made.requests) - len(leaving)
            for old, new in made.remove(*leaving):
                assert new < num_left <= old, "this row need not move, or is not one to move to"
                temperatures[new] = temperatures[old]
            for name, row in made.batch.row_of.items():
                assert temperatures[row] == wanted[name], f"{name} is sampled with another's temperature"
