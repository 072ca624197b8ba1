"""Looking continuations up: each index against a search through the text."""

import random
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
from spec_decode.noting import Throttle

from minivllm import SamplingParams
from minivllm.config import EngineConfig
from minivllm.plan import Join
from minivllm.spec_decode.lookup import NOTHING, Guess, LookupProposer, trust_of
from minivllm.spec_decode.make import suffix
from minivllm.spec_decode.ngram import NGram, naive_draft
from minivllm.spec_decode.suffix import MAX_SALTS, EarlierBySalt, EarlierOutputs, SuffixAutomaton, SuffixLookup
from minivllm.spec_decode.throttle import NUM_TRUST


def texts(seed: int, num: int = 40):
    rng = random.Random(seed)
    for _ in range(num):
        yield [rng.randrange(rng.choice((2, 3, 9))) for _ in range(rng.randrange(1, 40))]


@pytest.mark.parametrize("low, high", [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_an_ngram_is_found_as_a_search_finds_it(low, high):
    for text in texts(low * 10 + high):
        for cut in range(1, len(text) + 1):
            index = NGram(text[: cut // 2], low, high)
            index.extend(text[cut // 2 : cut])
            assert index.draft(5).tokens == naive_draft(text[:cut], low, high, 5)


def test_an_ngram_guess_goes_on_as_the_text_has_begun():
    assert NGram([5, 6, 7, 5, 6, 7, 5], 1, 3).draft(7).tokens == [6, 7, 5, 6, 7, 5, 6]


def test_a_longer_match_is_more_evidence():
    long = list(range(20))
    assert NGram([*long, 50, *long], 2, 4).draft(3).trust == NUM_TRUST - 1
    assert NGram([1, 2, 9, 8, 1, 2], 2, 4).draft(3) == ([9, 8, 1], 1)
    assert [trust_of(n) for n in (1, 2, 3, 4, 7, 8, 9, 99)] == [0, 1, 1, 2, 2, 3, 3, 3]


def longest_ending_before(text: list[int], end: list[int]) -> int:
    """Length of the longest ending of `end` that occurs in text."""
    for n in range(len(end), 0, -1):
        if any(text[i : i + n] == end[len(end) - n :] for i in range(len(text) - n + 1)):
            return n
    return 0


def test_the_suffix_link_is_the_longest_ending_that_occurred_before():
    for text in texts(1):
        automaton = SuffixAutomaton()
        for i, token in enumerate(text):
            automaton.extend(token)
            link = automaton.link[automaton.last]
            assert automaton.length[link] == longest_ending_before(text[:i], text[: i + 1])


def test_a_walk_finds_the_longest_ending_in_a_text_that_grows():
    rng = random.Random(2)
    for _ in range(60):
        automaton, outputs = SuffixAutomaton(), []
        query, state, matched = [], 0, 0
        for _ in range(40):
            if rng.random() < 0.15:
                outputs.append([rng.randrange(3) for _ in range(rng.randrange(1, 12))])
                automaton.start_over()
                for token in outputs[-1]:
                    automaton.extend(token)
            query.append(rng.randrange(3))
            before = matched
            state, matched = automaton.step(state, matched, query[-1])
            longest = max((longest_ending_before(text, query) for text in outputs), default=0)
            assert matched == min(longest, before + 1), "a match grows by one token at most"


def test_the_most_frequent_continuation_is_followed():
    text = [1, 2, 3, 4, 6, 1, 2, 3, 5, 7, 1, 2, 3, 4, 8, 1, 2]
    assert SuffixLookup(text, len(text), EarlierOutputs(0)).draft(2).tokens == [3, 4]
    assert SuffixLookup(text[:2], 2, EarlierOutputs(0)).draft(2).tokens == []


def test_earlier_outputs_help_a_request_that_has_not_said_it_yet():
    earlier = EarlierOutputs(100)
    first = SuffixLookup([9, 9, 1, 2, 3, 4, 5], 2, earlier)
    second = SuffixLookup([7, 8], 2, earlier)
    assert second.draft(4).tokens == []
    first.close()
    second.extend([2, 3])
    assert second.draft(4).tokens == [4, 5]
    assert SuffixLookup([0, 9], 2, earlier).draft(4).tokens == [], "prompts are not remembered"


def test_earlier_outputs_are_bounded_and_a_request_finds_its_place_again():
    earlier = EarlierOutputs(50)
    request = SuffixLookup([0], 1, earlier)
    request.extend([31, 32])
    for i in range(30):
        earlier.add([10 + i, 11 + i, 12 + i, 13 + i])
        assert earlier.num_tokens == sum(map(len, earlier.outputs)) <= 50
    assert earlier.generation > 0
    assert request.draft(4).tokens[:2] == [33, 34]
    earlier.add(list(range(500)))
    assert earlier.num_tokens == 50


def test_a_lookup_costs_no_search():
    """Asserted in states, not in seconds: at most two a token."""
    automaton = SuffixAutomaton()
    rng = random.Random(0)
    for _ in range(3000):
        automaton.extend(rng.randrange(4))
    assert len(automaton.next) <= 2 * 3000


def test_earlier_outputs_are_of_one_salt_and_bounded_in_all():
    earlier = EarlierBySalt(100)
    earlier.of("a").add([1, 2, 3, 4])
    assert SuffixLookup([0, 2], 1, earlier.of("a")).draft(2).tokens == [3, 4]
    assert SuffixLookup([0, 2], 1, earlier.of("b")).draft(2).tokens == []
    for salt in "bcde":
        for _ in range(9):
            earlier.of(salt).add(list(range(10)))
    earlier.of("a")
    assert sum(each.num_tokens for each in earlier.by_salt.values()) <= 100
    assert SuffixLookup([0, 2], 1, earlier.of("a")).draft(2).tokens == [3, 4], "who has most forgets first"
    for number in range(2 * MAX_SALTS):
        earlier.of(f"made up {number}").add([1])
    assert len(earlier.by_salt) == MAX_SALTS


def occurrences(outputs: list[list[int]], of: list[int]) -> int:
    return sum(text[i : i + len(of)] == of for text in outputs for i in range(len(text) - len(of) + 1))


def test_each_string_is_counted_as_often_as_it_occurs():
    """Exactly, in outputs that have no more endings than a token counts."""
    rng = random.Random(3)
    for _ in range(60):
        outputs = [[rng.randrange(2) for _ in range(rng.randrange(1, 12))] for _ in range(rng.randrange(1, 5))]
        automaton = SuffixAutomaton()
        for output in outputs:
            automaton.start_over()
            for token in output:
                automaton.extend(token)
        for output in outputs:
            for start in range(len(output)):
                state = 0
                for end in range(start, len(output)):
                    state = automaton.next[state][output[end]]
                    assert automaton.count[state] == occurrences(outputs, output[start : end + 1])


def test_a_guess_scores_what_is_expected_to_be_right_and_ends_where_that_is_too_little():
    text = [1, 2, 3, 4, 6, 1, 2, 3, 5, 7, 1, 2, 3, 4, 8, 1, 2]
    automaton = SuffixAutomaton()
    for token in text:
        automaton.extend(token)
    tokens, score = automaton.follow(automaton.link[automaton.last], 3)
    assert tokens == [3, 4, 6] and score == pytest.approx(1 + 2 / 3 + 1 / 3), "6 and 8 are as likely: the lower one"
    for num, expected in ((5, [20]), (6, [])):  # shares of a fifth, and of a sixth
        each = SuffixAutomaton()
        for token in [t for i in range(num) for t in (9, 20 + i)]:
            each.extend(token)
        each.start_over()
        each.extend(9)
        assert each.follow(each.last, 1)[0] == expected


def test_the_better_guess_is_taken_and_of_equals_the_requests_own():
    earlier = EarlierOutputs(100)
    earlier.add([1, 2, 3, 4, 50, 51, 52])
    assert SuffixLookup([3, 60, 61, 62, 1, 2, 3], 7, earlier).draft(3).tokens == [4, 50, 51], "longer"
    assert SuffixLookup([3, 60, 61, 62, 1, 2, 3], 7, EarlierOutputs(100)).draft(3).tokens == [60, 61]
    assert SuffixLookup([2, 3, 60, 61, 62, 2, 3], 7, earlier).draft(3).tokens == [60, 61, 62]
    earlier.add([70, 71, 3, 4, 8])
    assert SuffixLookup([3, 60, 3], 3, earlier).draft(1).tokens == [60]


def test_an_output_is_remembered_whole_however_it_came():
    earlier = EarlierOutputs(100)
    request = SuffixLookup([0, 5, 6], 1, earlier)
    request.extend([7])
    request.extend([8, 9])
    request.close()
    assert [*earlier.outputs] == [[5, 6, 7, 8, 9]]


def test_a_request_finds_its_place_after_each_time_that_outputs_are_forgotten():
    earlier = EarlierOutputs(20)
    request = SuffixLookup([0], 1, earlier)
    request.extend([31, 32])
    for time in range(1, 6):
        earlier.shrink(0)
        assert earlier.generation == time
        earlier.add([0] * time + [31, 32, 33 + time, 34])
        assert request.draft(2).tokens == [33 + time, 34]


def test_of_outputs_that_are_too_many_the_newer_half_stays():
    earlier = EarlierOutputs(12)
    for start in (10, 20, 30):
        earlier.add([start, start + 1, start + 2, start + 3])
    assert len(earlier.outputs) == 3 and earlier.generation == 0, "as many as there may be"
    earlier.add([40, 41])
    assert [*earlier.outputs] == [[30, 31, 32, 33], [40, 41]] and earlier.generation == 1
    earlier.add([50] * 9)
    assert [*earlier.outputs] == [[50] * 9], "a long one stays by itself"


def test_the_salt_that_was_not_used_for_longest_is_forgotten():
    earlier = EarlierBySalt(1000)
    for number in range(MAX_SALTS):
        earlier.of(str(number))
    earlier.of("0")
    earlier.of("new")
    assert "1" not in earlier.by_salt and {"0", "2", "new"} <= earlier.by_salt.keys()


class Told:
    """A Lookup that guesses what it is told to."""

    def __init__(self, guess: Guess):
        self.guess, self.heard = guess, []

    def extend(self, tokens):
        self.heard += tokens

    def draft(self, most):
        return Guess(self.guess.tokens[:most], self.guess.trust)

    def close(self):
        self.heard = "closed"


def test_what_is_looked_up_is_cut_by_the_throttle_which_learns_what_was_accepted():
    """Four requests: two that guess, one that has nothing to guess, one that says nothing yet (its prompt goes on)."""
    throttle = Throttle([1, 3])
    proposer = LookupProposer(lambda join: Told(join), 3, throttle)
    for row, guess in ((7, Guess([1, 2, 3, 4], 2)), (5, NOTHING), (9, Guess([6, 7, 8, 9], 1)), (4, Guess([5], 0))):
        proposer.join(row, guess)
    batch = SimpleNamespace(req_ids=["a", "b", "c", "d"], rows=np.array([7, 5, 9, 4]))
    said = {"a": [31], "b": [32], "c": [33]}
    assert throttle.told == [("reset", row) for row in (7, 5, 9, 4)]
    throttle.told.clear()
    assert proposer.propose(SimpleNamespace(drafts={}), batch, said, None) == {"a": [1], "c": [6, 7, 8]}
    assert throttle.told == [("cut", [7, 9], [2, 1], [3, 3], 3)]
    throttle.told.clear()
    throttle.counts = [0, 0]
    drafted = SimpleNamespace(drafts={"a": [1], "c": [6, 7, 8]})
    assert proposer.propose(drafted, batch, {"a": [1, 34], "c": [6, 35]}, None) == {}
    assert throttle.told == [("learn", 7, 2, 1, 1), ("learn", 9, 1, 3, 1), ("cut", [7, 9], [2, 1], [3, 3], 2)]
    assert proposer.lookups[7].heard == [31, 1, 34] and proposer.lookups[5].heard == [32]
    lookup = proposer.lookups[7]
    for row in (7, 5, 9, 4):
        proposer.leave(row)
    assert lookup.heard == "closed" and not proposer.lookups and not proposer.trust


def test_who_shares_a_salt_guesses_by_each_others_outputs_and_by_no_prompt():
    proposer = suffix(EngineConfig(), None, None, None).make(SimpleNamespace(throttle=Throttle([4])))

    def leaves(tokens: list[int], num_prompt_tokens: int, salt: str) -> None:
        proposer.join(0, Join("x", tokens, num_prompt_tokens, SamplingParams(), cache_salt=salt))
        proposer.leave(0)

    def guess(salt: str) -> list[int]:
        proposer.join(1, Join("y", [0, 12], 2, SamplingParams(), cache_salt=salt))
        return proposer.lookups[1].draft(2).tokens

    leaves([11, 12, 13, 14, 15], 4, "a")
    assert guess("a") == [], "the prompt says 12, 13"
    leaves([11, 12, 13, 14, 15], 1, "a")
    assert guess("a") == [13, 14] and guess("b") == []


def test_a_match_is_all_of_the_evidence():
    """Down to the first token of the text, and no further."""
    for num in range(1, 20):
        text = [*range(num), 99, *range(num)]
        assert NGram(text, 1, 3).draft(1) == ([99], trust_of(min(num, 16)))
    assert NGram([5, 1, 2, 9, 6, 1, 2], 1, 2).draft(1) == ([9], 1)


def test_the_longest_run_of_all_may_be_the_whole_text_but_one_token():
    assert NGram([4, 4, 4], 2, 3).draft(2) == ([4, 4], 1)
    assert NGram([4, 4], 1, 3).draft(1) == ([4], 0)
    assert naive_draft([4, 4, 4], 2, 3, 2) == [4, 4] and naive_draft([4, 4], 1, 3, 1) == [4]


def test_a_salt_that_has_most_forgets_half():
    earlier = EarlierBySalt(100)
    for size in (10, 20, 30, 40):
        earlier.of("big").add([size] * 10)
    earlier.of("small").add([1] * 60)
    assert earlier.of("big").num_tokens == 40 and earlier.of("small").num_tokens == 60, "as many as there may be"
    earlier.of("big").add([50])
    assert earlier.of("small").num_tokens == 0, "an output is kept or forgotten as a whole"
    assert earlier.of("big").num_tokens == 41
    earlier.of("small").add([1] * 60)
    earlier.of("small")
    earlier.of("third").add([2] * 55)
    assert {salt: each.num_tokens for salt, each in earlier.by_salt.items()} == {"big": 41, "small": 0, "third": 55}


@pytest.mark.parametrize("seed", range(40))
def test_a_state_stands_for_all_endings_that_occur_in_the_same_places(seed):
    rng = random.Random(seed)
    texts = [[rng.randrange(2 + seed % 3) for _ in range(rng.randrange(1, 20))] for _ in range(1 + seed % 4)]
    automaton, places = SuffixAutomaton(), defaultdict(set)  # {a part of the texts: where it ends}
    for i, text in enumerate(texts):
        automaton.start_over()
        for end, token in enumerate(text, 1):
            automaton.extend(token)
            for start in range(end):
                places[tuple(text[start:end])].add((i, end))
    longest = defaultdict(int)
    for part, ends in places.items():
        longest[frozenset(ends)] = max(longest[frozenset(ends)], len(part))
    assert sorted(automaton.length) == [0, *sorted(longest.values())]
