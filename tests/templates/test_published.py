"""Every published template makes the prompt of every conversation that transformers makes of it."""

from __future__ import annotations

import random

import pytest
from templates.conversations import draw
from templates.judge import fitting, judge
from templates.published import AT_LEAST, published

DRAWS = 30  # for each template: over two thousand in all
SHARDS = 8


@pytest.fixture(scope="module")
def templates() -> dict[str, str]:
    found = published()
    assert len(found) >= AT_LEAST
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_published_template_makes_what_it_does_in_transformers(templates, shard):
    wrong = []
    for name, source in list(templates.items())[shard::SHARDS]:
        rng = random.Random(name)
        conversations = (fitting(source, draw(rng)) for _ in range(DRAWS))
        verdicts = [judge(source, conversation) for conversation in conversations if conversation is not None]
        assert verdicts, f"{name} is asked nothing"
        wrong += [(name, verdict) for verdict in verdicts if not verdict.ok]
    assert not wrong, wrong[0]
