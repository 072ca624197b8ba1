"""Fakes that need no weights and no torch.

FakeWorker is a model whose next token is a hash of all tokens before it, read back through the block tables from a KV
"cache" that holds token ids and positions. So a wrong block, slot, length or position turns into a wrong token.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from minivllm.batch import BatchKey, InputSizes
from minivllm.config import EngineConfig
from minivllm.engine.build import build_kv, build_scheduler
from minivllm.engine.core import EngineCore
from minivllm.executor.background import FailStop
from minivllm.features import INPUT_BUILDERS
from minivllm.kv_groups import FULL, KVGroup, KVGroups
from minivllm.plan import AsyncOutput, Delta, StepOutput, StepPlan
from minivllm.request import BeamSearchParams, EngineRequest, Item, SamplingParams, sequence_ids
from minivllm.runner.inputs import Rows
from minivllm.scheduler.base import Limits
from minivllm.scheduler.beam_search import BeamSearch
from minivllm.spec_decode.ahead import DraftsAhead

VOCAB = 100
EOS = 7
MAX_RIVALS = 6  # the fake model reports so many tokens a position: beams of width 3 at most
NUM_HOST_BLOCKS = 12  # few, so that the host is full at times
COSTS = {"seconds_per_token": 1e-3, "seconds_per_block": 1e-3}  # what is worth moving: more than half a block of 4


def next_token(tokens: list[int], positions: list[int] | None = None, adapters: Sequence[int] = ()) -> int:
    """The fake model. Correct positions are 0, 1, 2 ... adapters: by whose weights each token's K and V were made."""
    payload = _bytes(tokens, positions) + (bytes(adapters) if any(adapters) else b"")
    return int.from_bytes(hashlib.blake2b(payload, digest_size=8).digest(), "little") % VOCAB


def _bytes(tokens: list[int], positions: list[int] | None) -> bytes:
    return array("q", tokens).tobytes() + array("q", positions or range(len(tokens))).tobytes()


def likeliest(tokens: list[int], positions: list[int] | None = None) -> list[tuple[int, float, int]]:
    """The fake model's distribution: next_token is likeliest, its rivals are hashes too. (token, log-probability,
    rank), the token taken first and again among the likeliest, as a sampler reports it."""
    first = next_token(tokens, positions)
    hashes = hashlib.blake2b(_bytes(tokens, positions), digest_size=12, person=b"rivals").digest()
    rivals = {(first + 1 + i % (VOCAB - 1)) % VOCAB for i in hashes}
    ranked = [first, *sorted(rivals - {first})][:MAX_RIVALS]
    top = [(token, -0.4 - 0.3 * rank - token / 1000, rank + 1) for rank, token in enumerate(ranked)]
    return [top[0], *top]


def beam_oracle(prompt: list[int], params: BeamSearchParams, max_model_len: int = 10**9) -> list[list[int]]:
    """The rules of beam search over the fake model, with no engine in between."""
    eos = () if params.ignore_eos else (EOS,)
    search = BeamSearch(params, eos, min(params.max_tokens, max_model_len - len(prompt)))
    while not search.done:
        search.advance([likeliest([*prompt, *beam.token_ids]) for beam in search.running])
    return [list(finished.beam.token_ids) for finished in search.finished]


def oracle(prompt: list[int], params: SamplingParams, max_model_len: int = 10**9, adapter: str = "") -> list[int]:
    """What the fake model answers to one request alone, with no engine in between."""
    tokens = list(prompt)
    while True:
        token = next_token(tokens, adapters=[len(adapter)] * len(tokens))
        tokens.append(token)
        num_output = len(tokens) - len(prompt)
        stopped = num_output >= params.min_tokens and token in (*params.eos_token_ids, *params.stop_token_ids)
        if stopped or num_output == params.max_tokens or len(tokens) >= max_model_len:
            return tokens[len(prompt) :]


