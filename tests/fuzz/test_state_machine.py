"""A state machine over add, abort and step: invariants after each, and the oracle's tokens in the end."""

import pytest
from fakes import FakeEngine, beam_oracle, oracle
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minivllm.errors import NeverFits
from minivllm.request import BeamSearchParams


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from((12, 16, 40)),
        kind=st.sampled_from(("unified", "phased")),
        budget=st.sampled_from((1, 4, 7, 64)),
        windows=st.sampled_from(((None,), (None,), (None, 3), (None, 6, 6), (None, 1, 9))),
        options=st.fixed_dictionaries(
            {
                "scheduler.max_num_seqs": st.sampled_from((1, 3, 8)),
                "scheduler.policy": st.sampled_from(("fcfs", "priority", "fair")),
                "kv.prefix": st.sampled_from(("none", "hash", "radix")),
                "kv.preemption": st.sampled_from(("recompute", "swap", "auto")),
                "kv.fork": st.sampled_from(("share", "lookup")),
                "runner.inputs": st.sampled_from(("rebuild", "persistent", "gather")),
                "debug.preempt_every": st.sampled_from((0, 3)),
                "engine.overlap": st.sampled_from((1, 1, 2)),
                # for the fake: no drafts, drafts, and drafts with lookahead
                "spec_decode.method": st.sampled_from(("none", "ngram", "draft")),
                "scheduler.encoder_budget": st.sampled_from((None, 2, 1000)),
            }
        ),
        item_slots=st.sampled_from((None, 1, 3)),
    )
    def start(self, num_blocks, kind, budget, windows, options, item_slots):
        if options["engine.overlap"] > 1:
            options |= {"kv.preemption": "recompute", "spec_decode.method": "none"}
        self.engine = FakeEngine(
            num_blocks,
            max_model_len=40,
            windows=windows,
            item_slots=item_slots,
            **{
                **options,
                "scheduler.kind": kind,
                "scheduler.chunked_prefill": kind == "unified",
                "scheduler.max_num_batched_tokens": budget if kind == "unified" else 64,
            },
        )
        self.wanted = {}
        self.num_added = 0
        self.searches = {}  # request with beams -> the ids of its outputs

    @rule(
        prompt=st.lists(st.integers(0, 3), min_size=1, max_size=20),
        max_tokens=st.integers(1, 15),
        priority=st.integers(0, 2),
        num_sequences=st.sampled_from((1, 1, 3)),
        items=st.sampled_from(("", "a", "b", "c", "d", "e")),
    )
    def add(self, prompt, max_tokens, priority, num_sequences, items):
        group = f"g{self.num_added}" if num_sequences > 1 else ""
        for _ in range(num_sequences):
            req_id = str(self.num_added)
            self.num_added += 1
            try:
                whose = {"priority": priority, "client": str(priority), "group": group, "items": items}
                params = self.engine.add(req_id, prompt, **whose, max_tokens=max_tokens)
            except NeverFits:
                # Three sequences may be too large together.
                assert group or len(prompt) >= self.engine.max_model_len
            else:
                self.wanted[req_id] = oracle(prompt, params, self.engine.max_model_len)

    @rule(
        prompt=st.lists(st.integers(0, 3), min_size=1, max_size=9),
        width=st.integers(1, 3),
        max_tokens=st.integers(1, 9),
        early_stopping=st.booleans(),
        items=st.sampled_from(("", "a", "f")),
    )
    def search(self, prompt, width, max_tokens, early_stopping, items):
        beam = BeamSearchParams(beam_width=width, max_tokens=max_tokens, early_stopping=early_stopping)
        request_id = str(self.num_added)
        self.num_added += 1
        try:
            ids = self.engine.add_beams(request_id, prompt, beam, items)
        except NeverFits:
            assert width > 1
        else:
            self.wanted.update(zip(ids, beam_oracle(prompt, beam, self.engine.max_model_len), strict=True))
            self.searches[request_id] = ids

    @rule(which=st.integers(0, 100))
    def abort(self, which):
        if self.num_added:
            req_id = str(which % self.num_added)
            ids = self.searches.get(req_id, [req_id])
            if ids[0] not in self.engine.reasons:
                for each in ids:
                    self.wanted.pop(each, None)
            self.engine.core.abort(ids)

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            self.engine.step()

    @invariant()
    def holds(self):
        if hasattr(self, "engine"):
            self.engine.core.scheduler.check()
            for req_id, reason in self.engine.reasons.items():
                if reason in ("stop", "length"):
                    assert self.engine.tokens[req_id] == self.wanted[req_id]

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.run()
            assert {req_id: self.engine.tokens[req_id] for req_id in self.wanted} == self.wanted
            self.engine.step()
            assert not self.engine.worker.rows.of
            items, limits = self.engine.worker.items, self.engine.limits
            assert not items.contents and not items.ready
            assert max(items.num_encoded) <= limits.max_new_items and items.most <= (limits.max_items or items.most)
            assert self.engine.kv.usage.num_free == self.engine.kv.usage.num_total


EngineMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestEngineMachine = EngineMachine.TestCase


def test_a_fork_that_waits_is_given_blocks_beside_a_run_of_others():
    """What the machine found: with a budget of one token, forks take turns, and one gets blocks in a step that the
    other has to itself."""
    options = {"scheduler.max_num_seqs": 3, "scheduler.max_num_batched_tokens": 1, "kv.prefix": "none"}
    engine = FakeEngine(12, 40, **options, **{"kv.fork": "share", "engine.overlap": 2})
    beam = BeamSearchParams(beam_width=2, max_tokens=4)
    ids = engine.add_beams("0", [0, 0, 0, 0], beam)
    engine.run()
    assert [engine.tokens[req_id] for req_id in ids] == list(beam_oracle([0, 0, 0, 0], beam, 40))


def test_beams_whose_blocks_can_never_all_be_there_are_refused():
    """What the machine found: three beams of six tokens are fewer tokens than the pool holds, and more blocks. Phased,
    they were computed together and preempted together for ever."""
    options = {"scheduler.kind": "phased", "scheduler.chunked_prefill": False, "kv.prefix": "none"}
    beam = BeamSearchParams(beam_width=3, max_tokens=5)
    with pytest.raises(NeverFits, match="3 beams may reach 6 tokens each, more than fit into a KV pool of 16 blocks"):
        FakeEngine(16, 40, windows=(None, 6, 6), **options).add_beams("0", [0, 0], beam)
    engine = FakeEngine(18, 40, windows=(None, 6, 6), **options)
    ids = engine.add_beams("0", [0, 0], beam)
    engine.run()
    assert [engine.tokens[req_id] for req_id in ids] == list(beam_oracle([0, 0], beam, 40))
