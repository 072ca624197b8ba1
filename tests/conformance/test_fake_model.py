"""A scheduling decision may change timing, never output: every option and every pair of options, on a model whose next
token is a hash of all tokens before it, against that hash computed with no engine at all."""

import random
from itertools import combinations

import pytest
from conformance.cover import all_pairs, label, singles
from fakes import FakeEngine, beam_oracle, oracle

from minivllm.errors import NeverFits
from minivllm.features import CONFLICTS, FEATURES, Feature
from minivllm.request import BeamSearchParams

# The fake model has its own.
DATA_PLANE = [
    "attention",
    "kv_dtype",
    "quantization",
    "dense_copy",
    "activation_bits",
    "forward",
    "compile",
    "graphs",
    "executor",
    "core",
    "replicas",
    "router",
    "structured",
]
BUDGETS = Feature("encoder_budget", "scheduler.encoder_budget", (None, 2, 10**6), None, "of one item, several, all")
AXES = [*(feature for feature in FEATURES if feature.name not in DATA_PLANE), BUDGETS]


def workload(engine: FakeEngine, seed: int, num_requests: int = 30) -> dict[str, list[int]]:
    """Random arrivals and aborts, shared beginnings, items that several have. Returns what must come out of those that
    were not aborted."""
    rng, of_items = random.Random(seed), random.Random(seed)
    shared = [rng.randrange(100) for _ in range(13)]
    wanted, arrivals = {}, []
    for i in range(num_requests):
        prompt = shared[: rng.randrange(14)] + [rng.randrange(100) for _ in range(rng.choice((1, 2, 4, 7, 20)))]
        params = {"max_tokens": rng.choice((1, 2, 7, 30)), "min_tokens": rng.choice((0, 0, 1))}
        at, abort, priority = rng.randrange(40), rng.random() < 0.15, rng.randrange(3)
        items = of_items.choices("abcdef", k=of_items.randrange(2))
        if rng.random() < 0.2:
            beam = BeamSearchParams(
                beam_width=rng.choice((1, 2, 3)), max_tokens=params["max_tokens"], early_stopping=abort
            )
            arrivals.append((at, f"r{i}", prompt, beam, abort, 0, "", "", items))
            continue
        adapter = rng.choice(("", "a", "bb", "ccc")) if engine.config.lora.enabled else ""
        group = f"r{i}" if rng.random() < 0.3 and len(prompt) < 14 else ""
        for child in range(3 if group else 1):
            arrivals.append((at, f"r{i}#{child}", prompt, params, abort, priority, group, adapter, items))
    aborts = []
    for step in range(2000):
        for _, req_id, prompt, params, abort, priority, group, adapter, items in (a for a in arrivals if a[0] == step):
            try:
                if isinstance(params, BeamSearchParams):
                    ids = engine.add_beams(req_id, prompt, params, items)
                    wanted.update(zip(ids, beam_oracle(prompt, params, engine.max_model_len), strict=True))
                    if abort:
                        aborts.append((step + rng.randrange(6), ids))
                    continue
                of_request = {"priority": priority, "group": group, "adapter": adapter, "cache_salt": salt_of(req_id)}
                of_request |= {"client": "abc"[priority], "items": items}
                sampling = engine.add(req_id, prompt, **of_request, **params)
            except NeverFits:
                together = group or isinstance(params, BeamSearchParams)
                assert together and num_blocks_of(engine) < 100, "only a group may be too large, in a small pool"
                continue
            wanted[req_id] = oracle(prompt, sampling, engine.max_model_len, adapter)
            if abort:
                aborts.append((step + rng.randrange(6), [req_id]))
        for _, ids in [a for a in aborts if a[0] == step]:
            if ids[0] not in engine.reasons:
                engine.core.abort(ids)
                for req_id in ids:
                    del wanted[req_id]
        if engine.core.has_work:
            engine.step()
            assert_only_equals_share(engine)
        elif step > 40:
            break
    assert not engine.core.has_work
    engine.scheduler.check()
    return wanted


def salt_of(req_id: str) -> str:
    return "salted" if ord(req_id.partition("#")[0][-1]) % 2 else ""


