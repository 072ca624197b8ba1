"""From logits to tokens. The order of the steps is vLLM V1's:

1. the log-probabilities to report come from the logits as the model gave them;
2. processors that can change the argmax (processors.py), each only while some request uses it;
3. greedy rows end here: the likeliest token, the lowest id among equals;
4. temperature, then processors that keep the argmax, then min-p, top-k, top-p and one draw per row (draw.py).

Invariant: what a row gets depends on its own logits, parameters and output only, never on its neighbours. The random
numbers of a draw are a function of (seed, position); see uniform.py.

The sampler knows nothing of requests' names, of the scheduler, or of which tokens end a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from minivllm.plan import PositionLogprobs
from minivllm.request import SamplingParams
from minivllm.sampling.base import LogitsProcessor, Sampled
from minivllm.sampling.draw import pad_to_blocks
from minivllm.sampling.draws import TORCH, Draws
from minivllm.sampling.logprobs import position_logprobs
from minivllm.sampling.processors import DEFAULT_PROCESSORS
from minivllm.upload import upload

# (probs [C, V] after all filters, seeds [C], positions [C], which logits rows of the call [C]) -> tokens, valid [C]
Pick = Callable[[Tensor, np.ndarray, np.ndarray, np.ndarray], tuple[Tensor, Tensor]]


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
        self.joined = np.zeros(max_rows, bool)
        self.temperature = np.zeros(max_rows, np.float32)  # 0: greedy
        self.top_k = np.zeros(max_rows, np.int64)  # 0: off
        self.top_p = np.ones(max_rows, np.float64)
        self.min_p = np.zeros(max_rows, np.float64)
        self.seed = np.zeros(max_rows, np.uint64)
        self.num_logprobs = np.full(max_rows, -1, np.int64)  # -1: none asked for

    def join(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """token_ids may hold output already: a request that resumes after a preemption."""
        assert not self.joined[row], f"row {row} is taken"
        assert params.greedy or params.seed is not None, "sampling parameters must be resolved: no seed"
        self.joined[row] = True
        self.temperature[row] = 0 if params.greedy else params.temperature
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = (params.seed or 0) & 0xFFFF_FFFF_FFFF_FFFF
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        for used, processor in zip(self.uses, self.processors, strict=True):
            used[row] = processor.join(row, params, token_ids, num_prompt_tokens)

    def leave(self, row: int) -> None:
        assert self.joined[row], f"row {row} is not in use"
        self.joined[row] = False
        for used, processor in zip(self.uses, self.processors, strict=True):
            if used[row]:
                used[row] = False
                processor.leave(row)

    def observe(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """rows [N], tokens [N]: tokens that are final, in sequence order for each row."""
        if not self.uses.any():
            return
        for used, processor in zip(self.uses, self.processors, strict=True):
            for i in np.flatnonzero(used[rows]).tolist():
                processor.observe(int(rows[i]), int(tokens[i]))

    def __call__(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, pick: Pick | None = None) -> Sampled:
        """logits [S, V] fp32 (may be changed), rows [S] int64, positions [S] int64: index in the sequence of the token
        to be drawn. pick: how rows that are not greedy get theirs; None: a draw."""
        assert logits.shape == (len(rows), self.vocab_size) and logits.dtype == torch.float32
        if not len(rows):
            return Sampled(np.empty(0, np.int64), [])
        asked = np.flatnonzero(self.num_logprobs[rows] >= 0)
        changing = self._users(rows, keeps_argmax=False)
        raw = logits[torch.from_numpy(asked).to(logits.device)] if len(asked) and changing else None
        for processor in changing:
            logits = processor.apply(logits, rows)
        tokens, invalid = self._choose(logits, rows, positions, pick)
        if raw is None and len(asked):
            raw = logits if len(asked) == len(rows) else logits[torch.from_numpy(asked).to(logits.device)]
        logprobs: list[PositionLogprobs | None] = [None] * len(rows)
        if raw is not None:
            self._report(logprobs, raw, asked, rows, tokens)
        return Sampled(tokens, logprobs, invalid)

    def choose(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, pick: Pick | None = None) -> np.ndarray:
        """The draw alone, with no processors that change logits and no report: for guessing what a call would give."""
        return self._choose(logits, rows, positions, pick)[0]

    def check(self) -> None:
        """No state outlives its request."""
        assert not (self.uses & ~self.joined).any()
        for used, processor in zip(self.uses, self.processors, strict=True):
            states = getattr(processor, "states", {})
            assert all(used[row] for row in states), type(processor).__name__

    def _users(self, rows: np.ndarray, keeps_argmax: bool) -> list[LogitsProcessor]:
        if not self.uses.any():
            return []
        needed = self.uses[:, rows].any(1)
        return [p for p, used in zip(self.processors, needed, strict=True) if used and p.keeps_argmax == keeps_argmax]

    def is_plain(self, rows: np.ndarray) -> bool:
        """Whether these requests want a token each and nothing else: `launch` is then all that there is to do."""
        return not self.uses[:, rows].any() and bool((self.num_logprobs[rows] < 0).all())

    def launch(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, pick: Pick | None = None
    ) -> tuple[Tensor, Tensor]:
        """-> tokens [S] int64, and which logits rows had a usable distribution [S] bool; both where the logits are."""
        random = np.flatnonzero(self.temperature[rows] > 0)
        if len(random) < len(rows):
            tokens = argmax(logits)
            valid = torch.isfinite(logits.gather(1, tokens[:, None])[:, 0])
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

    def _choose(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, pick: Pick | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """-> tokens [S], and which logits rows had no usable distribution."""
        tokens, valid = (x.cpu().numpy() for x in self.launch(logits, rows, positions, pick))
        invalid = np.flatnonzero(~valid)
        if len(invalid):
            some = torch.nan_to_num(logits[torch.from_numpy(invalid).to(logits.device)], nan=float("-inf"))
            tokens[invalid] = argmax(some).cpu().numpy()
        return tokens, invalid

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

    def _report(self, out: list, raw: Tensor, asked: np.ndarray, rows: np.ndarray, tokens: np.ndarray) -> None:
        counts = self.num_logprobs[rows[asked]]
        entries = position_logprobs(raw, tokens[asked], int(counts.max()))
        for i, count, entry in zip(asked.tolist(), counts.tolist(), entries, strict=True):
            out[i] = entry[: count + 1]


def argmax(logits: Tensor) -> Tensor:
    """[S, V] -> [S] int64, the lowest id among equals. numpy's is far faster than torch's on a CPU."""
    return torch.from_numpy(logits.numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1)
