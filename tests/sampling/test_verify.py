"""Drafts may change how many tokens a step gives, never which (match), and never their distribution (rejection)."""

import random

import numpy as np
import pytest
import torch
from sampling.test_sampler import PROMPT, VARIED, V, model

from minivllm.plan import Join
from minivllm.request import SamplingParams
from minivllm.sampling import reference
from minivllm.sampling.pick import Draws
from minivllm.sampling.rejection import COIN, Rejection
from minivllm.sampling.sampler import Sampler
from minivllm.sampling.uniform import uniform
from minivllm.sampling.verify import Verifier


def chain(sampler: Sampler, row: int, tokens: list[int], num_tokens: int) -> list[int]:
    """What the request gives with no drafts; the sampler's processors see it."""
    out = []
    for _ in range(num_tokens):
        now = tokens + out
        drawn = sampler(model(now).unsqueeze(0), np.array([row]), np.array([len(now)])).tokens
        sampler.observe(np.array([row]), drawn)
        out.append(int(drawn[0]))
    return out


def speculate(requests: list[SamplingParams], right: list[list[int]], num_tokens: int, seed: int) -> list[list[int]]:
    """All requests through one verifier, in changing order, with drafts that are right up to a random place."""
    rng = random.Random(seed)
    sampler = Sampler(V, len(requests))
    for row, params in enumerate(requests):
        sampler.join(row, Join("", PROMPT, len(PROMPT), params))
    out: list[list[int]] = [[] for _ in requests]
    while min(map(len, out)) < num_tokens:
        prefixes, rows, drafts = [], [], []
        for row in rng.sample(range(len(requests)), len(requests)):
            k = rng.randrange(5)
            ahead = [*right[row][len(out[row]) :], *[0] * k][:k]
            guess = [token if rng.random() < 0.8 else rng.randrange(V) for token in ahead]
            prefixes += [PROMPT + out[row] + guess[:i] for i in range(k + 1)]
            rows += [row] * (k + 1)
            drafts += [*guess, -1]
        logits, positions = torch.stack([model(p) for p in prefixes]), np.array([len(p) for p in prefixes])
        got = Verifier(sampler)(logits, np.array(rows), positions, np.array(drafts))
        assert (np.diff(got.kept) > 0).all() and not len(got.invalid)
        for i, token in zip(got.kept.tolist(), got.tokens.tolist(), strict=True):
            assert positions[i] == len(PROMPT) + len(out[rows[i]]), "a token is missing, or comes from a void row"
            out[rows[i]].append(token)
        sampler.check()
    return [tokens[:num_tokens] for tokens in out]


@pytest.mark.parametrize("seed", range(6))
def test_match_gives_the_tokens_of_an_engine_without_drafts(seed):
    """Parameters with and without processors in one batch: penalties, bad words and min_tokens see accepted drafts."""
    sampler = Sampler(V, len(VARIED))
    for row, params in enumerate(VARIED):
        sampler.join(row, Join("", PROMPT, len(PROMPT), params))
    right = [chain(sampler, row, PROMPT, 14) for row in range(len(VARIED))]
    assert speculate(VARIED, right, 14, seed) == right


def test_match_gives_the_tokens_of_the_slow_reference():
    params = SamplingParams(seed=5, temperature=0.9, top_p=0.9)
    where = {"temperature": 0.9, "top_k": 0, "top_p": 0.9, "min_p": 0.0}
    sampler = Sampler(V, 1)
    sampler.join(0, Join("", PROMPT, 3, params))
    right = chain(sampler, 0, PROMPT, 4)
    for drafts in ([], right[:3], [right[0], 0, right[2]], [right[0] + 1]):
        prefixes = [PROMPT + drafts[:i] for i in range(len(drafts) + 1)]
        got = Verifier(sampler)(
            torch.stack([model(p) for p in prefixes]),
            np.zeros(len(prefixes), np.int64),
            np.array([len(p) for p in prefixes]),
            np.array([*drafts, -1]),
        )
        assert got.tokens.tolist() == reference.verify(lambda t: model(t).numpy(), where, PROMPT, drafts, 5)