class FakeWorker:
    def __init__(
        self,
        sizes: InputSizes,
        inputs: str = "persistent",
        num_drafts: int = 0,
        max_loras: int = 0,
        windows: Sequence[int | None] = (None,),
    ):
        """windows: of the KV groups. The first keeps all tokens; what the others keep must be the same."""
        self.sizes, self.windows = sizes, windows
        self.num_drafts = num_drafts  # proposed after each token; some right, some wrong, some none
        self.inputs = INPUT_BUILDERS.get(inputs)(sizes)
        self.rows = Rows(sizes.max_rows)
        self.reports: set[str] = set()  # who asked for log-probabilities
        self.max_loras = max_loras
        self.padding = 2  # dummy token rows in each batch
        num_slots = (sizes.spare_block + 1) * sizes.block_size
        self.adapter_of = np.zeros(sizes.max_rows, np.int64)  # row -> adapter, which is the length of its name
        self.kv = np.full((4, num_slots), -1, np.int64)  # token id, position, adapter and group of each slot
        self.host = np.full((4, NUM_HOST_BLOCKS * sizes.block_size), -1, np.int64)
        self.items = FakeItems()

    def hold_item(self, digest: str, content: bytes) -> None:
        self.items.hold(digest, content)

    def drop_item(self, digest: str) -> None:
        self.items.drop(digest)

    def execute(self, plan: StepPlan) -> StepOutput:
        self.items.take(plan)
        for req_id in plan.leaves:
            if req_id in self.rows.of:  # not there if the step that it should have joined in failed
                self.rows.leave(req_id)
        self.reports -= set(plan.leaves)
        self.reports |= {join.req_id for join in plan.joins if join.params.logprobs is not None}
        rows = [self.rows.join(join.req_id) for join in plan.joins]
        self.adapter_of[rows] = [len(join.adapter) for join in plan.joins]
        self.inputs.apply(plan, rows)
        self._move(self.kv, self.host, plan.swap_out)
        self._move(self.kv, self.kv, plan.copies)
        self._move(self.host, self.kv, plan.swap_in)
        if not plan.num_tokens:
            return StepOutput()
        batch = self.inputs.build(plan, BatchKey(plan.total_tokens + self.padding))
        written = batch.slot_mapping[..., : batch.num_tokens]
        assert len(np.unique(written)) == written.size, "two tokens share a slot"
        adapters = np.repeat(self.adapter_of[batch.rows], np.diff(batch.query_start))
        assert len(set(adapters[adapters > 0])) <= self.max_loras, "more adapters in a step than slots"
        adapters = np.pad(adapters, (0, self.padding))
        for group, slots in enumerate(np.atleast_2d(batch.slot_mapping)):
            self.kv[:3, slots] = batch.token_ids, batch.positions, adapters
            self.kv[3, slots] = group
        out = StepOutput()
        requests, accepts = [], True
        samples = zip(
            batch.sample_requests.tolist(), batch.sample_tokens.tolist(), batch.draft_tokens.tolist(), strict=True
        )
        for r, at, draft in samples:
            num_behind = int(batch.query_start[r + 1]) - 1 - at
            assert (draft < 0) == (num_behind == 0) and num_behind <= len(plan.drafts.get(batch.req_ids[r], ()))
            if requests and requests[-1] == r and not accepts:
                continue  # behind a draft that was refused
            prefix, positions, adapters = self._prefix(batch, r, int(batch.positions[at]) + 1)
            token = next_token(prefix, positions, adapters)
            accepts = token == draft
            requests.append(r)
            out.tokens.setdefault(batch.req_ids[r], []).append(token)
            if batch.req_ids[r] in self.reports:
                out.logprobs.setdefault(batch.req_ids[r], []).append(likeliest(prefix, positions))
            if not accepts and self.num_drafts:
                out.drafts[batch.req_ids[r]] = self._propose([*prefix, token], adapters[0])
        tokens = [token for r in dict.fromkeys(requests) for token in out.tokens[batch.req_ids[r]]]
        self.inputs.append(batch, np.array(requests, np.int64), np.array(tokens, np.int64))
        return out

    def _propose(self, tokens: list[int], adapter: int) -> list[int]:
        """The model's own next tokens, from a place on wrong; also longer than anybody can use."""
        chosen = random.Random(hash(tuple(tokens)))
        drafts: list[int] = []
        for _ in range(chosen.randrange(self.num_drafts + 1)):
            right = next_token(tokens + drafts, adapters=[adapter] * (len(tokens) + len(drafts)))
            drafts.append(right if chosen.random() < 0.7 else chosen.randrange(VOCAB))
        return drafts

    def _move(self, source: np.ndarray, target: np.ndarray, moves: list[tuple[int, int]]) -> None:
        size = self.sizes.block_size
        content = [source[:, a * size : (a + 1) * size].copy() for a, _ in moves]  # one batch: reads before writes
        for (_, b), block in zip(moves, content, strict=True):
            target[:, b * size : (b + 1) * size] = block

    def _prefix(self, batch, r: int, num_tokens: int) -> tuple[list[int], list[int], list[int]]:
        """Token ids, positions and adapters of a request as the cache has them."""
        block_size = self.sizes.block_size
        at = np.arange(num_tokens)
        tables = batch.block_tables.reshape(len(self.windows), len(batch.req_ids), -1).astype(np.int64)
        kept = [self.kv[:, table[r, at // block_size] * block_size + at % block_size] for table in tables]
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, num_tokens - window)
            assert np.array_equal(kept[group][:3, first:], kept[0][:3, first:]), f"group {group} has lost its window"
            assert (kept[group][3, first:] == group).all(), f"group {group} reads another one's block"
        tokens, positions, adapters, _ = kept[0]
        return tokens.tolist(), positions.tolist(), adapters.tolist()


class FakeItems:
    """What a worker has of items: their contents, and which of them are ready. Whatever a plan asks of one that is not
    held, or computes for a request whose items are not ready, fails."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.ready: set[str] = set()
        self.of: dict[str, set[str]] = {}  # by request
        self.num_encoded: list[int] = []  # of each plan
        self.most = 0  # that were ready at once

    def hold(self, digest: str, content: bytes) -> None:
        assert digest not in self.contents, f"{digest} was carried twice"
        self.contents[digest] = content

    def drop(self, digest: str) -> None:
        del self.contents[digest]

    def take(self, plan: StepPlan) -> None:
        self.ready -= set(plan.forget)
        assert all(digest in self.contents for digest in plan.encode), "an item is made ready of what is not here"
        self.ready |= set(plan.encode)
        self.num_encoded.append(len(plan.encode))
        self.most = max(self.most, len(self.ready))
        for req_id in plan.leaves:
            self.of.pop(req_id, None)
        self.of |= {join.req_id: {item.digest for item in join.items} for join in plan.joins}
        for req_id in plan.num_tokens:
            assert self.of[req_id] <= self.ready, f"{req_id} runs without its items"


class SlowStream:
    """An executor as unkind as a device's stream may be: a plan runs behind those before it, as late as anybody can
    wait, or by chance (with a seed) earlier. So whatever the control plane changes of a plan that is in flight, or
    takes for done, turns into a wrong token."""

    def __init__(self, worker: FakeWorker, seed: int | None = None):
        self.run = FailStop(DraftsAhead(lambda plan: worker.execute(plan)))
        self._chance = None if seed is None else random.Random(seed)
        self._queue: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._worker = worker

    def submit(self, plan: StepPlan) -> AsyncOutput[StepOutput]:
        future: Future[StepOutput] = Future()
        self._queue.append((partial(self.run, plan), future))
        while self._queue and self._chance and self._chance.random() < 0.4:
            self.run_one()
        return AsyncOutput(future.done, lambda: self._run_until(future))

    def tell(self, method: str, *args: Any) -> None:
        self._queue.append((partial(getattr(self._worker, method), *args), Future()))

    def _run_until(self, future: Future[StepOutput]) -> StepOutput:
        """Whoever waits for a step is what makes it run."""
        while not future.done():
            self.run_one()
        return future.result()

    def run_one(self) -> None:
        run, future = self._queue.popleft()
        try:
            future.set_result(run())
        except Exception as error:
            future.set_exception(error)

    def shutdown(self) -> None:
        self._queue.clear()


class FakeEngine:
    """The real control plane of a configuration over the fake model. Its steps run as late as they can."""

    def __init__(
        self,
        num_blocks: int = 1000,
        max_model_len: int | None = None,
        overlap: int | None = None,
        stream_seed: int | None = None,
        windows: Sequence[int | None] = (None,),
        item_slots: int | None = None,
        **overrides,
    ):
        """overlap: instead of the configuration's, which has a bound. stream_seed: of SlowStream. windows: of the KV
        groups, each of one layer. item_slots: items that may be ready at once. Each is one position of an encoder."""
        overrides = {"kv.num_blocks": num_blocks, "kv.block_size": 4, "debug.check": True, **overrides}
        self.config = config = EngineConfig.build("v1", overrides)
        max_model_len = max_model_len or min(num_blocks * config.kv.block_size, 512)
        groups = KVGroups(tuple(KVGroup(FULL._replace(window=w), (i,)) for i, w in enumerate(windows)))
        self.kv = build_kv(config, num_blocks, max_model_len, NUM_HOST_BLOCKS, COSTS, groups)
        # Whose scheduler must itself refuse what is too long for the pool.
        paged = config.kv.allocation == "paged" and groups.windows == (None,)
        self.max_model_len = max_model_len if paged else min(max_model_len, self.kv.capacity + 1)
        self.limits = limits = Limits(
            *(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens),
            *(self.max_model_len, self.kv.capacity, config.scheduler.encoder_budget or 1, item_slots),
        )
        lookahead = config.spec_decode.k if "draft" in config.spec_decode.method else 0
        scheduler = build_scheduler(config, self.kv, limits, lookahead)
        self.scheduler = scheduler.base  # to look at; requests go through the core
        limits_of_inputs = config.scheduler.max_num_seqs, self.max_model_len, config.kv.block_size, num_blocks
        sizes = InputSizes(*limits_of_inputs, len(windows))
        num_drafts = config.spec_decode.k if config.spec_decode.method != "none" else 0
        max_loras = config.lora.max_loras if config.lora.enabled else 0
        self.worker = FakeWorker(sizes, config.runner.inputs, num_drafts, max_loras, windows)
        self.now = 0.0
        stream = SlowStream(self.worker, stream_seed)
        overlap = overlap or config.engine.overlap
        self.core = EngineCore(scheduler, stream, clock=lambda: self.now, check=True, overlap=overlap)
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}

    def add(
        self,
        req_id: str,
        prompt: list[int],
        priority: int = 0,
        cache_salt: str = "",
        group: str = "",
        adapter: str = "",
        client: str = "",
        items: Sequence[str] = (),
        **params,
    ):
        """The request's SamplingParams. items: digests."""
        params = SamplingParams(temperature=0.0, eos_token_ids=(EOS,), **params)
        of_request = {"priority": priority, "adapter": adapter, "cache_salt": cache_salt, "group": group}
        self.core.add(EngineRequest(req_id, prompt, params, self.now, **of_request, client=client, **beside(items)))
        self.tokens[req_id] = []
        return params

    def add_beams(
        self, request_id: str, prompt: list[int], beam: BeamSearchParams, items: Sequence[str] = ()
    ) -> list[str]:
        """The ids of its outputs. items: digests."""
        eos = () if beam.ignore_eos else (EOS,)
        room = self.max_model_len - len(prompt)
        params = beam.step.replace(eos_token_ids=eos, max_tokens=min(beam.max_tokens, room))
        ids = sequence_ids(request_id, beam.beam_width)
        group = request_id if len(ids) > 1 else ""
        self.core.add(EngineRequest(ids[0], prompt, params, self.now, 0, "", "", group, beam, **beside(items)))
        self.tokens.update({req_id: [] for req_id in ids})
        return ids

    def step(self) -> list[Delta]:
        self.now += 1.0
        deltas = self.core.step()
        for delta in deltas:
            assert delta.req_id not in self.reasons, "a finished request got a delta"
            assert delta.error is None, delta.error
            self.tokens[delta.req_id] += delta.token_ids
            if delta.finish_reason:
                self.reasons[delta.req_id] = delta.finish_reason
        return deltas

    def run(self, max_steps: int = 3000) -> dict[str, list[int]]:
        for _ in range(max_steps):
            if not self.core.has_work:
                return self.tokens
            self.step()
        raise AssertionError(f"{len(self.core._live)} requests are not done after {max_steps} steps")


def beside(items: Sequence[str]) -> dict[str, Any]:
    """Fields of a request: items of its first token, by their digests."""
    contents = {digest: digest.encode() for digest in items}
    return {"items": tuple(Item(0, 1, digest) for digest in items), "contents": contents}
