"""Rule: clients take turns, and the last free worker is never one more of a client that has the others."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest
from eventually import PATIENCE

from minivllm.engine.turns import Turns


def test_however_much_one_has_put_there_another_finds_a_worker_free():
    turns: Turns[str] = Turns(3)
    for i in range(12):
        turns.put(f"a{i}", "a")
    assert [turns.get(), turns.get()] == [("a0", "a"), ("a1", "a")]
    found: list[tuple[str, str]] = []
    third = threading.Thread(target=lambda: found.append(turns.get()))
    third.start()
    turns.put("b0", "b")
    third.join(PATIENCE)
    assert found == [("b0", "b")]
    turns.done("a")
    assert turns.get() == ("a2", "a")


@pytest.mark.parametrize("seed", range(10))
def test_each_item_comes_once_in_its_clients_order_and_no_client_has_all_workers(seed):
    draw, number = random.Random(seed), random.Random(seed).randint(2, 4)
    turns: Turns[int] = Turns(number)
    waiting, at_work, last = Counter[str](), Counter[str](), dict[str, int]()
    for step in range(400):
        able = [client for client, left in waiting.items() if left and at_work[client] < number - 1]
        if able and sum(at_work.values()) < number and draw.random() < 0.5:
            item, client = turns.get()
            waiting[client] -= 1
            at_work[client] += 1
            assert at_work[client] < number and item > last.get(client, -1)
            last[client] = item
        elif sum(at_work.values()) and draw.random() < 0.5:
            client = draw.choice(list((+at_work).elements()))
            at_work[client] -= 1
            turns.done(client)
        else:
            client = draw.choice("aaab")
            turns.put(step, client)
            waiting[client] += 1