def test_every_accepted_position_reports_its_log_probabilities():
    for extra in ({}, {"repetition_penalty": 1.3}):  # vectorised, and in rounds
        sampler = Sampler(V, 1)
        sampler.join(0, Join("", PROMPT, 3, SamplingParams(temperature=0, logprobs=2, **extra)))
        right = chain(sampler, 0, PROMPT, 3)
        sampler.leave(0)
        sampler.join(0, Join("", PROMPT, 3, SamplingParams(temperature=0, logprobs=2, **extra)))
        prefixes = [PROMPT + right[:i] for i in range(4)]
        logits = torch.stack([model(p) for p in prefixes])
        got = Verifier(sampler)(logits.clone(), np.zeros(4, np.int64), np.arange(3, 7), np.array([*right, -1]))
        assert len(got.tokens) == 4
        for token, entries, row in zip(got.tokens.tolist(), got.logprobs, logits.log_softmax(-1), strict=True):
            assert entries[0][0] == token and len(entries) == 3
            assert entries[0][1] == pytest.approx(row[token].item(), abs=4e-6)


class Watcher:
    """A processor that notes what it is told, in order."""

    keeps_argmax = False
    follows_output = True

    def __init__(self, vocab_size, max_rows):
        self.seen: list = []

    def join(self, row, params, token_ids, num_prompt_tokens):
        return params.seed == 77

    def leave(self, row):
        pass

    def observe(self, row, token):
        self.seen.append(token)

    def apply(self, logits, rows):
        self.seen.append("apply")
        return logits


def test_a_processor_observes_final_tokens_alone_each_before_the_next_position():
    sampler = Sampler(V, 1, processors=(Watcher,))
    sampler.join(0, Join("", PROMPT, 3, SamplingParams(temperature=0, seed=77)))
    best = [9, 8, 7, 6]
    logits = torch.zeros(4, V)
    logits[range(4), best] = 5.0
    got = Verifier(sampler)(logits, np.zeros(4, np.int64), np.arange(3, 7), np.array([9, 8, 1, -1]))
    assert got.tokens.tolist() == [9, 8, 7] and got.kept.tolist() == [0, 1, 2]
    assert sampler.processors[0].seen == ["apply", 9, "apply", 8, "apply", 7]


def test_a_step_without_drafts_is_a_sampler_s_and_is_observed():
    sampler = Sampler(V, 3, processors=(Watcher,))
    for row in (0, 2):
        sampler.join(row, Join("", PROMPT, 3, SamplingParams(temperature=0, seed=77 if row else None)))
    logits = torch.zeros(2, V)
    logits[[0, 1], [9, 8]] = 5.0
    got = Verifier(sampler)(logits, np.array([2, 0]), np.array([3, 3]), np.array([-1, -1]))
    assert got.tokens.tolist() == [9, 8] and got.kept.tolist() == [0, 1]
    assert sampler.processors[0].seen == ["apply", 9], "of the row that asks for it"


def test_rejection_draws_by_the_draws_that_it_is_given_and_looks_at_drafts_where_there_are_some():
    probs, seeds, positions = torch.rand(3, 64), np.arange(3, dtype=np.uint64), np.arange(3)
    calls = []

    def noted(name):
        return lambda *args: calls.append((name, args)) or name

    def known(row, place):
        return torch.full((V,), float(10 * row + place))

    given = Draws(noted("filter"), noted("draw"), noted("reject"), 32)
    pick = Rejection(known, given)(np.array([-1, 4, -1, 7]), np.array([5, 5, 6, 8]), np.array([0, 1, 0, 2]))
    assert pick(probs, seeds, positions, np.array([0, 2, 2])) == "draw"
    assert pick(probs, seeds, positions, np.array([1, 2, 3])) == "reject"
    (_, drawn), (_, rejected) = calls
    assert all(x is y for x, y in zip(drawn, (probs, seeds, positions), strict=True))
    assert rejected[0] is probs and rejected[1].tolist() == [4, -1, 7] and rejected[3:] == (seeds, positions)
    assert [q if q is None else q[0].item() for q in rejected[2]] == [51, None, 82]


@pytest.mark.parametrize("extra", [{}, {"repetition_penalty": 1.3}])
def test_a_broken_row_ends_its_request_only_if_the_request_gets_there(extra):
    sampler = Sampler(V, 1)
    sampler.join(0, Join("", PROMPT, 3, SamplingParams(temperature=0, **extra)))
    logits = torch.zeros(3, V)
    logits[range(3), [9, 8, 7]] = 5.0
    logits[1] = float("nan")
    at = np.zeros(3, np.int64), np.arange(3, 6)
    reached = Verifier(sampler)(logits.clone(), *at, np.array([9, 0, -1]))
    assert reached.kept.tolist() == [0, 1] and reached.invalid.tolist() == [1]
    refused = Verifier(sampler)(logits.clone(), *at, np.array([1, 0, -1]))
    assert refused.tokens.tolist() == [9] and not len(refused.invalid)


