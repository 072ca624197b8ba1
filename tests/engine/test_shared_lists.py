"""Lists that clients send: each value once, and once for all sequences and prompts of a request."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
import tiny_tokenizers as tiny

from minivllm.engine.frontend import FrontEnd
from minivllm.engine.messages import COMMANDS, Add
from minivllm.engine.tokenizer import TextTokenizer
from minivllm.errors import BadRequest
from minivllm.request import EngineRequest, SamplingParams
from minivllm.sampling.processors import AllowedTokenIds, BadWords

IDS = list(range(50_000))


class CountingTokenizer:
    """Counts what is encoded."""

    eos_token_ids, special_ids, has_bytes = (), frozenset(), True

    def __init__(self):
        self.inner, self.num_encoded = tiny.byte_level(), 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def bad_words_token_ids(self, words):
        self.num_encoded += len(words)
        return self.inner.bad_words_token_ids(words)


@pytest.fixture
def front_end(monkeypatch):
    monkeypatch.setattr(TextTokenizer, "load", lambda folder: CountingTokenizer())
    config = SimpleNamespace(engine=SimpleNamespace(max_logprobs=20), model=SimpleNamespace(seed=0))
    return FrontEnd(SimpleNamespace(max_model_len=100, tokenizer_dir="", info={"vocab_size": 50_000}, config=config))


@pytest.mark.parametrize("name", ["allowed_token_ids", "stop_token_ids", "logprob_token_ids", "stop", "bad_words"])
def test_of_equal_values_of_a_list_one_is_kept(name):
    first, second = ("a", "b") if name in ("stop", "bad_words") else (7, 5)
    assert getattr(SamplingParams(**{name: [first] * 2_000 + [second, first]}), name) == (first, second)


def test_token_ids_that_end_an_output_are_a_thousand_at_most():
    assert len(SamplingParams(stop_token_ids=IDS[:1024]).stop_token_ids) == 1024
    with pytest.raises(BadRequest, match="at most 1024 token ids in stop_token_ids, got 1025") as error:
        SamplingParams(stop_token_ids=IDS[:1025])
    assert error.value.param == "stop_token_ids"


def requests(front_end, params, prompts=1):
    num_before = len(front_end.processor)
    names = [f"r{i}" for i in range(num_before, num_before + prompts)]
    return [request for name in names for request in front_end.requests([1, 2], params, name, "final")]


def test_a_list_crosses_to_the_core_once_for_all_sequences_of_a_prompt(front_end):
    one, many = (requests(front_end, SamplingParams(allowed_token_ids=IDS, n=n)) for n in (1, 128))
    alone, together = (msgspec.msgpack.encode(Add.together(each)) for each in (one, many))
    assert len(together) < 1.1 * len(alone)
    arrived = msgspec.msgpack.decode(together, type=COMMANDS)
    assert len({id(request.params.allowed_token_ids) for request in arrived.requests}) == 1
    assert len({id(request.prompt_token_ids) for request in arrived.requests}) == 1


@pytest.mark.parametrize("asked", [{"n": 3}, {"n": 2, "best_of": 4, "seed": 2**63 - 1}, {"n": 3, "prompt_logprobs": 2}])
def test_what_arrives_together_is_what_each_sequence_was(front_end, asked):
    sent = requests(front_end, SamplingParams(stop_token_ids=[3], logit_bias={4: 1.0}, **asked))
    data = msgspec.msgpack.encode(Add.together(sent))
    assert msgspec.msgpack.decode(data, type=COMMANDS).requests == sent


def test_a_single_request_arrives_as_it_was():
    request = EngineRequest("r", [1], SamplingParams(seed=0), 1.0, group="")
    assert Add.together([request]).requests == [request] and Add.together([request]).sequence_ids == ["r"]


def test_bad_words_are_encoded_once_for_all_prompts_of_a_request(front_end):
    params = SamplingParams(bad_words=[f"word {i}" for i in range(100)])
    found = {request.params.bad_words_token_ids for request in requests(front_end, params, prompts=50)}
    assert len(found) == 1 and front_end.tokenizer.num_encoded == 100
    assert len({id(words) for words in found}) == 1


def test_nor_are_they_when_the_prompts_of_other_requests_come_between(front_end):
    several = [SamplingParams(bad_words=["one", "two", word]) for word in ("three", "four", "five")]
    for _ in range(10):
        for params in several:
            requests(front_end, params)
    assert front_end.tokenizer.num_encoded == 9
    requests(front_end, several[0].replace(bad_words=["six"]))
    assert front_end.tokenizer.num_encoded == 10


def test_what_another_front_end_has_made_of_the_same_parameters_is_not_taken(front_end):
    params = SamplingParams(bad_words=["one"])
    first = requests(front_end, params)[0].params.bad_words_token_ids
    front_end._own = object()
    front_end.tokenizer.bad_words_token_ids = lambda words: ((1, 2),)
    assert requests(front_end, params)[0].params.bad_words_token_ids == ((1, 2),) != first


def test_the_prompts_of_a_request_share_its_lists_and_not_their_seeds(front_end):
    made = requests(front_end, SamplingParams(allowed_token_ids=IDS), prompts=20)
    assert len({id(request.params.allowed_token_ids) for request in made}) == 1
    assert len({request.params.seed for request in made}) == 20


def test_the_sampler_keeps_one_array_for_sequences_that_share_a_list():
    params, processor = SamplingParams(allowed_token_ids=IDS), AllowedTokenIds(len(IDS), 8)
    for row in range(8):
        processor.join(row, params.with_values(seed=row), [1], 1)
    assert len({id(state) for state in processor.states.values()}) == 1
    processor.join(0, SamplingParams(allowed_token_ids=[5, 3]), [1], 1)
    assert processor.states[0].tolist() == [3, 5]


def test_the_sampler_keeps_one_table_of_bad_words_for_sequences_that_share_them():
    params, processor = SamplingParams(bad_words_token_ids=((1, 2), (1, 3), (4,))), BadWords(10, 8)
    for row in range(8):
        processor.join(row, params.with_values(seed=row), [9] + [1] * row, 1)
    assert len({id(state.words) for state in processor.states.values()}) == 1
    assert [sorted(processor.states[row].banned().tolist()) for row in range(3)] == [[4], [2, 3, 4], [2, 3, 4]]
    processor.join(0, SamplingParams(bad_words_token_ids=((5,),)), [9], 1)
    assert processor.states[0].banned().tolist() == [5]
