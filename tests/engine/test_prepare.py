from __future__ import annotations

import random

import pytest
import tiny_tokenizers as tiny

from minivllm.engine.prepare import children, fitted, resolve
from minivllm.errors import BadRequest, NeverFits
from minivllm.request import MAX_SEED, SamplingParams, sequence_ids

TOKENIZER = tiny.byte_level()


def prepared(prompt=(5, 6), max_model_len=100, rng=None, tokenizer=TOKENIZER, vocab_size=None, most=20, **params):
    rng = rng or random.Random(0)
    vocab_size = vocab_size or (tokenizer.vocab_size if tokenizer else None)
    resolved = resolve(SamplingParams(**params), tokenizer, vocab_size, most)
    return fitted(resolved, list(prompt), max_model_len, rng, vocab_size)


def test_everything_the_core_needs_is_decided():
    params = prepared(max_tokens=None, bad_words=["hello"])
    assert params.max_tokens == 98
    assert params.eos_token_ids == TOKENIZER.eos_token_ids
    assert params.bad_words_token_ids == TOKENIZER.bad_words_token_ids(["hello"])
    assert params.seed is not None


def test_a_seed_is_kept_and_a_missing_one_is_drawn_from_the_engines_generator():
    assert prepared(seed=-5).seed == -5
    rng = random.Random(1)
    drawn = [prepared(rng=rng).seed for _ in range(3)]
    assert len(set(drawn)) == 3
    rng = random.Random(1)
    assert drawn == [prepared(rng=rng).seed for _ in range(3)]


def test_ignore_eos_names_no_end_of_sequence():
    assert prepared(ignore_eos=True).eos_token_ids == ()


def test_max_tokens_never_passes_the_context():
    assert prepared(max_tokens=1000).max_tokens == 98
    assert prepared(max_tokens=7).max_tokens == 7
    with pytest.raises(BadRequest, match="min_tokens"):
        prepared(max_tokens=1000, min_tokens=99)


@pytest.mark.parametrize("length", [100, 101, 5000])
def test_a_prompt_without_room_for_output_is_refused_with_both_numbers(length):
    with pytest.raises(NeverFits, match=rf"{length} tokens.* 100 tokens") as error:
        prepared(prompt=[1] * length)
    assert error.value.param == "prompt"
    assert prepared(prompt=[1] * 99).max_tokens == 1


def test_an_empty_prompt_is_refused():
    with pytest.raises(BadRequest, match="no tokens"):
        prepared(prompt=())


@pytest.mark.parametrize("bad", [-1, 340, 2**40])
@pytest.mark.parametrize("param", ["prompt", "stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"])
def test_an_id_outside_of_the_vocabulary_is_refused_by_parameter(param, bad):
    value = {bad: 1.0} if param == "logit_bias" else [3, bad]
    with pytest.raises(BadRequest, match=f"{param}: {bad} is no token id") as error:
        prepared(**{param: value})
    assert error.value.param == param
    if bad == 340:
        prepared(**{param: value}, vocab_size=341)


@pytest.mark.parametrize("param", ["logprobs", "prompt_logprobs"])
def test_log_probabilities_are_as_many_as_the_engine_admits(param):
    assert getattr(prepared(**{param: 20}), param) == 20 and getattr(prepared(), param) is None
    for asked in (21, -1):
        with pytest.raises(BadRequest, match="20 at most") as error:
            prepared(**{param: asked})
        assert error.value.param == param
    assert getattr(prepared(most=-1, vocab_size=345, **{param: -1}), param) == 345
    with pytest.raises(BadRequest, match="at least -1"):
        prepared(**{param: -2})
    with pytest.raises(BadRequest, match="over 4,194,304"):
        prepared(most=-1, vocab_size=2**20, prompt_logprobs=-1, prompt=[5] * 4)


def test_children_are_single_requests_with_consecutive_seeds():
    assert [(c.n, c.seed) for c in children(prepared(n=3, seed=7))] == [(1, 7), (1, 8), (1, 9)]
    assert [c.seed for c in children(prepared(n=2, seed=MAX_SEED))] == [MAX_SEED, -MAX_SEED - 1]
    params = prepared()
    assert children(params) == [params]
    assert sequence_ids("r", 1) == ["r"] and sequence_ids("r", 2) == ["r#0", "r#1"]


def test_without_a_tokenizer_text_parameters_are_refused():
    params = prepared(tokenizer=None, vocab_size=10)
    assert params.eos_token_ids == ()
    with pytest.raises(BadRequest, match="tokenizer"):
        prepared(tokenizer=None, stop=["x"])
