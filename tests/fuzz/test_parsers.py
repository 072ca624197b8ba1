"""Rule: whatever bytes a parser is given, it returns or raises its own error, within bounds of work and memory.

Every entry of the corpus, what was found once among them, and some new inputs for each parser. `make fuzz` goes on.
"""

from __future__ import annotations

import contextlib
import functools

import pytest
from fuzz.limits import Memory, TooMuch, bounded
from fuzz.mutations import mutated
from fuzz.targets import CORPUS, TARGETS, Target, cases
from hypothesis import HealthCheck, given, settings

EXAMPLES = 500  # of each parser: a minute of a core in all


def keeps_the_rule(target: Target, data: bytes) -> bool:
    """Whether it was read. Raises what is no error of the parser's own."""
    _warm(target)
    try:
        bounded(target.read, data)
    except target.errors():
        return False
    return True


@functools.cache
def _warm(target: Target) -> None:
    """Modules are imported and tables made once, and are no work of an input."""
    for data in target.corpus:
        with contextlib.suppress(Exception):
            target.read(data)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "path"), list(cases()), ids=lambda value: getattr(value, "name", None))
def test_an_entry_of_the_corpus_is_read_or_refused(target, path):
    memory = Memory()
    read = keeps_the_rule(target, path.read_bytes())
    assert read or not path.name.startswith("right"), "the corpus is of inputs that are nearly right"
    memory.check()


@pytest.mark.slow
@pytest.mark.parametrize("target", list(TARGETS.values()), ids=lambda target: target.name)
def test_an_input_that_is_nearly_right_is_read_or_refused(target):
    memory = Memory()

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(data=mutated(target))
    def run(data):
        keeps_the_rule(target, data)
        memory.check()

    run()


def test_what_asks_for_more_work_than_its_length_allows_is_found():
    with pytest.raises(TooMuch):
        bounded(lambda data: [len(data) for _ in range(10**7)], b"x")


def test_the_corpus_is_small_and_every_parser_has_some():
    sizes = {target.name: list(map(len, target.corpus)) for target in TARGETS.values()}
    assert all(sizes.values()) and sum(map(sum, sizes.values())) < 200_000
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
