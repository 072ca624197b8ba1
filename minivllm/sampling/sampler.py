"""From logits to tokens. The order of the steps is vLLM V1's:

1. the log-probabilities to report come from the logits as the model gave them;
2. processors that can change the argmax (processors.py), each only while some request uses it;
3. greedy rows end here: the likeliest token, the lowest id among equals;
4. temperature, then processors that keep the argmax, then min-p, top-k, top-p and one draw per row (draw.py).

Invariant: what a row gets depends on its own logits, parameters and output only, never on its neighbours. The random
numbers of a draw are a function of (seed, position); see uniform.py.

All of it is given to the device without waiting for it (`launch`); a call then waits for what comes of it, and who
has something better to do lets it travel (runner/async_sampling.py).

The sampler knows nothing of requests' names, of the scheduler, or of which tokens end a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.plan import Join, PositionLogprobs
from minivllm.sampling.base import LogitsProcessor, Sampled
from minivllm.sampling.draw import pad_to_blocks
from minivllm.sampling.draws import TORCH
from minivllm.sampling.logprobs import find_logprobs, read_logprobs, with_chosen
from minivllm.sampling.pick import Draws, Pick
from minivllm.sampling.processors import DEFAULT_PROCESSORS
from minivllm.upload import upload


class DeviceSampled(NamedTuple):
    """What comes of a call, where its logits are."""

    # tokens [S] int64; valid [S] bool: which logits rows had a usable distribution; if anybody asked for
    # log-probabilities, their Columns (see logprobs.py) of those rows
    tensors: tuple[Tensor, ...]
    num_logprobs: np.ndarray  # [S] int64: how many likeliest tokens each logits row reports; -1: not even its own

    def read(self, arrays: Sequence[np.ndarray]) -> Sampled:
        """arrays: `tensors`, on the host."""
        tokens, valid, *columns = arrays
        logprobs: list[PositionLogprobs | None] = [None] * len(tokens)
        if columns:
            asked = np.flatnonzero(self.num_logprobs >= 0)
            found = read_logprobs(columns, self.num_logprobs[asked].tolist())
            for i, entries in zip(asked.tolist(), found, strict=True):
                logprobs[i] = entries
        return Sampled(tokens, logprobs, np.flatnonzero(~valid))


class Sampler:
    """State by permanent row: parameters as arrays, so that a step reads them with one indexing operation."""

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        device: torch.device | str = "cpu",
        processors: Sequence[Callable[[int, int], LogitsProcessor]] = DEFAULT_PROCESSORS,
        draws: Draws = TORCH,
    ):
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.draws = draws
        self.processors = [make(vocab_size, max_rows) for make in processors]
        self.uses = np.zeros((len(self.processors), max_rows), bool)  # [processor, row]
        self._follow = np.array([p.follows_output for p in self.processors], bool)  # [processor]
        self.joined = np.zeros(max_rows, bool)
        self.generation = np.zeros(max_rows, np.int64)  # how many requests have joined the row: whose it is
        self.temperature = np.zeros(max_rows, np.float32)  # 0: greedy
        self.top_k = np.zeros(max_rows, np.int64)  # 0: off
        self.top_p = np.ones(max_rows, np.float64)
        self.min_p = np.zeros(max_rows, np.float64)
        self.seed = np.zeros(max_rows, np.uint64)
        self.num_logprobs = np.full(max_rows, -1, np.int64)  # -1: none asked for
        self.chosen: dict[int, tuple[int, ...]] = {}  # by row: tokens to report, in the place of the likeliest

    def join(self, row: int, join: Join) -> None:
        params = join.params
        assert not self.joined[row], f"row {row} is taken"
        assert params.greedy or params.seed is not None, "sampling parameters must be resolved: no seed"
        self.joined[row] = True
        self.generation[row] += 1
        self.temperature[row] = 0 if params.greedy else params.temperature
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = (params.seed or 0) & 0xFFFF_FFFF_FFFF_FFFF
        self.num_logprobs[row] = -1 if params.num_logprobs is None else params.num_logprobs
        if params.logprob_token_ids:
            self.chosen[row] = params.logprob_token_ids
        for used, processor in zip(self.uses, self.processors, strict=True):
            used[row] = processor.join(row, params, join.token_ids, join.num_prompt_tokens)

    def leave(self, row: int) -> None:
        assert self.joined[row], f"row {row} is not in use"
        self.joined[row] = False
        self.chosen.pop(row, None)
        for used, processor in zip(self.uses, self.processors, strict=True):
            if used[row]:
                used[row] = False
                processor.leave(row)

    def observe(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """rows [N], tokens [N]: tokens that are final, in sequence order for each row."""
        if not self.uses.any():
            return
        for used, processor in zip(self.uses, self.processors, strict=True):
            if processor.follows_output:
                for i in np.flatnonzero(used[rows]).tolist():
                    processor.observe(int(rows[i]), int(tokens[i]))

    def follow_output(self, rows: np.ndarray) -> np.ndarray:
        """[N] bool: for which of `rows` what is chosen next depends on what has been observed."""
        return self.uses[self._follow][:, rows].any(0)

    def __call__(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, pick: Pick | None = None) -> Sampled:
        """logits [S, V] fp32 (may be changed), rows [S] int64, positions [S] int64: index in the sequence of the token
        to be drawn. pick: how rows that are not greedy get theirs; None: a draw."""
        if not len(rows):
            return Sampled(np.empty(0, np.int64), [])
        launched = self.launch(logits, rows, positions, pick)
        return launched.read([tensor.cpu().numpy() for tensor in launched.tensors])

    def launch(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, pick: Pick | None = None
    ) -> DeviceSampled:
        """All of a call but the wait for what comes of it. S >= 1."""
        assert logits.shape == (len(rows), self.vocab_size) and logits.dtype == torch.float32
        num_logprobs = self.num_logprobs[rows]
        asked = np.flatnonzero(num_logprobs >= 0)
        at = upload(asked, logits.device) if len(asked) else None
        changing = self._users(rows, keeps_argmax=False)
        raw = logits[at] if at is not None and changing else None
        for processor in changing:
            logits = processor.apply(logits, rows)
        tokens, valid = self._choose(logits, rows, positions, pick)
        if at is None:
            return DeviceSampled((tokens, valid), num_logprobs)
        if raw is None:
            raw = logits if len(asked) == len(rows) else logits[at]
        columns = find_logprobs(raw, tokens[at], int(num_logprobs.max()))
        if chosen := [(i, self.chosen[row]) for i, row in enumerate(rows[asked].tolist()) if row in self.chosen]:
            columns = with_chosen(columns, raw, *self._uploaded(chosen, raw.device))
        return DeviceSampled((tokens, valid, *columns), num_logprobs)

    def _uploaded(self, chosen: list[tuple[int, tuple[int, ...]]], device: torch.device) -> tuple[Tensor, Tensor]:
        """[(i, ids)] -> the i [C] and their ids [C, m], those of shorter lists filled up."""
        ids = np.zeros((len(chosen), max(len(each) for _, each in chosen)), np.int64)
        for row, (_, each) in zip(ids, chosen, strict=True):
            row[: len(each)] = each
        return upload(np.array([i for i, _ in chosen]), device), upload(ids, device)

    def choose(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, pick: Pick | None = None) -> np.ndarray:
        """The draw alone, with no processors that change logits and no report: for guessing what a call would give."""
        return self._choose(logits, rows, positions, pick)[0].cpu().numpy()

    def failure(self, row: int) -> str | None:
        """Why a processor has left the row nothing to choose, where that is no choice of the request's."""
        found = (processor.failures.get(row) for processor in self.processors if hasattr(processor, "failures"))
        return next((why for why in found if why is not None), None)

    def check(self) -> None:
        """No state outlives its request."""
        assert not (self.uses & ~self.joined).any()
        assert all(self.joined[row] for row in self.chosen)
        for used, processor in zip(self.uses, self.processors, strict=True):
            states = getattr(processor, "states", {})
            assert all(used[row] for row in states), type(processor).__name__

    def _users(self, rows: np.ndarray, keeps_argmax: bool) -> list[LogitsProcessor]:
        if not self.uses.any():
            return []
        needed = self.uses[:, rows].any(1)
        return [p for p, used in zip(self.processors, needed, strict=True) if used and p.keeps_argmax == keeps_argmax]

    def _choose(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, pick: Pick | None = None
    ) -> tuple[Tensor, Tensor]:
        """-> tokens [S] int64, and which logits rows had a usable distribution [S] bool. Of the others the token is any
        of the vocabulary."""
        random = np.flatnonzero(self.temperature[rows] > 0)
        if len(random) < len(rows):
            tokens, valid = likeliest(logits)
        else:
            tokens = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
            valid = torch.ones(len(rows), dtype=torch.bool, device=logits.device)
        for start in range(0, len(random), self.draws.num_rows):
            chunk = random[start : start + self.draws.num_rows]
            at = upload(chunk, logits.device)
            part = logits[start : start + self.draws.num_rows] if len(random) == len(rows) else logits[at]
            probs = self.probabilities(part, rows[chunk])
            where = self.seed[rows[chunk]], positions[chunk]
            drawn, fine = self.draws.draw(probs, *where) if pick is None else pick(probs, *where, chunk)
            tokens[at], valid[at] = drawn, fine
        return tokens, valid

    def probabilities(self, logits: Tensor, rows: np.ndarray) -> Tensor:
        """logits [C, V] of rows that are not greedy -> what their draws see: [C, V rounded up to BLOCK], not
        normalised."""
        inverse = upload(1 / self.temperature[rows], logits.device)[:, None]
        scaled = logits * inverse
        for processor in self._users(rows, keeps_argmax=True):
            scaled = processor.apply(scaled, rows)
        probs = torch.softmax(pad_to_blocks(scaled), -1)
        self.draws.filter(probs, self.top_k[rows], self.top_p[rows], self.min_p[rows])
        return probs


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[S, V] -> tokens [S] int64, and whether the logit of each is a number [S] bool. On a CPU numpy asks: its calls
    cost less for a few rows."""
    tokens = argmax(logits)
    if logits.device.type != "cpu":
        return tokens, torch.isfinite(logits.gather(1, tokens[:, None])[:, 0])
    found = logits.numpy()[np.arange(len(tokens)), tokens.numpy()]
    return tokens, torch.from_numpy(np.isfinite(found))


def argmax(logits: Tensor) -> Tensor:
    """[S, V] -> [S] int64, the lowest id among equals. numpy's is far faster than torch's on a CPU."""
    return torch.from_numpy(logits.numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1)