# --- rejection sampling

TINY = 8
P = torch.tensor([0.02, 0.3, 0.05, 0.2, 0.03, 0.25, 0.1, 0.05])
QS = {
    "certain": None,
    "close": torch.tensor([0.03, 0.25, 0.07, 0.2, 0.05, 0.2, 0.15, 0.05]),
    "far": torch.tensor([0.5, 0.01, 0.3, 0.01, 0.1, 0.02, 0.05, 0.01]),
    "equal": P,
    "elsewhere": torch.tensor([0.9, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0]),
}
CHI2_7_DEGREES = 29.9  # exceeded with probability 1e-4; the seeds are fixed, so the tests repeat


def draws(q: torch.Tensor | None, num: int, draft: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """num drafts, drawn from q or fixed, through the verifier: tokens, and those of the place behind accepted ones."""
    guesses = np.full(num, draft)
    if q is not None:
        guesses = torch.multinomial(q, num, replacement=True, generator=torch.Generator().manual_seed(1)).numpy()
    sampler = Sampler(TINY, num)
    for row in range(num):
        sampler.join(row, Join("", [0], 1, SamplingParams(seed=row, temperature=1.0)))
    rows = np.arange(num).repeat(2)
    drafts = np.full(2 * num, -1)
    drafts[::2] = guesses
    acceptance = Rejection(lambda row, place: q)
    got = Verifier(sampler, acceptance)(P.log().expand(2 * num, TINY).clone(), rows, np.tile([1, 2], num), drafts)
    first = got.kept % 2 == 0
    return got.tokens[first], got.tokens[~first]


def chi_square(tokens: np.ndarray) -> float:
    expected = P.double().numpy() * len(tokens)
    return float(((np.bincount(tokens, minlength=TINY) - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("name", QS)
def test_rejection_keeps_the_distribution(name):
    """20,000 draws; the next place's too, whose draw must not depend on the coin."""
    num = 20_000
    tokens, following = draws(QS[name], num)
    assert len(tokens) == num and chi_square(tokens) < CHI2_7_DEGREES
    q = torch.nn.functional.one_hot(torch.tensor(3), TINY).float() if QS[name] is None else QS[name]
    wanted = torch.minimum(P, q).sum().item()
    assert len(following) / num == pytest.approx(wanted, abs=0.015)  # four standard deviations of a coin
    if len(following):
        assert chi_square(following) < CHI2_7_DEGREES


def test_a_wrong_draft_distribution_would_be_seen():
    """The test above can fail: drafts that are all token 0, judged as if drawn from P, are all accepted."""
    sampler = Sampler(TINY, 1000)
    for row in range(1000):
        sampler.join(row, Join("", [0], 1, SamplingParams(seed=row, temperature=1.0)))
    logits, rows = P.log().expand(2000, TINY).clone(), np.arange(1000).repeat(2)
    got = Verifier(sampler, Rejection(lambda row, place: P))(
        logits, rows, np.tile([1, 2], 1000), np.tile([0, -1], 1000)
    )
    assert chi_square(got.tokens[got.kept % 2 == 0]) > 10 * CHI2_7_DEGREES


def test_rejection_gives_the_tokens_of_the_slow_reference():
    q = QS["far"]
    for row in range(60):
        sampler = Sampler(TINY, 1)
        sampler.join(0, Join("", [0], 1, SamplingParams(seed=row, temperature=1.0)))
        draft = row % TINY
        got = Verifier(sampler, Rejection(lambda row, place: q))(
            P.log().expand(2, TINY).clone(), np.zeros(2, np.int64), np.array([1, 2]), np.array([draft, -1])
        )
        coin = uniform(np.array([row], np.uint64), np.array([1]), np.zeros(1, np.int64), COIN)[0, 0]
        wanted = reference.accept(P.double().numpy(), q.double().numpy(), draft, coin, row, 1)
        assert got.tokens[0] == wanted


def test_rejection_leaves_greedy_requests_alone():
    sampler = Sampler(V, 1)
    sampler.join(0, Join("", PROMPT, 3, SamplingParams(temperature=0)))
    right = chain(sampler, 0, PROMPT, 3)
    logits = torch.stack([model(PROMPT + right[:i]) for i in range(3)])
    got = Verifier(sampler, Rejection())(logits, np.zeros(3, np.int64), np.arange(3, 6), np.array([right[0], 0, -1]))
    assert got.tokens.tolist() == right[:2]
