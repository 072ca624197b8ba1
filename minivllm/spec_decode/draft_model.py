"""Drafts from a smaller model, one token a pass (Leviathan et al. 2023; Chen et al. 2023).

The draft model keeps K and V of its own, under the block ids of the target: the same tables, the same slots, so there
is one pool, one count of free blocks and one prefix cache. A block's bytes are both models' together. For this to hold
the draft model computes, in each step, every token that the target computes: a published block is valid for both. Where
the target's layers are several KV groups, all of the draft model's belong to group 0, which keeps all tokens.

Positions of one request, after a step that left `known` tokens, the newest of which the target has not computed:

    | both models computed | catch up | newest |  d1   d2 ... d(k-1) |  dk
    0                     done             known
                            one pass, k drafts' first      a pass each     proposed, computed by nobody

Drafts that the target refuses leave wrong K and V behind; `done` falls back to the accepted ones, and the slots are
written again. The draft model writes behind the known tokens, where it has slots (Proposer.lookahead); where the table
ends, drafting ends.

Drafts are drawn as the request's own tokens would be: with its temperature and filters, and under acceptance `match`
with its very noise. So at any temperature the two models tend to draw the same token, as far as their distributions
agree (a maximal coupling would be better, but needs both distributions at once). Under `rejection` the noise is
another one, and the distribution of each draft is kept for the verifier.

The model may also be the target's own first layers, under the target's final norm and head (self-speculation, as in
Draft & Verify, Zhang et al. 2023, and LayerSkip, Elhoushi et al. 2024). Then there is no K and V to keep: the first
layers of the target's cache are exactly the draft model's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, nn

from minivllm.attention.base import AttentionBackend
from minivllm.compile.context import run_forward
from minivllm.lora.slots import AdapterSlots, NoAdapters
from minivllm.plan import Join, StepPlan
from minivllm.sampling.pick import Pick
from minivllm.spec_decode.base import Drafts, Target
from minivllm.upload import upload

if TYPE_CHECKING:
    from minivllm.batch import InputBatch

NO_ADAPTERS = NoAdapters()
OWN_NOISE = np.uint64(0xD5A4_7E11_0C3B_96F2)  # turns a request's seed into the one that its drafts are drawn with


def first_layers(model: nn.Module, num_layers: int) -> nn.Module:
    """The model without its later layers; all weights are shared."""
    early = copy.copy(model)
    early._modules = dict(model._modules)  # of its own, so that the next line leaves the model alone
    early.layers = nn.ModuleList(list(model.layers)[:num_layers])
    early.attention_layers = model.attention_layers[:num_layers]
    return early


class DraftModelProposer:
    def __init__(
        self,
        target: Target,
        model: nn.Module,
        attention: AttentionBackend,
        kv_caches: list[Tensor],
        own_kv: bool,
        logits: Callable[[Tensor], Tensor] | None = None,
        adapters: AdapterSlots | NoAdapters = NO_ADAPTERS,
    ):
        """own_kv: kv_caches are the draft model's alone, not the target's. logits: None: the draft model's own.
        adapters: those that its layers have been given."""
        asked = target.config.spec_decode
        self.model, self.attention, self._caches = model, attention, kv_caches
        self.own_kv, self._adapters = own_kv, adapters
        self.logits = model.logits if logits is None else logits
        self.shift = 0  # how far before the newest token lies what is computed for the next one
        self.kv_caches = kv_caches if own_kv else []
        self.inputs, self.make_key = target.inputs, target.make_key
        self.sampler, self.throttle = target.sampler, target.throttle
        self.k = self.lookahead = asked.k
        self.keeps_probs = asked.acceptance == "rejection"
        self.block_size = target.config.kv.block_size
        self.num_groups = 1 + max(layer.group for layer in target.model.attention_layers)  # each gets as many blocks
        self.max_model_len = target.max_model_len
        max_rows = target.config.scheduler.max_num_seqs
        self.done = np.zeros(max_rows, np.int64)  # positions whose K and V are right; -1: the request is new
        self.num_slots = np.zeros(max_rows, np.int64)  # of the row's block table
        self.last = np.zeros(max_rows, np.int64)  # no draft at or behind this position can become output
        self.probs: dict[int, list[Tensor]] = {}  # by row: what each of its drafts was drawn from

    def join(self, row: int, join: Join) -> None:
        longest = min(join.num_prompt_tokens + (join.params.max_tokens or self.max_model_len), self.max_model_len)
        self.last[row] = longest - 1
        self.done[row] = -1
        self.num_slots[row] = 0
        self.throttle.reset(row)

    def leave(self, row: int) -> None:
        self.probs.pop(row, None)  # the rest is written again by join()

    def draft_probs(self, row: int, place: int) -> Tensor | None:
        return self.probs[row][place] if row in self.probs else None

    def propose(self, plan: StepPlan, batch: InputBatch, tokens: Drafts, hidden: Tensor) -> Drafts:
        rows = dict(zip(batch.req_ids, batch.rows.tolist(), strict=True))
        for row in rows.values():  # others may have drafts that wait for their turn
            self.probs.pop(row, None)
        for req_id, blocks in plan.new_blocks.items():
            self.num_slots[rows[req_id]] += len(blocks) // self.num_groups * self.block_size
        computed = self._settle(plan, rows, tokens)
        room = np.minimum(self.num_slots, self.last - 1)  # the newest token needs a slot, a draft a place
        known = {r: computed[r] + 1 for r in tokens if computed[r] < room[rows[r]]}
        depth = self.throttle.depth([rows[r] for r in known], self.k)
        known = known if depth else {}
        first = self._catch_up(rows, {**computed, **known}, known)
        return self._draft(rows, known, first, depth)

    def run_model(self, batch: InputBatch) -> Tensor:
        """-> hidden states [padded T, hidden]."""
        self._adapters.prepare(batch.rows, batch.query_start)
        return self._run_forward(self._forward, batch)

    def _run_forward(self, forward: Callable[[InputBatch], Tensor], batch: InputBatch) -> Tensor:
        own = batch.of_group(0) if self.own_kv else batch
        return run_forward(forward, own, self.attention, self._caches, self.model.attention_layers)

    def _forward(self, batch: InputBatch) -> Tensor:
        device = self._caches[0].device
        return self.model(self.model.embed(upload(batch.token_ids, device)), upload(batch.positions, device))

    def _settle(self, plan: StepPlan, rows: Mapping[str, int], tokens: Drafts) -> dict[str, int]:
        """How many of each request's tokens the target has computed and kept; learns from what became of drafts."""
        computed = {}
        for req_id, num_new in plan.num_tokens.items():
            row, num_drafts = rows[req_id], len(plan.drafts.get(req_id, ()))
            num_accepted = len(tokens[req_id]) - 1 if num_drafts else 0
            if num_drafts:
                self.throttle.learn(row, 0, num_drafts, num_accepted)
            if self.done[row] < 0:
                self.done[row] = plan.start[req_id]  # found in the prefix cache, or brought back: for both models
            computed[req_id] = plan.start[req_id] + num_new - num_drafts + num_accepted
            self.done[row] = min(self.done[row], computed[req_id]) if self.own_kv else computed[req_id]
        return computed

    def _catch_up(self, rows: Mapping[str, int], ends: Mapping[str, int], known: Mapping[str, int]) -> Drafts:
        """Compute each request's tokens up to ends[request]. -> the first draft of each in `known`."""
        plan = StepPlan(step=0)
        for req_id, end in ends.items():
            start = int(self.done[rows[req_id]])
            if start < end:
                plan.num_tokens[req_id], plan.start[req_id] = end - start, start
                self.done[rows[req_id]] = end
        return {r: [token] for r, token in self._pass(plan).items() if r in known} if plan.num_tokens else {}

    def _draft(self, rows: Mapping[str, int], known: Mapping[str, int], drafts: Drafts, depth: int) -> Drafts:
        """Extend drafts by one token a pass, to `depth` or where a request's slots or length end."""
        for place in range(1, depth):
            plan = StepPlan(step=0)
            for req_id, found in drafts.items():
                row, newest = rows[req_id], known[req_id] + place - 1
                at = newest - self.shift
                if len(found) == place and at < self.num_slots[row] and newest + 1 < self.last[row]:
                    plan.num_tokens[req_id], plan.start[req_id], plan.drafts[req_id] = 1, at, found
                    self.done[row] = at + 1
            if not plan.num_tokens:
                break
            for req_id, token in self._pass(plan).items():
                drafts[req_id].append(token)
        return drafts

    def _pass(self, plan: StepPlan) -> dict[str, int]:
        """One forward. -> the next token of each request whose last token is in the plan."""
        batch = self.inputs.build(plan, self.make_key(plan.total_tokens))
        hidden = self.run_model(batch)
        if not len(batch.sample_tokens):
            return {}
        logits = self.logits(hidden[upload(batch.sample_tokens, hidden.device)])
        rows = batch.rows[batch.sample_requests]
        tokens = self._choose(logits, rows, batch.positions_of(batch.sample_tokens, batch.sample_requests) + 1)
        return {batch.req_ids[i]: t for i, t in zip(batch.sample_requests.tolist(), tokens.tolist(), strict=True)}

    def _choose(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        if not self.keeps_probs:
            return self.sampler.choose(logits, rows, positions)
        return self.sampler.choose(logits, rows, positions, self._keeping(rows))

    def _keeping(self, rows: np.ndarray) -> Pick:
        """A pick (see sampling/pick.py) that notes the distributions it draws from."""

        def pick(probs: Tensor, seeds: np.ndarray, positions: np.ndarray, which: np.ndarray) -> tuple[Tensor, Tensor]:
            for row, q in zip(rows[which].tolist(), probs, strict=True):
                self.probs.setdefault(row, []).append(q)
            return self.sampler.draws.draw(probs, seeds ^ OWN_NOISE, positions)

        return pick
