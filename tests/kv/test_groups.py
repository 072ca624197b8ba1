"""Rules of KV groups: what each group keeps, what is given back, and which prefix all of them can serve."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minivllm.kv.manager import PagedKVManager
from minivllm.kv.prefix_groups import GroupPrefix
from minivllm.kv.prefix_hash import HashPrefix
from minivllm.kv.prefix_radix import RadixPrefix
from minivllm.kv.swap import Swap
from minivllm.kv.waste import Waste, paged_waste
from minivllm.kv_groups import (
    FULL,
    STATE,
    KVGroup,
    KVGroups,
    LayerKind,
    StateSpec,
    block_size_for,
    first_kept,
    group_layers,
    one_group,
)
from minivllm.loading.dummy import dummy_spec
from minivllm.plan import StepPlan
from minivllm.request import Request, SamplingParams

BLOCK = 4
INDEXES = {"hash": lambda: HashPrefix(seed="test"), "radix": RadixPrefix}
OF_STATE = STATE.window  # no other group here has such a window
WINDOWS = (None,), (5,), (None, 5), (None, 1), (None, 3, 12), (4, 9), (None, None, 6)
WINDOWS += (None, OF_STATE), (None, OF_STATE, OF_STATE), (None, 5, OF_STATE)


def window(size):
    return LayerKind("window", size)


def groups_of(windows):
    kinds = {None: FULL, OF_STATE: STATE}
    return KVGroups(tuple(KVGroup(kinds.get(w) or window(w), (i,)) for i, w in enumerate(windows)))


def make(windows, num_blocks=60, index="hash", most_new=16, **options):
    indexes = [INDEXES[index]() for _ in windows]
    prefix = GroupPrefix(indexes, windows, BLOCK, num_blocks)
    return PagedKVManager(num_blocks, BLOCK, prefix, groups=groups_of(windows), most_new_tokens=most_new, **options)


def request(req_id, tokens):
    return Request(req_id, SamplingParams(), list(tokens), len(tokens))


def compute(kv, req, most=16):
    """All of req's tokens, in steps of at most `most`. -> how many were found, or None if there was no room."""
    found = start = kv.lookup(req) if req.id not in kv.tables else req.num_computed_tokens
    while start < req.num_tokens:
        count = min(most, req.num_tokens - start)
        if kv.allocate(req, count) is None:
            return None
        start = req.num_computed_tokens = start + count
        kv.commit(req)
        kv.check()
    return found


def kept_by(kv, req_id, group):
    """A group's blocks: a list with None where one was given back."""
    return [None if b == kv.absent else b for b in kv.tables[req_id].blocks[group :: kv.num_groups]]


# ------------------------------------------------------------------------------------------------------- which groups


def test_layers_of_one_kind_are_one_group():
    assert group_layers([FULL] * 3) == one_group([FULL] * 3)
    assert group_layers([window(8)] * 2) == KVGroups((KVGroup(window(8), (0, 1)),))


def test_groups_have_as_many_layers_as_the_rarest_kind():
    kinds = [window(8), window(8), FULL] * 2
    assert group_layers(kinds).groups == (
        KVGroup(FULL, (2, 5)),
        KVGroup(window(8), (0, 1)),
        KVGroup(window(8), (3, 4)),
    )


def test_a_kind_with_little_more_layers_is_not_cut():
    assert [len(g.layers) for g in group_layers([FULL] * 9 + [window(8)] * 11).groups] == [9, 11]


def test_a_place_of_a_tensor_belongs_to_one_layer_of_a_group():
    groups = group_layers([window(8)] * 5 + [FULL] * 2 + [window(4)] * 3)
    places = groups.places()
    assert sorted(places) == list(range(10)) and len(set(places.values())) == 10
    assert max(tensor for _, tensor in places.values()) == groups.num_tensors - 1 == 1


def test_a_kind_without_pages_is_refused_by_its_name():
    with pytest.raises(AssertionError, match="none"):
        group_layers([FULL, LayerKind("none")])


def test_groups_of_states_are_the_last_and_are_called_that():
    groups = group_layers([STATE, STATE, window(8), STATE, STATE, FULL] * 2)
    assert [group.kind for group in groups.groups] == [FULL, window(8), *[STATE] * 4]
    assert str(groups) == "layers in groups: 2 of all tokens, 2 of 8 tokens" + ", 2 of a state" * 4


def test_a_block_has_room_for_a_state():
    state = StateSpec(2, 4, 16, 24, 4, "ssd")  # 4 matrices of 16 by 24 numbers, 3 inputs of 160 channels: 8064 bytes
    assert [block_size_for(state, size, 16) for size in (512, 504, 503, 100)] == [16, 16, 32, 96]
    assert block_size_for(state, 100, 128) == 128


# ------------------------------------------------------------------------------------------------ what a request holds


