"""The tests of chapter 8's exercise. They need no model: a hash of what it reads stands in for one."""

from __future__ import annotations

from exercise import Request, make_room


def running(**blocks: list[int]) -> list[Request]:
    """Requests whose blocks of two are full: each has one token more, for which it needs another block."""
    return [Request(name, list(range(2 * len(b) + 1)), 2 * len(b), list(b)) for name, b in blocks.items()]


def test_nobody_goes_while_there_is_room():
    a, b = here = running(a=[0], b=[1])
    free, waiting = [2, 3], []
    assert make_room(a, here, waiting, free, 2) and make_room(b, here, waiting, free, 2)
    assert here == [a, b] and waiting == free == []
    assert sorted(a.blocks + b.blocks) == [0, 1, 2, 3] and a.blocks[0] == 0 and len(a.blocks) == 2


def test_the_last_who_came_goes_and_is_the_first_to_return():
    a, b, c = here = running(a=[0], b=[1], c=[2, 3])
    other = Request("d", [1, 2, 3])
    waiting, free = [other], []
    assert make_room(a, here, waiting, free, 2)
    assert here == [a, b] and waiting == [c, other]
    assert len(a.blocks) == 2 and len(free) == 1
    assert c.blocks == [] and c.num_computed == 0 and c.tokens == [0, 1, 2, 3, 4]


def test_several_go_in_their_order():
    a, b, c = here = running(a=[0], b=[1], c=[2])
    a.tokens = list(range(6))  # it needs three blocks
    waiting, free = [], []
    assert make_room(a, here, waiting, free, 2)
    assert here == [a] and waiting == [b, c] and free == []
    assert sorted(a.blocks) == [0, 1, 2]


def test_it_may_be_its_own_victim():
    a, b = here = running(a=[0], b=[1])
    waiting, free = [], []
    assert make_room(b, here, waiting, free, 2) is False
    assert here == [a] and waiting == [b] and free == [1] and b.blocks == []


def test_no_pool_is_too_small_for_the_same_answers():
    """A preemption may change when, never what."""
    prompts = {"a": [3, 1, 4], "b": [1, 5], "c": [9, 2, 6, 5], "d": [3]}
    alone = {name: serve({name: prompt}, 20)[name] for name, prompt in prompts.items()}
    for num_blocks in (5, 6, 9, 40):
        assert serve(prompts, num_blocks) == alone, f"{num_blocks} blocks"


def serve(prompts: dict[str, list[int]], num_blocks: int, num_new: int = 6, size: int = 2) -> dict[str, list[int]]:
    free, slots = list(range(num_blocks)), {}
    waiting, here = [Request(name, list(prompt)) for name, prompt in prompts.items()], []
    answers: dict[str, list[int]] = {}
    for _ in range(500):
        while waiting and -(-len(waiting[0].tokens) // size) <= len(free):
            here.append(waiting.pop(0))
            here[-1].blocks = [free.pop() for _ in range(-(-len(here[-1].tokens) // size))]
        for request in here.copy():
            if request not in here or not make_room(request, here, waiting, free, size):
                continue
            places = [request.blocks[i // size] * size + i % size for i in range(len(request.tokens))]
            for i in range(request.num_computed, len(request.tokens)):
                slots[places[i]] = request.tokens[i]
            request.num_computed = len(request.tokens)
            request.tokens.append(hash(tuple(slots[place] for place in places)) % 1000)  # the "model" reads its memory
            if len(request.tokens) == len(prompts[request.id]) + num_new:
                answers[request.id] = request.tokens[-num_new:]
                here.remove(request)
                free += request.blocks
        assert len(set(free)) == len(free) <= num_blocks, "a block is free twice"
        if len(answers) == len(prompts):
            return answers
    raise AssertionError("this never ends")
