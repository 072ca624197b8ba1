"""A state machine over add, abort and step: invariants after each, and the oracle's tokens in the end."""

from fakes import FakeEngine, oracle
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minivllm.errors import NeverFits


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from((12, 16, 40)),
        budget=st.sampled_from((1, 4, 7, 64)),
        max_num_seqs=st.sampled_from((1, 3, 8)),
        kind=st.sampled_from(("unified", "phased")),
        prefix=st.sampled_from(("none", "hash", "radix")),
        preemption=st.sampled_from(("recompute", "swap", "auto")),
        inputs=st.sampled_from(("rebuild", "persistent")),
        policy=st.sampled_from(("fcfs", "priority")),
        preempt_every=st.sampled_from((0, 3)),
        method=st.sampled_from(("none", "ngram", "draft")),  # for the fake: no drafts, drafts, and with lookahead
    )
    def start(self, num_blocks, budget, max_num_seqs, kind, prefix, preemption, inputs, policy, preempt_every, method):
        self.engine = FakeEngine(
            num_blocks,
            max_model_len=40,
            **{
                "scheduler.kind": kind,
                "scheduler.chunked_prefill": kind == "unified",
                "scheduler.max_num_batched_tokens": budget if kind == "unified" else 64,
                "kv.preemption": preemption,
                "scheduler.max_num_seqs": max_num_seqs,
                "kv.prefix": prefix,
                "runner.inputs": inputs,
                "scheduler.policy": policy,
                "debug.preempt_every": preempt_every,
                "spec_decode.method": method,
            },
        )
        self.wanted = {}
        self.num_added = 0

    @rule(
        prompt=st.lists(st.integers(0, 3), min_size=1, max_size=20),
        max_tokens=st.integers(1, 15),
        priority=st.integers(0, 2),
        num_sequences=st.sampled_from((1, 1, 3)),
    )
    def add(self, prompt, max_tokens, priority, num_sequences):
        group = f"g{self.num_added}" if num_sequences > 1 else ""
        for _ in range(num_sequences):
            req_id = str(self.num_added)
            self.num_added += 1
            try:
                params = self.engine.add(req_id, prompt, priority=priority, group=group, max_tokens=max_tokens)
            except NeverFits:
                assert group  # three sequences may be too large together
            else:
                self.wanted[req_id] = oracle(prompt, params, 40)

    @rule(which=st.integers(0, 100))
    def abort(self, which):
        if self.num_added:
            req_id = str(which % self.num_added)
            if req_id not in self.engine.reasons:
                self.wanted.pop(req_id, None)
            self.engine.core.abort([req_id])

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            self.engine.step()

    @invariant()
    def holds(self):
        if hasattr(self, "engine"):
            self.engine.scheduler.check()
            for req_id, reason in self.engine.reasons.items():
                if reason in ("stop", "length"):
                    assert self.engine.tokens[req_id] == self.wanted[req_id]

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.run()
            assert {req_id: self.engine.tokens[req_id] for req_id in self.wanted} == self.wanted
            self.engine.step()
            assert not self.engine.worker.rows.of
            assert self.engine.kv.usage.num_free == self.engine.kv.usage.num_total


EngineMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestEngineMachine = EngineMachine.TestCase