def assert_only_equals_share(engine: FakeEngine) -> None:
    """A block that several live requests name is of one adapter and one cache_salt. (A static batch keeps the tables of
    those that have ended.)"""
    owners: dict[int, tuple[str, str]] = {}
    for req_id, table in getattr(engine.kv, "tables", {}).items():
        req = engine.scheduler.requests.get(req_id)
        for block in getattr(table, "blocks", ()) if req else ():
            assert owners.setdefault(block, (req.adapter, req.cache_salt)) == (req.adapter, req.cache_salt)


def num_blocks_of(engine: FakeEngine) -> int:
    return engine.kv.usage.num_total


def assert_conforms(num_blocks: int, config: dict, seed: int = 0) -> None:
    config = {"lora.max_loras": 2, **config}  # fewer than the workload has adapters, where it has any
    longest, item_slots = min(80, num_blocks * config.get("kv.block_size", 4)), 3 if num_blocks < 100 else None
    engine = FakeEngine(num_blocks, max_model_len=longest, item_slots=item_slots, **config)
    wanted = workload(engine, seed)
    assert {req_id: engine.tokens[req_id] for req_id in wanted} == wanted
    assert engine.kv.usage.num_free == num_blocks
    engine.step()
    items = engine.worker.items
    assert not items.ready and not items.contents and any(items.num_encoded)
    assert items.most <= (item_slots or items.most) and max(items.num_encoded) <= (engine.limits.max_new_items or 0)


@pytest.mark.parametrize("num_blocks", [20, 10_000])
@pytest.mark.parametrize("config", [{}, *singles(AXES)], ids=label)
def test_every_option_alone_gives_the_same_tokens(config, num_blocks):
    assert_conforms(num_blocks, config)


@pytest.mark.parametrize("num_blocks", [20, 10_000])
@pytest.mark.parametrize("config", all_pairs(AXES), ids=label)
def test_every_pair_of_options_gives_the_same_tokens(config, num_blocks):
    assert_conforms(num_blocks, config)


@pytest.mark.parametrize("num_blocks", [20, 10_000])
@pytest.mark.parametrize("budget", [1, 2, 3, 5, 16, 64, 512])
def test_every_chunk_size_gives_the_same_tokens(budget, num_blocks):
    assert_conforms(num_blocks, {"scheduler.max_num_batched_tokens": budget})


@pytest.mark.parametrize("block_size", [1, 2, 16, 256])
def test_every_block_size_gives_the_same_tokens(block_size):
    assert_conforms(-(-80 // block_size) + 1, {"kv.block_size": block_size})


@pytest.mark.parametrize("seed", range(8))
def test_arrivals_and_aborts_of_others_change_nothing(seed):
    assert_conforms(24, {"debug.preempt_every": 3, "scheduler.max_num_batched_tokens": 9}, seed)


def test_three_thousand_requests_leave_no_block_behind():
    engine = FakeEngine(64, max_model_len=60, **{"scheduler.max_num_seqs": 32, "debug.check": False})
    engine.core.check = False
    rng = random.Random(3)
    for i in range(3000):
        engine.add(str(i), [rng.randrange(9) for _ in range(rng.randrange(1, 20))], max_tokens=rng.randrange(1, 9))
    while engine.core.has_work:
        engine.step()
        engine.core.abort([str(rng.randrange(3000))])
    assert engine.kv.usage.num_free == 64 and not engine.scheduler.requests
    engine.scheduler.check()
    engine.step()
    assert not engine.worker.rows.of and not engine.kv.tables and not engine.kv._found


def test_no_request_waits_for_ever():
    """Asserted in steps: behind k requests of at most n tokens each, a request is done after about k * n steps."""
    engine = FakeEngine(20, max_model_len=60)
    for i in range(20):
        engine.add(str(i), [i] * 30, max_tokens=10, min_tokens=10)
    engine.run(max_steps=20 * 11)


def test_the_cover_meets_every_pair():
    configs = all_pairs(list(FEATURES))
    for a, b in combinations(FEATURES, 2):
        for x in a.options:
            for y in b.options:
                declared = any({(a.name, x), (b.name, y)} == {c.first, c.second} for c in CONFLICTS)
                assert declared or any(c[a.field] == x and c[b.field] == y for c in configs), (a.name, x, b.name, y)
    assert len(configs) < 120  # attention alone has 70 pairs with spec_decode, and 70 with policy
