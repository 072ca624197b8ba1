"""Rules: the budget of a step is never exceeded, nobody is passed over, and an error belongs to one request."""

from __future__ import annotations

import random

import numpy as np

from minivllm.engine.pooling_core import NOT_FINITE, PoolingCore, PoolingRequest
from minivllm.pooling.text import Text


class Lengths:
    """A model whose vector is the text's length; it fails on a text with the token 13."""

    def __init__(self):
        self.batches = []

    def run(self, texts):
        self.batches.append([len(text.token_ids) for text in texts])
        if any(13 in text.token_ids for text in texts):
            raise RuntimeError("unlucky")
        return np.array([[np.nan if 0 in text.token_ids else len(text.token_ids)] for text in texts], np.float32)


def core_of(max_num_seqs=8, budget=32) -> PoolingCore:
    return PoolingCore(Lengths(), max_num_seqs, budget, check=True)


def add(core, *texts):
    for i, token_ids in enumerate(texts):
        core.add(PoolingRequest(str(i), Text(token_ids)))


def run(core):
    done = []
    while core.has_work:
        done += core.step().done
    return done


def test_a_step_takes_the_head_of_the_queue_while_it_fits():
    core = core_of(max_num_seqs=3, budget=10)
    add(core, [1] * 4, [1] * 4, [1] * 4, [1], [1], [1], [1] * 10, [1])
    assert [pooled.id for pooled in run(core)] == [str(i) for i in range(8)]
    assert core.model.batches == [[4, 4], [4, 1, 1], [1], [10], [1]]


def test_random_queues_keep_the_budget_and_the_order():
    rng = random.Random(0)
    for _ in range(50):
        core = core_of(rng.randrange(1, 9), rng.randrange(8, 40))
        texts = [[1] * rng.randrange(1, 9) for _ in range(rng.randrange(1, 40))]
        add(core, *texts)
        done = run(core)
        assert [pooled.id for pooled in done] == [str(i) for i in range(len(texts))]
        assert [pooled.vector[0] for pooled in done] == [len(text) for text in texts]
        assert all(sum(b) <= core.max_num_batched_tokens and len(b) <= core.max_num_seqs for b in core.model.batches)
        assert core.stats.prompt_tokens == sum(map(len, texts)) and core.stats.num_waiting == 0


def test_an_error_belongs_to_the_request_that_causes_it():
    core = core_of()
    add(core, [1], [13], [1, 1])
    first, second, third = run(core)
    assert (first.vector[0], third.vector[0]) == (1, 2)
    assert second.vector is None and second.error == "RuntimeError: unlucky"


def test_a_vector_that_is_not_finite_is_an_error_of_its_request():
    core = core_of()
    add(core, [1], [0, 1])
    first, second = run(core)
    assert first.error == "" and (second.vector, second.error) == (None, NOT_FINITE)


def test_what_is_taken_back_does_not_run():
    core = core_of()
    add(core, [1], [1, 1], [1, 1, 1])
    core.abort(["1", "unknown"])
    assert core.stats.num_waiting == 2
    assert [pooled.id for pooled in run(core)] == ["0", "2"] and core.model.batches == [[1, 3]]


def test_a_step_says_what_it_did():
    core = core_of()
    add(core, [1], [1, 1])
    step = core.step()
    assert (step.total_tokens, len(step.done), core.stats.num_steps) == (3, 2, 1)
    assert core.step().done == [] and not core.has_work
