from __future__ import annotations

import numpy as np
import pytest
import torch

from minivllm.plan import Join
from minivllm.request import SamplingParams
from minivllm.sampling import reference
from minivllm.sampling.processors import DEFAULT_PROCESSORS
from minivllm.sampling.sampler import Sampler

V = 300
VARIED = [
    SamplingParams(temperature=0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, top_p=0.9),
    SamplingParams(seed=3, top_k=20, temperature=1.5),
    SamplingParams(seed=4, min_p=0.05, repetition_penalty=1.2),
    SamplingParams(seed=5, presence_penalty=1.0, frequency_penalty=0.5, top_k=40, top_p=0.8),
    SamplingParams(seed=-6, bad_words_token_ids=((5,), (7, 8)), logit_bias={3: 4.0}),
    SamplingParams(seed=7, min_tokens=5, eos_token_ids=(0, 1, 2)),
    SamplingParams(temperature=0, repetition_penalty=2.0),
    SamplingParams(seed=9, allowed_token_ids=list(range(10, 30)), temperature=2.0),
]
PROMPT = [11, 12, 13]


def model(tokens: list[int]) -> torch.Tensor:
    """Logits [V] that depend on the whole prefix."""
    seed = hash(tuple(tokens)) % 2**31
    return torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 3


def generate(requests: dict[int, SamplingParams], num_tokens: int, order=None, preempt_at=()) -> dict[int, list[int]]:
    """Runs requests (key = the row offset) through one sampler. `preempt_at`: steps before which all leave and rejoin
    in other rows."""
    sampler = Sampler(V, 64)
    rows = {key: key for key in requests}
    sequences = {key: list(PROMPT) for key in requests}
    for key, params in requests.items():
        sampler.join(rows[key], Join("", sequences[key], len(PROMPT), params))
    for step in range(num_tokens):
        if step in preempt_at:
            for key in requests:
                sampler.leave(rows[key])
            sampler.check()
            assert not sampler.uses.any()
            for key in requests:
                rows[key] = (rows[key] + 17) % 64
                sampler.join(rows[key], Join("", sequences[key], len(PROMPT), requests[key]))
        keys = order(list(requests), step) if order else list(requests)
        logits = torch.stack([model(sequences[key]) for key in keys])
        at = np.array([rows[key] for key in keys])
        positions = np.array([len(sequences[key]) for key in keys])
        tokens = sampler(logits, at, positions).tokens
        sampler.observe(at, tokens)
        for key, token in zip(keys, tokens.tolist(), strict=True):
            sequences[key].append(token)
        sampler.check()
    return {key: tokens[len(PROMPT) :] for key, tokens in sequences.items()}


def test_a_seed_gives_its_tokens_whatever_neighbours_order_or_preemption():
    requests = dict(enumerate(VARIED))
    expected = {key: generate({key: params}, 12)[key] for key, params in requests.items()}
    assert generate(requests, 12) == expected
    assert generate(requests, 12, order=lambda keys, step: keys[step % 3 :] + keys[: step % 3]) == expected
    assert generate(requests, 12, preempt_at=(1, 4, 5, 9)) == expected


def test_different_seeds_differ_and_the_same_seed_repeats():
    params = SamplingParams(seed=1, temperature=1.0)
    out = generate({0: params, 1: params, 2: params.replace(seed=2)}, 20)
    assert out[0] == out[1] != out[2]


def test_greedy_is_the_argmax_and_the_lowest_id_among_equals():
    sampler = Sampler(V, 4)
    sampler.join(0, Join("", PROMPT, 3, SamplingParams(temperature=0)))
    logits = torch.zeros(1, V)
    logits[0, [9, 200, 70]] = 2.0
    assert sampler(logits, np.array([0]), np.array([3])).tokens.tolist() == [9]


def test_a_sampled_token_is_the_one_of_the_slow_reference():
    # Softmax in fp32 against float64 moves a rate by 1e-6: over 600 races a difference is not expected in 1,000 runs.
    sampler = Sampler(V, 10)
    cases = VARIED[1:4]
    for row, params in enumerate(cases):
        sampler.join(row, Join("", PROMPT, 3, params))
    rows = np.arange(3)
    for position in range(200):
        logits = torch.stack([model([position, row]) for row in rows])
        got = sampler(logits.clone(), rows, np.full(3, position)).tokens
        for row, p in enumerate(cases):
            at = (p.seed, position)
            assert got[row] == reference.sample(logits[row].numpy(), p.temperature, p.top_k, p.top_p, p.min_p, *at)