@given(
    windows=st.sampled_from(WINDOWS),
    num_tokens=st.integers(1, 90),
    most=st.integers(1, 20),
    num_decodes=st.integers(0, 30),
)
@settings(deadline=None, max_examples=50)
def test_a_request_holds_its_windows_and_never_more_than_was_foretold(windows, num_tokens, most, num_decodes):
    kv, req = make(windows, num_blocks=200, most_new=most), request("a", range(num_tokens))
    for _ in range(num_decodes + 1):
        assert compute(kv, req, most) is not None
        computed = req.num_computed_tokens
        bound = groups_of(windows).most_blocks(computed, BLOCK, most)
        assert kv.usage.num_total - kv.usage.num_free <= bound
        for group, size in enumerate(windows):
            kept = kept_by(kv, "a", group)
            assert len(kept) == -(-computed // BLOCK)
            assert None not in kept[first_kept(computed, size, BLOCK) :]
        req.token_ids.append(1)


@given(windows=st.sampled_from(WINDOWS), num_blocks=st.integers(1, 60), most=st.integers(1, 20))
@settings(deadline=None, max_examples=50)
def test_the_longest_request_fits_and_a_longer_one_does_not(windows, num_blocks, most):
    groups = groups_of(windows)
    capacity = groups.capacity(num_blocks, BLOCK, most)
    if capacity > 1000:  # windows alone, and all of them fit
        capacity = 1000
    assert groups.most_blocks(capacity, BLOCK, most) <= num_blocks
    if capacity < 1000:
        assert groups.most_blocks(capacity + 1, BLOCK, most) > num_blocks
    kv = make(windows, num_blocks, most_new=most)
    assert capacity == 0 or compute(kv, request("a", range(capacity)), most) is not None


@given(
    windows=st.sampled_from(WINDOWS),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    num_blocks=st.integers(1, 60),
    most=st.integers(1, 8),
)
@settings(deadline=None, max_examples=200)
def test_requests_whose_blocks_are_foretold_grow_side_by_side(windows, lengths, num_blocks, most):
    kv = make(windows, num_blocks, most_new=most)
    if sum(map(kv.most_blocks, lengths)) > num_blocks:
        return
    growing = [(request(str(i), [i]), length) for i, length in enumerate(lengths)]
    while growing:
        for req, length in growing:
            assert compute(kv, req, most) is not None
            more = min(most, length - req.num_tokens)
            req.token_ids += [int(req.id)] * more
        growing = [(req, length) for req, length in growing if req.num_computed_tokens < length]


def test_a_pool_holds_more_requests_of_a_model_with_windows():
    """Six layers, two of which see all: as many bytes hold twice as many requests of 400 tokens."""
    num_layer_blocks, kinds = 1200, [FULL, window(16), window(16)] * 2
    held = {}
    for name, groups in ("windows", group_layers(kinds)), ("one group", one_group(kinds)):
        indexes = [HashPrefix(seed="test") for _ in groups.windows]
        prefix = GroupPrefix(indexes, groups.windows, BLOCK, num_layer_blocks // groups.num_tensors)
        num_blocks = num_layer_blocks // groups.num_tensors
        kv = PagedKVManager(num_blocks, BLOCK, prefix, groups=groups, most_new_tokens=16)
        held[name] = next(i for i in range(99) if compute(kv, request(f"{i}", range(1000 * i, 1000 * i + 400))) is None)
    assert held == {"one group": 2, "windows": 5}


@pytest.mark.parametrize("windows", [(None, 5), (5,), (None, 3, 12), (None, OF_STATE)])
def test_who_returns_from_the_host_has_its_windows_where_they_were(windows):
    kv, req = make(windows, num_host_blocks=60, swap_policy=Swap()), request("a", range(41))
    compute(kv, req)
    before = [kept_by(kv, "a", group) for group in range(len(windows))]
    read = [first_kept(41, size, BLOCK) for size in windows]  # where what the next token reads begins
    assert max(read) > 0
    kv.free(req, keep=True)
    kv.check()
    assert kv.usage.num_free == 60 and kv.lookup(req) == 41
    out = dict(kv.moves.swap_out)
    kv.moves.drain(StepPlan(0))
    req.token_ids.append(1)
    kv.allocate(req, 1)
    back = dict(kv.moves.swap_in)
    after = [kept_by(kv, "a", group) for group in range(len(windows))]
    for kept, first, now in zip(before, read, after, strict=True):
        assert now == [None] * first + [back[out[block]] for block in kept[first:]]
    kv.check()
    kv.free(req)
    assert kv.usage.num_free == 60


def test_only_what_holds_computed_tokens_goes_to_the_host():
    kv, req = make((None, 5), num_host_blocks=60, swap_policy=Swap()), request("a", range(30))
    compute(kv, req, most=6)
    kv.allocate(
        req, 1, lookahead=10
    )  # 8 blocks of each group hold 30 tokens and two more; and there are two for drafts
    kv.free(req, keep=True)
    assert len(kv.moves.swap_out) == 8 + (8 - first_kept(30, 5, BLOCK))
    kv.check()


@pytest.mark.parametrize("num_tokens, num_shared", [(41, 40), (38, 37), (20, 0)])
def test_a_fork_behind_a_window_that_has_moved_on_is_computed_from_its_beginning(num_tokens, num_shared):
    """A child that begins earlier needs blocks that its parent has given back."""
    kv, parent = make((None, 5)), request("a", range(40))
    compute(kv, parent, most=8)
    child = request("b", range(num_tokens))
    assert kv.fork(parent, child) == num_shared
    assert ("b" in kv._found) == bool(num_shared)


def test_from_a_state_that_may_have_moved_on_nobody_forks_and_none_is_kept():
    kv, parent = make((None, OF_STATE), num_host_blocks=60, swap_policy=Swap()), request("a", range(40))
    compute(kv, parent, most=8)
    assert kv.fork(parent, request("b", range(41))) == 40
    assert kv.fork(parent, request("c", range(40))) == 0  # it would begin at 39, and the state has the fortieth token
    parent.token_ids.append(1)
    kv.allocate(parent, 1)  # for a step that is in flight, or that fails
    assert kv.fork(parent, request("d", range(41))) == 0
    kv.free(parent, keep=True)
    assert "a" not in kv.swap.kept and kv.moves.notes == ["preempt a: recompute (its states have moved on)"]
    kv.check()


def test_waste_of_a_pool_of_two_groups_computed_by_hand():
    """40 tokens: of the group that sees all 10 blocks, of the window of 5 the last two, from token 32 on."""
    kv, req = make((None, 5)), request("a", range(41))
    kv.lookup(req)
    kv.allocate(req, 40)
    req.num_computed_tokens = 40
    kv._give_back_behind(kv.tables["a"].blocks, 40)
    slots = 60 * BLOCK
    assert paged_waste(kv, {"a": req}, {"a": 41}) == pytest.approx(Waste((40 + 8) / slots, 0, 0, 0))
    free = 60 - 12
    assert paged_waste(kv, {"a": req}, {"a": 41}, request("n", range(4 * free // 2))).external == 0
    late = request("n", range(4 * free // 2 + 1))  # a block more of each group
    assert paged_waste(kv, {"a": req}, {"a": 41}, late).external == pytest.approx(4 * free / slots)


# ------------------------------------------------------------------------------------------------------------ prefixes


@pytest.mark.parametrize("index", INDEXES)
def test_a_window_needs_its_last_blocks_only(index):
    kv = make((None, 5), index=index)
    a = request("a", range(40))
    compute(kv, a)
    kv.free(a)
    window_index = kv.index._groups[1][0]
    keys = kv.index.keys(a, 10, BLOCK)
    for block in window_index.match(keys[:5]):  # what a long time may evict
        window_index.drop(block)
        kv.usage.num_cached -= 1
    b = request("b", range(40))
    assert compute(kv, b) == 36
    assert kept_by(kv, "b", 1)[:7] == [None] * 7


@pytest.mark.parametrize("index", INDEXES)
def test_where_a_window_has_a_gap_the_prefix_ends_before_it(index):
    kv = make((None, 16), index=index)
    a = request("a", range(41))
    compute(kv, a, most=41)
    kv.free(a)
    window_index = kv.index._groups[1][0]
    keys = kv.index.keys(a, 10, BLOCK)
    (gone,) = window_index.match(keys[:8], 7)  # the eighth block: those that follow cannot do without it
    window_index.drop(gone)
    kv.usage.num_cached -= 1
    assert kv.lookup(request("b", range(41))) == 28
    assert kv.lookup(request("c", range(80))) == 28


class GroupMachine(RuleBasedStateMachine):
    """Requests come, are computed, forked, preempted and freed at random, over tokens that are often equal. What is
    written to a block is noted, so whatever is found in it can be checked."""

    @initialize(
        windows=st.sampled_from(WINDOWS),
        index=st.sampled_from(sorted(INDEXES)),
        num_blocks=st.integers(6, 70),
        most=st.integers(1, 24),
        swaps=st.booleans(),
    )
    def start(self, windows, index, num_blocks, most, swaps):
        swapping = {"num_host_blocks": 30, "swap_policy": Swap()} if swaps else {}
        self.kv, self.windows, self.most = make(windows, num_blocks, index, most, **swapping), windows, most
        self.requests, self.waiting, self.count = {}, {}, 0
        self.content, self.host = {}, {}  # block -> (group, its tokens from the beginning)

    def move(self):
        """What the plan says of blocks, as the runner does it."""
        moves = self.kv.moves
        for source, target, pairs in (
            (self.content, self.host, moves.swap_out),
            (self.content, self.content, moves.copies),
            (self.host, self.content, moves.swap_in),
        ):
            for (_, to), what in zip(pairs, [source[a] for a, _ in pairs], strict=True):
                target[to] = what
        moves.drain(StepPlan(0))

    def write(self, req, start, end):
        for group in range(self.kv.num_groups):
            kept = kept_by(self.kv, req.id, group)
            for at in range(start // BLOCK, -(-end // BLOCK)):
                self.content[kept[at]] = group, req.token_ids[: min(end, (at + 1) * BLOCK)]

    def see(self, req, start):
        """What a token at `start` reads is there, and is req's."""
        for group, size in enumerate(self.windows):
            kept = kept_by(self.kv, req.id, group)
            for at in range(first_kept(start, size, BLOCK), -(-start // BLOCK)):
                owner, tokens = self.content[kept[at]]
                want = req.token_ids[: min(start, (at + 1) * BLOCK)]
                assert owner == group and (tokens if size == OF_STATE else tokens[: len(want)]) == want

    def step(self, req, start):
        count = min(self.most, req.num_tokens - start)
        blocks = self.kv.allocate(req, count)
        self.move()
        if blocks is None:
            return False
        self.see(req, start)
        self.write(req, start, start + count)
        req.num_computed_tokens = start + count
        self.kv.commit(req)
        return True

    @rule(kind=st.integers(0, 2), length=st.integers(1, 50))
    def add(self, kind, length):
        req = request(f"{self.count}", [kind] * min(length, 20) + list(range(max(0, length - 20))))
        self.count += 1
        self.waiting[req.id] = req

    @rule(which=st.integers(0, 9))
    def admit(self, which):
        if self.waiting:
            req = list(self.waiting.values())[which % len(self.waiting)]
            if self.step(req, self.kv.lookup(req)):
                self.requests[req.id] = self.waiting.pop(req.id)

    @rule(which=st.integers(0, 9), token=st.integers(0, 2))
    def go_on(self, which, token):
        if self.requests:
            req = list(self.requests.values())[which % len(self.requests)]
            if req.num_computed_tokens == req.num_tokens:
                req.token_ids.append(token)
            self.step(req, req.num_computed_tokens)

    @rule(which=st.integers(0, 9), keep=st.booleans())
    def fail(self, which, keep):
        """In the middle of a step, and all of it is preempted."""
        if self.requests:
            req = list(self.requests.values())[which % len(self.requests)]
            start, count = req.num_computed_tokens, min(self.most, req.num_tokens - req.num_computed_tokens)
            if count and self.kv.allocate(req, count) is not None:
                self.move()
                self.write(req, start, start + count)
                self.leave(which, keep)

    @rule(which=st.integers(0, 9), shorter=st.integers(0, 12), token=st.integers(0, 2))
    def fork(self, which, shorter, token):
        if self.requests:
            parent = list(self.requests.values())[which % len(self.requests)]
            known = parent.token_ids[: max(1, parent.num_computed_tokens - shorter)]
            child = request(f"{self.count}", [*known, token])
            self.count += 1
            if (start := self.kv.fork(parent, child)) and self.step(child, start):
                self.requests[child.id] = child
            else:
                self.kv.free(child)

    @rule(which=st.integers(0, 9), keep=st.booleans())
    def leave(self, which, keep):
        if self.requests:
            req = self.requests.pop(list(self.requests)[which % len(self.requests)])
            self.kv.free(req, keep=keep)
            self.move()
            if keep:
                req.num_computed_tokens = 0
                self.waiting[req.id] = req

    @rule()
    def forget(self):
        self.kv.forget_cached()

    @invariant()
    def holds(self):
        if hasattr(self, "kv"):
            self.kv.check()


GroupMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestGroupMachine = GroupMachine.TestCase


@pytest.mark.parametrize("name", ["qwen3.5-0.8b", "granite-4.0-h-350m"])
def test_docs_say_what_models_with_states_take(name):
    """A row of the table in docs/models.md: of 32,000 tokens in bf16, in steps of 512."""
    row = next(
        line
        for line in (Path(__file__).parents[2] / "docs/models.md").read_text().splitlines()
        if f"| `{name}` |" in line
    )
    spec = dummy_spec(name)
    of_token = 2 * spec.num_kv_heads * spec.head_size * 2
    size = block_size_for(spec.state, of_token, 16)
    groups = group_layers([STATE if linear else FULL for linear in spec.linear])
    taken = groups.most_blocks(32_000, size, 512) * groups.num_tensors * size * of_token
    whole = 32_000 * spec.num_layers * of_token
    assert row.endswith(f"| {taken / 1e6:.0f} MB | {whole / 1e9:.1f} GB | {size} |")
