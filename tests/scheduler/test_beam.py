import pytest
from fakes import FakeEngine, beam_oracle, likeliest, oracle

from minivllm.errors import NeverFits
from minivllm.request import BeamSearchParams, EngineRequest, Item

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
    engine = FakeEngine(50, max_model_len=24, **{"kv.block_size": 1})
    with pytest.raises(NeverFits, match="^3 beams may reach 17 tokens each, more than fit into a KV pool") as refused:
        engine.add_beams("b", PROMPT, BEAM)
    assert refused.value.param == "beam_width"
    assert not engine.scheduler.requests and not engine.core.has_work
    engine = FakeEngine(51, max_model_len=24, **{"kv.block_size": 1})
    ids = engine.add_beams("b", PROMPT, BEAM)
    assert engine.run() == wanted(engine, ids)


def test_an_error_of_one_beam_ends_its_search_and_takes_nobody_elses_token():
    engine = Watched()
    engine.add("g", [2] * 7, max_tokens=12)
    ids = engine.add_beams("b", PROMPT, BEAM)
    engine.step(), engine.step()
    execute = engine.worker.execute

    def fails(plan):
        out = execute(plan)
        beam = [name for name in plan.num_tokens if name.startswith("b")][-1]
        del out.tokens[beam], out.logprobs[beam]
        out.errors[beam] = "lightning"
        return out

    engine.worker.execute = fails
    found = [(delta.req_id, delta.error, len(delta.token_ids)) for delta in engine.core.step()]
    assert found == [("g", None, 1), *((req_id, "lightning", 0) for req_id in ids)]
    engine.core.scheduler.check()
    assert engine.scheduler.requests.keys() == {"g"}


def test_a_beams_own_token_is_the_first_that_it_reports_though_a_rival_stands_before_it_among_the_likeliest():
    engine = Watched()
    execute = engine.worker.execute

    def reordered(plan):
        out = execute(plan)
        for reports in out.logprobs.values():
            reports[:] = [[own, rival, own, *others] for own, _, rival, *others in reports]
        return out

    engine.worker.execute = reordered
    ids = engine.add_beams("b", PROMPT, BEAM)
    assert engine.run() == wanted(engine, ids)


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


def test_an_output_says_what_its_tokens_were_worth_what_was_cached_and_when_it_arrived():
    engine = Watched(**FORKS["v1"])
    engine.add_beams("before", PROMPT, BEAM)
    engine.run()
    arrived = engine.now
    ids = engine.add_beams("b", PROMPT, BEAM)
    deltas = []
    while engine.core.has_work:
        deltas += engine.step()
    assert [delta.req_id for delta in deltas] == ids
    for delta in deltas:
        assert len(delta.logprobs) == len(delta.token_ids) > 0
        for i, position in enumerate(delta.logprobs):
            (token, _, _), *others = position
            assert token == delta.token_ids[i] and not others
            assert position[0] in likeliest([*PROMPT, *delta.token_ids[:i]])
        assert delta.num_cached_tokens == 4
        assert delta.arrival_time == arrived > 0
        assert delta.finish_reason in ("stop", "length")


@pytest.mark.parametrize("fork", ["share", "lookup"])
@pytest.mark.parametrize("num_seqs", [2, 8])
def test_what_a_waiting_fork_finds_of_its_own_output_is_not_of_the_prompt(fork, num_seqs):
    engine = FakeEngine(**{"kv.fork": fork, "scheduler.max_num_seqs": num_seqs})
    engine.add_beams("b", PROMPT, BEAM)
    deltas = []
    while engine.core.has_work:
        deltas += engine.step()
    assert [delta.num_cached_tokens for delta in deltas] == [0, 0, 0]


def test_a_failed_search_says_when_it_arrived():
    engine = Watched()
    engine.now = 5.0
    engine.add_beams("b", PROMPT, BEAM)
    engine.step()

    def fails(plan):
        raise RuntimeError("lightning")

    engine.worker.execute = fails
    deltas = engine.core.step() + engine.core.step()
    assert [delta.arrival_time for delta in deltas] == [5.0] * 3


def test_a_search_of_one_beam_is_a_greedy_request_and_forks_nothing():
    engine = Watched()
    ids = engine.add_beams("b", PROMPT, BeamSearchParams(beam_width=1, max_tokens=12, ignore_eos=True))
    params = engine.add("g", PROMPT, max_tokens=12, min_tokens=12)
    engine.run()
    assert engine.tokens[ids[0]] == oracle(PROMPT, params)
    assert [join.req_id for plan in engine.plans for join in plan.joins] == ["b", "g"]


@pytest.mark.parametrize("config", FORKS.values(), ids=FORKS)
def test_beams_are_served_in_the_order_in_which_they_were_forked(config):
    engine = Watched(**config)
    engine.add_beams("b", PROMPT, BEAM)
    engine.run()
    joined = [join.req_id for plan in engine.plans for join in plan.joins]
    assert len(set(joined)) == len(joined) > 3
    for plan in engine.plans:
        assert list(plan.num_tokens) == sorted(plan.num_tokens, key=joined.index)


def test_a_fork_is_a_request_like_the_one_that_asked():
    engine = FakeEngine(**{"lora.enabled": True, "scheduler.policy": "priority"})
    items, contents = (Item(1, 2, "digest"),), {"digest": b"content"}
    engine.core.add(
        EngineRequest(
            "b#0", PROMPT, BEAM.step, 4.5, 3, "adapter", "salt", "b", BEAM, client="c", items=items, contents=contents
        )
    )
    for _ in range(3):
        engine.core.step()
    root, *forks = sorted(engine.scheduler.requests.values(), key=lambda req: req.order)
    assert root.id == "b#0" and forks and all(fork.beam is None for fork in forks)
    for fork in forks:
        for name in ("params", "num_prompt_tokens", "arrival_time", "priority", "adapter", "cache_salt", "group"):
            assert getattr(fork, name) == getattr(root, name), name
        assert (fork.client, fork.items) == ("c", items)
