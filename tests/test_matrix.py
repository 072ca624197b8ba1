from itertools import combinations

from minivllm import matrix
from minivllm.features import CONFLICTS, FEATURES


def test_every_pair_of_options_works_or_is_a_declared_conflict():
    """As committed. A pair that fails now fails in tests/conformance; after a new option: make matrix."""
    outcomes = matrix.outcomes()
    for (a, b), mark in outcomes.items():
        assert mark in (matrix.WORKS, matrix.CONFLICT, matrix.NO_GPU), f"{a} with {b}: {mark}"
    assert sum(mark == matrix.CONFLICT for mark in outcomes.values()) == 2 * len(CONFLICTS)
    assert len(outcomes) == 2 * sum(len(a.options) * len(b.options) for a, b in combinations(FEATURES, 2))


def test_an_option_that_needs_a_gpu_is_marked_until_one_has_run_it():
    a, b = ("attention", "triton"), ("inputs", "rebuild")
    assert matrix.outcome(a, b, []) == matrix.outcome(b, a, []) == matrix.NO_GPU
    assert matrix.outcome(a, b, [{"options": dict([a, b]), "passed": True}]) == matrix.WORKS
    assert matrix.outcome(("prefix", "hash"), b, []) == matrix.UNTESTED


def test_a_pair_that_failed_once_does_not_work():
    a, b = ("prefix", "hash"), ("inputs", "rebuild")
    both = dict([a, b])
    assert matrix.outcome(a, b, []) == matrix.UNTESTED
    assert matrix.outcome(a, b, [{"options": both, "passed": True}]) == matrix.WORKS
    runs = [{"options": both, "passed": True}, {"options": both, "passed": False}]
    assert matrix.outcome(a, b, runs) == matrix.FAILS