@pytest.mark.parametrize("name, value", [("top_k", 7), ("top_p", 0.6), ("min_p", 0.1)])
def test_the_tokens_kept_are_those_of_transformers_warpers(name, value):
    import transformers as hf

    warper = {"top_k": hf.TopKLogitsWarper, "top_p": hf.TopPLogitsWarper, "min_p": hf.MinPLogitsWarper}[name](value)
    logits = model([1]).unsqueeze(0)
    kept = set(torch.isfinite(warper(None, logits / 0.8))[0].nonzero()[:, 0].tolist())
    sampler = Sampler(V, 1)
    sampler.join(0, Join("", PROMPT, 3, SamplingParams(seed=0, temperature=0.8, **{name: value})))
    num = 20 * len(kept) ** 2
    seen = {sampler(logits.clone(), np.array([0]), np.array([i])).tokens[0] for i in range(min(num, 1500))}
    assert seen <= kept
    assert len(seen) >= 0.7 * len(kept)


def test_logprobs_are_of_the_models_logits_before_any_processor():
    sampler = Sampler(V, 4)
    biased = SamplingParams(temperature=0, logit_bias={5: 100.0}, logprobs=2)
    for row, params in enumerate([biased, SamplingParams(seed=1), SamplingParams(seed=1, logprobs=0, temperature=3.0)]):
        sampler.join(row, Join("", PROMPT, 3, params))
    logits = torch.stack([model([i]) for i in range(3)])
    expected = logits.log_softmax(-1)
    out = sampler(logits.clone(), np.arange(3), np.full(3, 3))
    assert out.tokens[0] == 5
    assert out.logprobs[1] is None
    assert [len(p) for p in (out.logprobs[0], out.logprobs[2])] == [3, 1]
    for row in (0, 2):
        for token, logprob, _ in out.logprobs[row]:
            assert logprob == pytest.approx(expected[row, token].item(), abs=4e-6)
    assert out.logprobs[0][0][0] == 5 and out.logprobs[0][1][0] == logits[0].argmax()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_is_reported_and_its_neighbours_are_not_touched(bad, temperature):
    params = SamplingParams(temperature=temperature, seed=3, top_p=0.9, top_k=50)
    sampler = Sampler(V, 4)
    for row in range(3):
        sampler.join(row, Join("", PROMPT, 3, params))
    logits = torch.stack([model([i]) for i in range(3)])
    fine = sampler(logits.clone(), np.arange(3), np.full(3, 3))
    logits[1, :] = bad
    broken = sampler(logits, np.arange(3), np.full(3, 3))
    assert broken.invalid.tolist() == [1] and not len(fine.invalid)
    assert 0 <= broken.tokens[1] < V
    assert broken.tokens[[0, 2]].tolist() == fine.tokens[[0, 2]].tolist()


def test_a_row_may_appear_several_times_in_one_call():
    sampler = Sampler(V, 4)
    sampler.join(2, Join("", PROMPT, 3, SamplingParams(seed=4, repetition_penalty=1.5, logprobs=1)))
    logits = torch.stack([model([i]) for i in range(3)])
    rows, positions = np.array([2, 2, 2]), np.array([3, 4, 5])
    together = sampler(logits.clone(), rows, positions)
    for i in range(3):
        alone = sampler(logits[i : i + 1].clone(), rows[:1], positions[i : i + 1])
        assert alone.tokens[0] == together.tokens[i] and alone.logprobs[0] == together.logprobs[i]


class Counted:
    """A processor from outside: forbids odd tokens, keeps the argmax of nobody in particular."""

    keeps_argmax = True
    follows_output = False
    calls = 0

    def __init__(self, vocab_size, max_rows):
        pass

    def join(self, row, params, token_ids, num_prompt_tokens):
        return params.seed == 77

    def leave(self, row):
        pass

    def observe(self, row, token):
        pass

    def apply(self, logits, rows):
        Counted.calls += 1
        logits[:, 1::2] = -float("inf")
        return logits


