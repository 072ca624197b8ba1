"""Rules: a step that is planned behind one whose drafts are not verified yet becomes, where it runs, the step that was
to be planned afterwards; tokens are those of an engine that plans one step at a time."""

import random

import pytest
from fakes import FakeEngine, FakeWorker, SlowStream, oracle

from minivllm import LLM, SamplingParams, StructuredParams, trace
from minivllm.plan import Join, StepOutput, StepPlan
from minivllm.spec_decode.ahead import DraftsAhead

# ---------------------------------------------------------------- where the step runs


class Runs:
    """An `execute` that proposes what it is told to, and accepts so many drafts."""

    def __init__(self):
        self.plans = []
        self.accepts, self.proposes = 0, []

    def __call__(self, plan):
        self.plans.append(plan)
        tokens = {name: [*plan.drafts.get(name, [])[: self.accepts], 5] for name in plan.num_tokens}
        return StepOutput(tokens=tokens, drafts=dict.fromkeys(plan.num_tokens, self.proposes))


def joined(**params) -> tuple[DraftsAhead, Runs]:
    """With a prompt of 4 tokens computed, and what came of it."""
    runs = Runs()
    ahead = DraftsAhead(runs)
    runs.proposes = [11, 12, 13]
    join = Join("a", [1, 2, 3, 4], 4, SamplingParams(**params))
    ahead(StepPlan(0, {"a": 4}, {"a": 0}, joins=[join]))
    return ahead, runs


def test_it_begins_at_the_newest_token_with_what_was_proposed_and_no_more_than_was_planned():
    ahead, runs = joined()
    runs.accepts, runs.proposes = 1, [21, 22]
    ahead(StepPlan(1, {"a": 3}, {"a": 4}, ahead={"a": 2}))
    ahead(StepPlan(2, {"a": 4}, {"a": 7}, ahead={"a": 3}))  # for two drafts accepted; one was
    ahead(StepPlan(3, {"a": 1}, {"a": 11}, ahead={"a": 0}))
    exact = [(plan.num_tokens["a"], plan.start["a"], plan.drafts.get("a")) for plan in runs.plans]
    assert exact == [(4, 0, None), (3, 4, [11, 12]), (3, 6, [21, 22]), (1, 8, None)]
    assert not any(plan.ahead for plan in runs.plans)


def test_the_plan_itself_stays_as_it_is_for_whoever_made_it():
    ahead, _ = joined()
    plan = StepPlan(1, {"a": 3}, {"a": 4}, ahead={"a": 2})
    ahead(plan)
    assert plan == StepPlan(1, {"a": 3}, {"a": 4}, ahead={"a": 2})


def test_no_draft_would_end_its_request():
    ahead, runs = joined(stop_token_ids=[12], eos_token_ids=(9,))
    ahead(StepPlan(1, {"a": 4}, {"a": 4}, ahead={"a": 3}))
    assert runs.plans[-1].drafts == {"a": [11]} and runs.plans[-1].num_tokens == {"a": 2}


def test_who_comes_back_begins_anew():
    ahead, runs = joined()
    join = Join("a", [1, 2, 3, 4, 5], 4, SamplingParams())
    ahead(StepPlan(1, {"a": 5}, {"a": 0}, joins=[join], leaves=["a"]))
    ahead(StepPlan(2, {"a": 2}, {"a": 5}, ahead={"a": 1}))
    assert (runs.plans[-1].start, runs.plans[-1].drafts) == ({"a": 5}, {"a": [11]})


# ---------------------------------------------------------------- the scheduler, over the fake model

DRAFTS = {"spec_decode.method": "draft", "spec_decode.k": 3}


def watch(engine: FakeEngine) -> list[int]:
    """Gets, for each plan that is made, how many drafts its requests may have that nobody knows yet."""
    base, found = engine.scheduler, []
    schedule = base.schedule

    def watched(now):
        plan = schedule(now)
        found.append(sum(plan.ahead.values()))
        return plan

    base.schedule = watched
    return found


@pytest.mark.parametrize("overlap", [2, 4])
def test_drafts_are_accepted_behind_steps_in_flight_and_fewer_steps_are_made(overlap):
    num_steps = {}
    for method in ("none", "draft"):
        engine = FakeEngine(overlap=overlap, **{**DRAFTS, "spec_decode.method": method})
        ahead = watch(engine)
        wanted = {}
        for name in "abc":
            prompt = [ord(name) % 50] * 7
            wanted[name] = oracle(prompt, engine.add(name, prompt, max_tokens=60, min_tokens=60))
        assert engine.run() == wanted
        stats = engine.core.stats
        num_steps[method] = stats.num_steps
        assert (max(ahead) > 0) == (method == "draft")
    assert 0 < stats.num_accepted < stats.num_drafted and num_steps["draft"] < 0.8 * num_steps["none"]


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_no_slot_behind_the_longest_length_is_asked_for(max_tokens):
    """Where the furthest place is there already, the request waits for what is in flight."""
    engine = FakeEngine(overlap=3, max_model_len=40, **DRAFTS)
    params = engine.add("a", [1, 2, 3], max_tokens=max_tokens, min_tokens=max_tokens)
    while engine.core.has_work:
        engine.step()
        for plan in engine.scheduler.in_flight._plans.values():
            assert not plan.num_tokens or plan.start["a"] + plan.num_tokens["a"] <= 3 + max_tokens - 1
    assert engine.tokens["a"] == oracle([1, 2, 3], params, 40)


