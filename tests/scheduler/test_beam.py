import pytest
from fakes import FakeEngine, beam_oracle, oracle

from minivllm.errors import NeverFits
from minivllm.request import BeamSearchParams

V0 = {"scheduler.kind": "phased", "scheduler.chunked_prefill": False, "kv.prefix": "none"}
FORKS = {"v0": {**V0, "kv.fork": "share"}, "v0 with V1's forks": {**V0, "kv.fork": "lookup"}}
FORKS |= {"v1": {"kv.fork": "lookup"}, "v1 with V0's forks": {"kv.fork": "share"}}
PROMPT = [3, 1, 4, 1, 5, 9]
BEAM = BeamSearchParams(beam_width=3, max_tokens=12)


class Watched(FakeEngine):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.plans = []
        execute = self.worker.execute
        self.worker.execute = lambda plan: (self.plans.append(plan), execute(plan))[1]


def wanted(engine, ids, prompt=PROMPT, beam=BEAM):
    return dict(zip(ids, beam_oracle(prompt, beam, engine.max_model_len), strict=True))


@pytest.mark.parametrize("config", FORKS.values(), ids=FORKS)
def test_greedy_requests_and_beams_in_one_batch_equal_each_alone(config):
    engine = Watched(**config)
    ids = engine.add_beams("b", PROMPT, BEAM)
    params = engine.add("g", [2] * 7, max_tokens=12)
    assert engine.run() == {**wanted(engine, ids), "g": oracle([2] * 7, params)}
    mixed = [plan for plan in engine.plans if "g" in plan.num_tokens and len(plan.num_tokens) > 1]
    assert mixed, "they never shared a step"


def test_a_shared_fork_computes_one_token_and_copies_at_most_one_block():
    engine = Watched(**FORKS["v0"])
    engine.run() if engine.add_beams("b", PROMPT, BEAM) else None
    forks = [plan for plan in engine.plans[1:] if plan.joins]
    assert forks and all(set(plan.num_tokens.values()) == {1} for plan in engine.plans[1:])
    for plan in forks:
        assert len(plan.copies) <= len(plan.joins)
        assert all(plan.start[join.req_id] == len(join.token_ids) - 1 for join in plan.joins)
    assert any(plan.copies for plan in forks)


def test_a_looked_up_fork_computes_what_its_last_whole_block_leaves():
    engine = Watched(**FORKS["v1"])
    engine.add_beams("b", PROMPT, BEAM)
    engine.run()
    starts = [(plan.start[j.req_id], len(j.token_ids)) for plan in engine.plans[1:] for j in plan.joins]
    assert starts and all(start == (length - 1) // 4 * 4 for start, length in starts)
    assert not any(plan.copies for plan in engine.plans)


@pytest.mark.parametrize("config", FORKS.values(), ids=FORKS)
@pytest.mark.parametrize("extra", [{"debug.preempt_every": 3}, {"kv.preemption": "swap", "debug.preempt_every": 2}])
def test_beams_survive_preemption_in_a_small_pool(config, extra):
    engine = Watched(20, **config, **extra)
    ids = engine.add_beams("b", PROMPT, BEAM)
    engine.add("g", [2] * 20, max_tokens=20, min_tokens=20)
    engine.run()
    assert {req_id: engine.tokens[req_id] for req_id in ids} == wanted(engine, ids)


@pytest.mark.parametrize("fork", ["share", "lookup"])
@pytest.mark.parametrize("limits", [{"scheduler.max_num_batched_tokens": 2}, {"scheduler.max_num_seqs": 2}], ids=str)
def test_beams_that_do_not_fit_one_step_wait_for_each_other(limits, fork):
    engine = Watched(**{"kv.fork": fork, **limits})
    ids = engine.add_beams("b", PROMPT, BEAM)
    assert engine.run() == wanted(engine, ids)
    assert max(len(plan.num_tokens) for plan in engine.plans) == 2


@pytest.mark.parametrize("config", FORKS.values(), ids=FORKS)
def test_an_abort_ends_all_beams(config):
    engine = Watched(**config)
    ids = engine.add_beams("b", PROMPT, BEAM)
    for _ in range(4):
        engine.step()
    assert len(engine.scheduler.requests) == 3
    engine.core.abort(ids)
    assert not engine.core.has_work and not engine.scheduler.requests
    engine.step()
    assert engine.kv.usage.num_free == 1000 and not engine.worker.rows.of and not engine.core.scheduler.groups


def test_a_failed_step_ends_every_output_of_the_request_with_its_error():
    engine = Watched()
    ids = engine.add_beams("b", PROMPT, BEAM)
    engine.step(), engine.step()

    def fails(plan):
        raise RuntimeError("lightning")

    engine.worker.execute, execute = fails, engine.worker.execute
    deltas = engine.core.step()
    assert deltas == [], "which of the beams it was is not known"
    deltas = engine.core.step()
    assert [(d.req_id, d.finish_reason, d.error) for d in deltas] == [
        (req_id, "error", "RuntimeError: lightning") for req_id in ids
    ]
    engine.worker.execute = execute
    assert not engine.core.has_work and engine.kv.usage.num_free == 1000
    engine.core.step()
    assert not engine.worker.rows.of


def test_beams_that_can_never_run_together_are_refused():
    engine = FakeEngine(6, max_model_len=24)
    with pytest.raises(NeverFits, match="3 beams of up to 17 tokens may need 51 KV slots"):
        engine.add_beams("b", PROMPT, BEAM)
    assert not engine.scheduler.requests and not engine.core.has_work


@pytest.mark.parametrize("config", FORKS.values(), ids=FORKS)
def test_a_beam_that_ends_while_it_waits_leaves_no_place(config):
    beam = BeamSearchParams(beam_width=3, max_tokens=7)
    for i in range(30):
        disturbed = {"scheduler.max_num_seqs": 2, "debug.preempt_every": 2}
        engine = FakeEngine(60, max_model_len=40, **{**config, **disturbed})
        prompt = [i % 4, i // 4 % 4, 0, 1]
        ids = engine.add_beams("b", prompt, beam)
        engine.run()
        assert {req_id: engine.tokens[req_id] for req_id in ids} == wanted(engine, ids, prompt, beam)
