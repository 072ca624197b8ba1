"""What a recorded run looked like after each of its steps. The widgets show these states; the browser computes none.

The states are held against the engine itself: tests/book/test_widgets.py compares PoolState with the real block pool's
free list and prefix index at every step of a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bookext.quotes import ROOT
from minivllm import trace
from minivllm.trace import Trace, TraceError

TRACES = ROOT / "chapters" / "traces"


def load(name: str) -> Trace:
    """Raises TraceError; one that was not made by chapters/record_traces.py has no `book` in its header."""
    found = trace.read(TRACES / f"{name}.jsonl")
    if "book" not in found.header:
        raise TraceError(f"{name}.jsonl was not recorded by `python -m chapters.record_traces`")
    return found


def words(found: Trace) -> dict[int, str]:
    return {int(token): text for token, text in found.header["book"]["words"].items()}


def provenance(found: Trace) -> str:
    machine, book = found.header["machine"], found.header["book"]
    return f"{machine['cpu']}, {machine['num_cores']} cores; commit {book['commit']}; {book['date'][:10]}"


# ---------------------------------------------------------------------------------------- the block pool


@dataclass
class PoolState:
    """After a step. A request's blocks are given back when the next plan says so."""

    block_size: int
    keeps: bool  # whether a free block keeps what it holds (kv.prefix)
    tables: dict[str, list[int]] = field(default_factory=dict)
    known: dict[str, list[int]] = field(default_factory=dict)  # request -> its tokens, prompt and output
    computed: dict[str, int] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    preempted: set[str] = field(default_factory=set)  # and not running again yet
    queue: list[int] = field(default_factory=list)  # free blocks, the next one to be taken first
    holds: dict[int, list[int]] = field(default_factory=dict)  # block -> the tokens whose K and V are in it
    said: list[str] = field(default_factory=list)  # what happened in this step, in words

    def owners(self, block: int) -> list[str]:
        return [req_id for req_id, blocks in self.tables.items() if block in blocks]

    def is_reusable(self, block: int) -> bool:
        """Free, and found by whoever begins with what it holds."""
        return self.keeps and block in self.queue and len(self.holds.get(block, ())) == self.block_size

    def status(self, req_id: str) -> str:
        if req_id in self.ended:
            return "has ended"
        if req_id in self.tables:
            return f"{self.computed[req_id]} tokens computed"
        return "preempted, waits" if req_id in self.preempted else "waits"

    # --- the parts of a step, in the order in which the engine does them

    def leave(self, req_id: str) -> None:
        blocks = self.tables.pop(req_id, [])
        freed = [b for b in reversed(blocks) if not self.owners(b)]
        self.queue += freed
        if not self.keeps:
            for block in freed:
                self.holds.pop(block, None)
        if req_id in self.ended:
            self.said.append(f"{req_id} has ended and gives {count(freed, 'block')} back.")
        else:
            self.preempted.add(req_id)
            self.said.append(f"{req_id} is preempted: {count(freed, 'block')} given back.")

    def take(self, req_id: str, blocks: list[int], num_found: int) -> None:
        """num_found: how many of the blocks of a request that joins were in the prefix cache."""
        table = self.tables[req_id]
        for i, block in enumerate(blocks):
            if block in self.queue:
                self.queue.remove(block)
            if i >= num_found:
                self.holds[block] = []
            table.append(block)

    def compute(self, req_id: str, now: int, before: int) -> None:
        for place in range(before, min(before + now, len(self.known[req_id]))):
            held = self.holds[self.tables[req_id][place // self.block_size]]
            held[place % self.block_size :] = [self.known[req_id][place]]
        self.computed[req_id] = before + now


def pool_states(found: Trace) -> Iterator[tuple[int, PoolState]]:
    """(step, the state after it), for each step; the same object each time."""
    config = found.header["config"]
    state = PoolState(config["kv.block_size"], config["kv.prefix"] != "none")
    state.queue = list(range(found.header["info"]["num_blocks"]))
    for record in found.records:
        if record["type"] == "add":
            request = record["request"]
            state.known[request["id"]] = list(request["prompt_token_ids"])
            state.said.append(f"{request['id']} arrives with {count(request['prompt_token_ids'], 'token')}.")
        elif record["type"] == "step":
            _take_step(state, record)
            yield record["step"], state
            state.said = []


def _take_step(state: PoolState, record: dict[str, Any]) -> None:
    before = {req_id: start for req_id, _, start in record["sched"]}
    for req_id in record.get("leaves", ()):
        state.leave(req_id)
    joined = [join["req_id"] for join in record.get("joins", ())]
    for req_id in joined:
        state.tables[req_id] = []
        state.preempted.discard(req_id)
    for req_id, blocks in record.get("new_blocks", {}).items():
        num_found = before[req_id] // state.block_size if req_id in joined else 0
        state.take(req_id, blocks, num_found)
        found = f" {num_found} found in the cache," if num_found else ""
        verb = "joins with" if req_id in joined else "grows by"
        state.said.append(f"{req_id} {verb}{found} {count(blocks[num_found:], 'new block')}.")
    for req_id, now, start in record["sched"]:
        state.compute(req_id, now, start)
    for req_id, tokens in record["tokens"].items():
        state.known[req_id] += tokens
    state.ended |= record.get("finished", {}).keys()


def count(things: list[Any], name: str) -> str:
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"


# ---------------------------------------------------------------------------------------- time


class Slice(NamedTuple):
    """One request in one step. Times in ms since the first arrival."""

    req_id: str
    begin: float
    end: float
    num_tokens: int  # computed in this step
    is_prompt: bool  # not all of it known output
    num_out: int  # tokens that came of it


class Lane(NamedTuple):
    """A run by the clock."""

    arrivals: dict[str, float]
    slices: list[Slice]

    @property
    def ends(self) -> list[float]:
        return sorted({s.end for s in self.slices})

    def num_out(self, req_id: str, until: float) -> int:
        return sum(s.num_out for s in self.slices if s.req_id == req_id and s.end <= until)

    def gaps(self, req_id: str, until: float = math.inf) -> list[tuple[float, float]]:
        """(from, to): between each token of a request and its next."""
        times = [s.end for s in self.slices if s.req_id == req_id and s.num_out and s.end <= until]
        return list(zip(times, times[1:], strict=False))

    def idle(self, req_id: str, shortest: float) -> list[tuple[float, float]]:
        """(from, to) of at least so many ms: between a token of a request and the step that gives its next."""
        began = {s.end: s.begin for s in self.slices if s.req_id == req_id}
        return [(a, began[b]) for a, b in self.gaps(req_id) if began[b] - a >= shortest]

    def longest_gap(self, until: float = math.inf) -> float:
        """Of all requests, in ms; a wait that goes on at `until` counts as far as it has come."""
        gaps = (gap for req_id in self.arrivals for gap in self.gaps(req_id))
        return max((min(b, until) - a for a, b in gaps if a < until), default=0.0)


def lane(found: Trace) -> Lane:
    arrivals: dict[str, float] = {}
    known: dict[str, int] = {}  # tokens at the join: what computing them is called
    slices: list[Slice] = []
    end = 0.0
    for record in found.records:
        if record["type"] == "add":
            arrivals[record["request"]["id"]] = record["t"]
        elif record["type"] == "step":
            known |= {join["req_id"]: len(join["token_ids"]) for join in record.get("joins", ())}
            # Phases are timed by the wall; a trace may have another clock, by which a step begins where the last ended.
            begin, end = max(1e3 * record["t"] - sum(record["times"].values()), end), 1e3 * record["t"]
            for req_id, now, before in record["sched"]:
                num_out = len(record["tokens"].get(req_id, ()))
                slices.append(Slice(req_id, begin, end, now, before < known[req_id], num_out))
    first = 1e3 * min(arrivals.values())
    moved = [s._replace(begin=s.begin - first, end=s.end - first) for s in slices]
    return Lane({req_id: 1e3 * t - first for req_id, t in arrivals.items()}, moved)


# ---------------------------------------------------------------------------------------- text


class Turn(NamedTuple):
    """A step of a request whose next tokens are guessed: what was right, what was refused, the model's own token."""

    right: str
    refused: str
    own: str


def turns(found: Trace) -> tuple[str, list[Turn]]:
    """The prompt's text, and the steps that gave the one request of a run its tokens."""
    text = words(found)
    (added,) = (record["request"] for record in found.records if record["type"] == "add")
    made = []
    for record in found.steps():
        if taken := record["tokens"].get(added["id"]):
            *right, own = taken
            refused = record.get("drafts", {}).get(added["id"], [])[len(right) :]
            made.append(Turn(*("".join(text[token] for token in tokens) for tokens in (right, refused, [own]))))
    return "".join(text[token] for token in added["prompt_token_ids"]), made


class Choice(NamedTuple):
    """A token that was taken, and those that were likely, best first: (text, probability)."""

    text: str
    probability: float
    candidates: list[tuple[str, float]]


def choices(found: Trace) -> tuple[str, list[Choice]]:
    """The prompt's text, and each choice of the one request of a run that reported log-probabilities."""
    text = words(found)
    (added,) = (record["request"] for record in found.records if record["type"] == "add")
    made = []
    for record in found.steps():
        for taken, *likely in record.get("logprobs", {}).get(added["id"], ()):
            candidates = [(text[token], math.exp(p)) for token, p, _ in likely]
            made.append(Choice(text[taken[0]], math.exp(taken[1]), candidates))
    return "".join(text[token] for token in added["prompt_token_ids"]), made
