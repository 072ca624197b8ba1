"""Each processor against a dense computation or transformers' own, and its state over joins, tokens and leaves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.request import SamplingParams
from minivllm.sampling.processors import AllowedTokenIds, BadWords, BeginSuppress, LogitBias, MinTokens, Penalties

V = 40
INF = float("inf")


def make(cls, joins: dict[int, tuple[SamplingParams, list[int], int]]):
    processor = cls(V, 8)
    for row, (params, token_ids, num_prompt) in joins.items():
        assert processor.join(row, params, token_ids, num_prompt)
    return processor


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def dense_penalties(logits, prompt, output, repetition, frequency, presence):
    out = logits.clone().double()
    for token in set(prompt) | set(output):
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token in set(output):
        out[token] -= frequency * output.count(token) + presence
    return out.float()


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    repetition=st.sampled_from([1.0, 0.5, 1.3]),
    frequency=st.sampled_from([0.0, -2.0, 0.7]),
    presence=st.sampled_from([0.0, 1.5, 0.3]),
)
def test_penalties_equal_the_dense_formula_over_prompt_and_growing_output(data, repetition, frequency, presence):
    params = SamplingParams(
        repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence, max_tokens=None
    )
    tokens = st.lists(st.integers(0, V - 1), max_size=100)
    prompt, output, more = data.draw(tokens), data.draw(tokens), data.draw(tokens)
    processor = Penalties(V, 8)
    used = processor.join(3, params, prompt + output, len(prompt))
    assert used == ((repetition, frequency, presence) != (1, 0, 0))
    if not used:
        return
    for token in more:
        processor.observe(3, token)
    logits = random_logits(3)
    got = processor.apply(logits.clone(), np.array([0, 3, 3]))
    expected = dense_penalties(logits[1], prompt, output + more, repetition, frequency, presence)
    torch.testing.assert_close(got[1], expected, rtol=1e-5, atol=1e-5)  # three fp32 roundings of numbers below 200
    assert torch.equal(got[0], logits[0])


@pytest.mark.parametrize("num_prompt", [1, 10, 60, 130])
@pytest.mark.parametrize("num_known", [0, 63, 64, 65, 129])
def test_penalties_count_any_number_of_different_tokens(num_prompt, num_known):
    """Outputs of 200 tokens, all different but for the last ten; some are there when the request joins."""
    vocab_size = 400
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.4)
    order = np.random.default_rng(num_prompt).permutation(vocab_size).tolist()
    prompt, output = order[:num_prompt], order[-190:] + order[-10:]
    processor = Penalties(vocab_size, 4)
    processor.join(2, params, prompt + output[:num_known], num_prompt)
    for token in output[num_known:]:
        processor.observe(2, token)
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    expected = dense_penalties(logits[0], prompt, output, 1.3, 0.7, 0.4)
    got = processor.apply(logits.clone(), np.array([2]))[0]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # as above


def test_repetition_penalty_equals_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    ids = [1, 5, 5, 9]
    processor = make(Penalties, {0: (SamplingParams(repetition_penalty=1.7), ids, 2)})
    logits = random_logits(1)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([ids]), logits.clone())
    torch.testing.assert_close(processor.apply(logits.clone(), np.array([0])), expected, rtol=1e-6, atol=0)


def test_bad_words_equal_transformers_where_the_prompt_does_not_matter():
    from transformers import NoBadWordsLogitsProcessor

    words = [[3], [4, 5], [4, 6], [1, 2, 7], [9, 9, 9, 8]]
    params = SamplingParams(bad_words_token_ids=tuple(map(tuple, words)))
    oracle = NoBadWordsLogitsProcessor(words, eos_token_id=None)
    processor = make(BadWords, {2: (params, [20, 21], 2)})
    output: list[int] = []
    rng = np.random.default_rng(0)
    for _ in range(300):
        logits = random_logits(1)
        expected = oracle(torch.tensor([[20, 21, *output]]), logits.clone())
        assert torch.equal(processor.apply(logits, np.array([2])), expected)
        output.append(int(rng.choice([1, 2, 4, 9, 9, 9, 30])))
        processor.observe(2, output[-1])
    resumed = make(BadWords, {2: (params, [20, 21, *output], 2)})
    assert torch.equal(*(p.apply(random_logits(1), np.array([2])) for p in (processor, resumed)))


def test_bad_words_do_not_look_at_the_prompt():
    processor = make(BadWords, {0: (SamplingParams(bad_words_token_ids=((4, 5),)), [4], 1)})
    assert torch.isfinite(processor.apply(random_logits(1), np.array([0]))).all()


def test_min_tokens_equals_transformers_and_ends():
    from transformers import MinNewTokensLengthLogitsProcessor

    params = SamplingParams(min_tokens=3, eos_token_ids=(7,), stop_token_ids=[8, 7])
    oracle = MinNewTokensLengthLogitsProcessor(2, 3, [7, 8])
    processor = make(MinTokens, {1: (params, [1, 2], 2)})
    output: list[int] = []
    for token in range(5):
        logits = random_logits(1)
        expected = oracle(torch.tensor([[1, 2, *output]]), logits.clone())
        assert torch.equal(processor.apply(logits, np.array([1])), expected)
        processor.observe(1, token)
        output.append(token)


@pytest.mark.parametrize("num_output", [0, 2, 3, 5])
def test_min_tokens_counts_the_output_of_a_resumed_request(num_output):
    params = SamplingParams(min_tokens=3, eos_token_ids=(7,))
    assert MinTokens(V, 8).join(0, params, [1, 1] + [0] * num_output, 2) == (num_output < 3)


def test_begin_suppress_equals_transformers_at_every_place_of_an_output():
    from transformers import SuppressTokensAtBeginLogitsProcessor

    prompt, tokens = [9, 8, 7], [3, 7, 11]
    params = SamplingParams(begin_suppress_tokens=tokens)
    oracle = SuppressTokensAtBeginLogitsProcessor(tokens, begin_index=len(prompt))
    for num_known in range(3):  # of the output, when the request joins: it was preempted
        output = [3] * num_known
        processor = BeginSuppress(V, 8)
        assert processor.join(2, params, [*prompt, *output], len(prompt)) == (not output)
        for _ in range(3):
            logits = random_logits(1)
            expected = oracle(torch.tensor([[*prompt, *output]]), logits.clone())
            assert torch.equal(processor.apply(logits, np.array([2])), expected)
            output.append(3)
            processor.observe(2, 3)


def test_allowed_token_ids_and_logit_bias():
    allowed = make(AllowedTokenIds, {4: (SamplingParams(allowed_token_ids=[3, 1, 3]), [0], 1)})
    bias = make(LogitBias, {4: (SamplingParams(logit_bias={"3": -100, 5: 2.5}), [0], 1)})
    logits = random_logits(2)
    rows = np.array([0, 4])
    got = allowed.apply(bias.apply(logits.clone(), rows), rows)
    expected = torch.full((V,), -INF)
    expected[1], expected[3] = logits[1, 1], logits[1, 3] - 100
    assert torch.equal(got[1], expected)
    assert torch.equal(got[0], logits[0])


@pytest.mark.parametrize("cls", [AllowedTokenIds, BadWords, BeginSuppress, LogitBias, MinTokens, Penalties])
def test_a_request_that_does_not_use_a_processor_leaves_no_state(cls):
    processor = cls(V, 8)
    assert not processor.join(0, SamplingParams(eos_token_ids=(1,)), [1, 2, 3], 2)
    assert not processor.states