@pytest.mark.parametrize("seed", range(4))
def test_whoever_was_not_in_a_failing_step_gets_its_own_tokens(seed):
    rng, wanted, doomed, failed = random.Random(seed), {}, set(), []
    engine = FakeEngine(30, max_model_len=40, overlap=2 + seed % 3, stream_seed=seed, **DRAFTS)
    execute = engine.worker.execute

    def failing(plan):
        fails, at_the_end = rng.random() < 0.06, rng.random() < 0.5
        out = execute(plan) if at_the_end or not fails else None
        if fails:
            failed.append(plan)
            raise ZeroDivisionError
        return out

    engine.worker.execute = failing
    for i in range(30):
        prompt = [i] * rng.randrange(1, 12)
        wanted[str(i)] = oracle(prompt, engine.add(str(i), prompt, max_tokens=rng.choice((1, 5, 20))), 40)
    while engine.core.has_work:
        for delta in engine.core.step():
            engine.tokens[delta.req_id] += delta.token_ids
            if delta.error:
                doomed.add(delta.req_id)
    assert failed and len(doomed) < 30 and engine.core.stats.num_accepted > 0
    assert all(engine.tokens[name] == tokens for name, tokens in wanted.items() if name not in doomed)
    assert engine.kv.usage.num_free == 30


def test_a_recorded_run_says_what_was_computed_and_replays(tmp_path):
    path, sizes = tmp_path / "run.jsonl", {"scheduler.max_num_batched_tokens": 16, "engine.overlap": 2}
    engine = FakeEngine(num_blocks=14, **sizes, **DRAFTS)
    engine.core.observers.append(trace.TraceRecorder(path))
    engine.core.observers[0].on_start(engine.config.flat(), {"num_blocks": 14})
    for i in range(6):
        engine.add(f"r{i}", [i, *range(20, 20 + 2 * i)], max_tokens=12)
    engine.run()
    engine.core.observers[0].close()
    plans = trace.plans(path)
    assert sum(len(drafts) for plan in plans for drafts in plan.drafts.values()) == engine.core.stats.num_drafted > 0
    fresh = SlowStream(FakeWorker(engine.worker.sizes, num_drafts=engine.worker.num_drafts))
    assert trace.replay(path, fresh).divergence is None


# ---------------------------------------------------------------- whole engines

SMALL = {"model.path": "dummy:tiny", "model.dtype": "float32", "kv.num_blocks": 40, "kv.block_size": 8}
SMALL |= {"executor.num_threads": 1, "debug.check": True, "spec_decode.adaptive": False, "spec_decode.k": 3}
MODELS = {"draft": "dummy:tiny", "eagle": "dummy:eagle", "medusa": "dummy:medusa"}
FEW = {t: 8.0 for t in range(20, 26)}
LONG = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logit_bias=FEW)
ASKED = [
    LONG,
    LONG.replace(temperature=0.7, seed=1, repetition_penalty=1.02, logprobs=2),
    LONG.replace(ignore_eos=False, min_tokens=9, stop_token_ids=(20, 21), prompt_logprobs=1),
    LONG.replace(temperature=0.8, seed=3, logit_bias=None, stop=["a", "e"]),
    LONG.replace(temperature=0.9, seed=4, logit_bias=None, structured=StructuredParams(regex="([a-z]{1,2} ){2,9}")),
    LONG.replace(temperature=0.5, seed=5, n=2),
]
PROMPTS = [[5, 6, 7, 8, 9] * 6, [11, 12] * 9 + [3], list(range(40)), [5, 6, 7, 8, 9] * 3 + [1, 2], [4], [5, 6, 7, 8]]


def generate(**overrides):
    with LLM(overrides={**SMALL, **overrides}) as llm:
        outputs = llm.generate(PROMPTS, ASKED, use_tqdm=False)
        found = [(o.text, list(o.token_ids), o.finish_reason, o.stop_reason) for each in outputs for o in each.outputs]
        return found, llm._core.stats


@pytest.fixture(scope="module")
def wanted():
    return generate()[0]


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft", "self_draft", "eagle", "medusa"])
def test_every_proposer_gives_the_same_tokens_behind_steps_in_flight(method, wanted):
    options = {"spec_decode.method": method, "spec_decode.model": MODELS.get(method)}
    got, stats = generate(**{**options, "engine.overlap": 2, "debug.preempt_every": 7, "kv.prefix": "radix"})
    assert got == wanted and stats.num_drafted > 0
    assert stats.num_accepted > 0 or method in ("eagle", "medusa", "self_draft"), "random weights guess nothing"