def test_a_processor_is_called_only_while_a_row_uses_it_and_skipped_by_greedy_rows_if_it_keeps_the_argmax():
    Counted.calls = 0
    sampler = Sampler(V, 4, processors=(*DEFAULT_PROCESSORS, Counted))
    sampler.join(0, Join("", PROMPT, 3, SamplingParams(seed=1)))
    sampler.join(1, Join("", PROMPT, 3, SamplingParams(seed=77, temperature=0)))
    sampler.join(2, Join("", PROMPT, 3, SamplingParams(seed=77)))
    for position in range(30):
        sampler(model([position]).unsqueeze(0), np.array([0]), np.array([position]))
        sampler(model([position]).unsqueeze(0), np.array([1]), np.array([position]))
    assert Counted.calls == 0
    drawn = [sampler(model([p]).unsqueeze(0), np.array([2]), np.array([p])).tokens[0] for p in range(30)]
    assert Counted.calls == 30 and all(token % 2 == 0 for token in drawn)
    sampler.leave(2)
    sampler.check()


def test_rows_are_taken_once_and_given_back():
    sampler = Sampler(V, 2)
    sampler.join(1, Join("", PROMPT, 3, SamplingParams(temperature=0)))
    with pytest.raises(AssertionError, match="row 1"):
        sampler.join(1, Join("", PROMPT, 3, SamplingParams(temperature=0)))
    sampler.leave(1)
    with pytest.raises(AssertionError, match="row 1"):
        sampler.leave(1)
    with pytest.raises(AssertionError, match="resolved"):
        sampler.join(0, Join("", PROMPT, 3, SamplingParams()))


def test_no_rows_no_tokens():
    out = Sampler(V, 2)(torch.empty(0, V), np.empty(0, np.int64), np.empty(0, np.int64))
    assert len(out.tokens) == 0 and out.logprobs == []


def test_chosen_tokens_are_reported_of_the_rows_that_ask_whatever_their_number():
    asked = [
        SamplingParams(temperature=0, logprob_token_ids=[7]),
        SamplingParams(temperature=0),
        SamplingParams(seed=3, logprob_token_ids=[3, 250, 9], logit_bias={250: 50.0}),
        SamplingParams(seed=4, logprobs=2),
    ]
    sampler = Sampler(V, 8)
    for row, params in enumerate(asked):
        sampler.join(row + 2, Join("", PROMPT, 3, params))
    logits = torch.stack([model([i]) for i in range(4)])
    expected = logits.log_softmax(-1)
    out = sampler(logits.clone(), np.arange(2, 6), np.full(4, 3))
    taken = out.tokens.tolist()
    wanted = [[taken[0], 7], None, [taken[2], 3, 250, 9], [taken[3], *logits[3].topk(2).indices.tolist()]]
    assert taken[0] == logits[0].argmax() and taken[2] == 250
    for row, ids in enumerate(wanted):
        entries = out.logprobs[row]
        assert (entries and [token for token, _, _ in entries]) == ids
        for token, logprob, rank in entries or ():
            assert logprob == pytest.approx(expected[row, token].item(), abs=4e-6)
            assert rank == (logits[row] >= logits[row, token]).sum()
    sampler.leave(2)
    sampler.check()
    sampler.join(2, Join("", PROMPT, 3, SamplingParams(temperature=0, logprobs=0)))
    assert len(sampler(logits[:1].clone(), np.array([2]), np.array([3])).logprobs[0]) == 1


def test_a_guess_is_the_draw_alone():
    """What a drafter asks: the request's own noise and filters, and nothing that changes logits."""
    sampler = Sampler(V, 4)
    plain = SamplingParams(seed=5, temperature=0.8, top_k=30)
    biased = plain.replace(logit_bias={9: 100.0}, logprobs=3)
    for row, params in enumerate([plain, biased, SamplingParams(temperature=0)]):
        sampler.join(row, Join("", PROMPT, 3, params))
    logits, rows, positions = torch.stack([model([0])] * 3), np.arange(3), np.array([7, 7, 7])
    drawn = sampler(logits.clone(), rows, positions).tokens.tolist()
    guessed = sampler.choose(logits.clone(), rows, positions)
    assert guessed.dtype == np.int64 and guessed.tolist() == [drawn[0], drawn[0], drawn[2]] and drawn[1] == 9

    def third(probs, seeds, where, which):
        assert (seeds.tolist(), where.tolist(), which.tolist()) == ([5, 5], [7, 7], [0, 1])
        return torch.tensor([3, 3]), torch.tensor([True, True])

    assert sampler.choose(logits, rows, positions, third).tolist() == [3, 3, drawn[2]]


def test_a_row_knows_how_many_requests_have_had_it():
    sampler = Sampler(V, 2)
    for before in range(3):
        assert sampler.generation.tolist() == [0, before]
        sampler.join(1, Join("", PROMPT, 3, SamplingParams(temperature=0)))
        sampler.leave(1)
