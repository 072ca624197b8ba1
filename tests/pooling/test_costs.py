"""Rule: a query is tokenised once, no text further than a context reaches, and none whose client has left."""

from __future__ import annotations

import json
import socket
import threading
from urllib.parse import urlsplit

import numpy as np
import pytest
from eventually import PATIENCE, eventually
from pooling.tiny import bert_tokenizer, write_bert
from serve.conftest import serving
from tokenizers.processors import BertProcessing, RobertaProcessing, TemplateProcessing

from minivllm import LLM, wanted
from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.tokenizer import LONGEST_TOKEN, TextTokenizer
from minivllm.errors import BadRequest, NeverFits
from minivllm.pooling.text import Cut
from minivllm.serve import off_loop

ONE = {"executor.num_threads": 1}
CONTEXT = 64  # of write_bert's models
PROCESSORS = {
    "bert": BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
    "roberta": RobertaProcessing(("[SEP]", 3), ("[CLS]", 2)),
    "template": TemplateProcessing(
        single="[CLS] $A", pair="[CLS]:0 $A:0 [SEP]:0 [SEP]:1 $B:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    ),
    "second first": TemplateProcessing(
        single="$A", pair="$B:0 [SEP]:0 $A:1 [SEP]:1", special_tokens=[("[SEP]", 3)]
    ),
    "none": None,
}  # fmt: skip


@pytest.fixture(scope="module", params=["embed", "score"])
def engine(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_bert(folder, num_labels=int(request.param == "score"))
    with LLM(str(folder), overrides=ONE) as llm:
        yield llm.texts


@pytest.fixture
def read(monkeypatch):
    """The length of each text that is tokenised."""
    lengths, real = [], TextTokenizer._encode

    def encode(self, text, add_special_tokens):
        lengths.append(len(text) if isinstance(text, str) else sum(map(len, text)))
        return real(self, text, add_special_tokens)

    monkeypatch.setattr(TextTokenizer, "_encode", encode)
    return lengths


@pytest.mark.parametrize("cut", [Cut(-1), Cut(9), Cut(9, "left")])
@pytest.mark.parametrize("query", ["the sea " * 100, "a" * 50_000, "a " * 50_000])
def test_a_query_is_tokenised_as_often_however_many_documents_there_are(engine, read, query, cut):
    costs = []
    for number in (20, 40):
        read.clear()
        engine.scoring([(query, f"{i}") for i in range(number)], cut)
        costs.append(sum(length for length in read if length > 10))
    assert costs[0] == costs[1] <= 2 * LONGEST_TOKEN * CONTEXT  # at most, with and without special tokens


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_lies_beyond_any_context_is_not_looked_at(engine, read, side):
    long = "sea " * 100_000
    for texts in ([(long, "a")], [("a", long)], [(long, long)]):
        engine.scoring(texts, Cut(-1, side))
        with pytest.raises(NeverFits, match="characters"):
            engine.scoring(texts)
    assert max(read) <= LONGEST_TOKEN * CONTEXT


@pytest.mark.parametrize("name", PROCESSORS)
def test_two_texts_in_one_sequence_are_what_the_library_makes_of_them(name):
    inner = bert_tokenizer()
    if PROCESSORS[name] is not None:
        inner.post_processor = PROCESSORS[name]
    ours, draw = TextTokenizer(inner, {}, {}, []), np.random.default_rng(1)
    words = ["the", "sea", "is", "singing", "a", "xyz"]
    for _ in range(60):
        first, second = (" ".join(draw.choice(words, draw.integers(1, 12))) for _ in range(2))
        most, at_start = int(draw.integers(4, 30)), bool(draw.integers(2))
        inner.no_truncation()
        whole = inner.encode(first, second)
        types = whole.type_ids
        expected = whole.ids, types.index(1) if 1 in types else len(types)
        assert ours.joined(ours.bare(first), ours.bare(second)) == expected
        try:
            found = ours.joined(ours.bare(first), ours.bare(second), most, at_start)
        except BadRequest:
            continue
        inner.enable_truncation(most, strategy="longest_first", direction="left" if at_start else "right")
        cut = inner.encode(first, second)
        inner.no_truncation()
        assert found[0] == cut.ids


def test_no_more_texts_are_tokenised_once_their_client_has_left(tmp_path, monkeypatch):
    write_bert(tmp_path, num_labels=1)
    begun, ended, number = threading.Event(), threading.Event(), [0]
    real = TextTokenizer._encode

    def encode(self, text, add_special_tokens):
        if threading.current_thread().name.startswith("off-loop"):
            number[0] += 1
            begun.set()
            eventually(lambda: not wanted.is_wanted())
            ended.set()
        return real(self, text, add_special_tokens)

    monkeypatch.setattr(TextTokenizer, "_encode", encode)
    body = json.dumps({"query": "the sea", "documents": ["sea"] * 2000}).encode()
    head = f"POST /rerank HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with serving(AsyncLLM(str(tmp_path), overrides=ONE), names=("tiny",)) as url:
        place = urlsplit(url)
        with socket.create_connection((place.hostname, place.port)) as client:
            client.sendall(head.encode() + body)
            assert begun.wait(PATIENCE)
        assert ended.wait(PATIENCE)
        eventually(lambda: not off_loop._threads.is_busy)
    assert number[0] <= 2  # it was seen as unwanted at the next one


def test_nothing_is_tokenised_for_who_is_not_there_any_more():
    tokenizer = TextTokenizer(bert_tokenizer(), {}, {}, [])
    with wanted.asking(lambda: False), pytest.raises(wanted.Unwanted):
        tokenizer.encode("the sea")
    assert tokenizer.encode("the sea")
