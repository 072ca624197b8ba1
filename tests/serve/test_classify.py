"""Classes of texts at the paths and in the shapes of vLLM and TEI (text-embeddings-inference)."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
from pooling.tiny import TEXTS, write_bert

from minivllm.engine.async_llm import AsyncLLM

LABELS = {0: "calm", 1: "rough", 2: "frozen"}
LONG = "the sea is singing " * 20


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_bert(folder, num_labels=3, id2label=LABELS)
    return AsyncLLM(str(folder), overrides={"executor.num_threads": 1})


@pytest.fixture(scope="module")
def url(engine, serving):
    with serving(engine, names=("tiny",)) as url:
        yield url


def whole(url, path, **body):
    reply = httpx.post(url + path, json=body, timeout=30)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(url, path, **body):
    reply = httpx.post(url + path, json=body, timeout=30)
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]


def test_texts_and_token_ids_are_classified(url):
    found = whole(url, "/classify", model="tiny", input=TEXTS)
    assert found["object"] == "list" and found["model"] == "tiny" and found["id"].startswith("classify-")
    assert [item["index"] for item in found["data"]] == list(range(len(TEXTS)))
    for item in found["data"]:
        assert item["num_classes"] == 3 and item["label"] == LABELS[int(np.argmax(item["probs"]))]
        assert sum(item["probs"]) == pytest.approx(1)
    tokens = whole(url, "/tokenize", prompt=TEXTS[0])["tokens"]
    one = whole(url, "/classify", input=tokens)
    assert one["usage"] == {"prompt_tokens": len(tokens), "total_tokens": len(tokens)}
    np.testing.assert_allclose(one["data"][0]["probs"], found["data"][0]["probs"], atol=1e-6)
    assert whole(url, "/invocations", input=TEXTS)["data"] == found["data"]


def test_logits_are_those_before_the_softmax(url):
    logits = np.array(whole(url, "/classify", input="the sea", use_activation=False)["data"][0]["probs"])
    (usual,) = whole(url, "/classify", input="the sea")["data"]
    np.testing.assert_allclose(np.exp(logits) / np.exp(logits).sum(), usual["probs"], atol=1e-6)


def test_a_text_too_long_is_a_400_or_cut(url):
    assert "truncate_prompt_tokens" in refused(url, "/classify", input=LONG)["message"]
    assert whole(url, "/classify", input=LONG, truncate_prompt_tokens=5)["usage"]["prompt_tokens"] == 5
    assert refused(url, "/classify", input="a", truncate_prompt_tokens=65)["param"] == "truncate_prompt_tokens"
    for empty in ("", []):
        assert refused(url, "/classify", input=empty)["param"] == "input"
    assert "a chat template" in refused(url, "/classify", input="a", messages=[{"role": "user"}])["message"]


def test_tei_ranks_the_classes_of_a_text(url):
    (usual,) = whole(url, "/classify", input="the sea")["data"]
    found = whole(url, "/predict", inputs="the sea")
    assert [item["label"] for item in found] == [LABELS[i] for i in np.argsort(usual["probs"])[::-1]]
    np.testing.assert_allclose([item["score"] for item in found], sorted(usual["probs"], reverse=True), atol=1e-6)
    assert whole(url, "/predict", inputs=["the sea"]) == found
    logits = whole(url, "/classify", input="the sea", use_activation=False)["data"][0]["probs"]
    raw = whole(url, "/predict", inputs="the sea", raw_scores=True)
    np.testing.assert_allclose([item["score"] for item in raw], sorted(logits, reverse=True), atol=1e-6)


def test_tei_takes_pairs_and_lists_of_them(url, engine):
    pair = whole(url, "/predict", inputs=["the sea", "is the sea singing?"])
    text = whole(url, "/predict", inputs="the sea")
    assert pair != text
    found = whole(url, "/predict", inputs=[["the sea"], ["the sea", "is the sea singing?"]])
    for some, alone in zip(found, (text, pair), strict=True):
        assert [item["label"] for item in some] == [item["label"] for item in alone]
        np.testing.assert_allclose([i["score"] for i in some], [i["score"] for i in alone], atol=1e-6)
    cut = whole(url, "/predict", inputs=[LONG, "a"], truncate=True)
    assert len(cut) == 3
    assert "truncate=true" in refused(url, "/predict", inputs=[LONG, "a"])["message"]


@pytest.mark.parametrize("inputs", [[], ["a", "b", "c"], [["a"], "b"], [["a", "b", "c"]], [[]], "", ["a", ""]])
def test_what_is_no_text_and_no_pair_is_a_400(url, inputs):
    assert refused(url, "/predict", inputs=inputs)["param"] == "inputs"


def test_the_server_tells_its_labels(url):
    kind = httpx.get(f"{url}/info").json()["model_type"]
    names = {str(i): label for i, label in LABELS.items()}
    assert kind == {"classifier": {"id2label": names, "label2id": {label: int(i) for i, label in names.items()}}}


@pytest.mark.parametrize("path", ["/score", "/rerank", "/v1/embeddings", "/v1/completions"])
def test_what_a_classifier_does_not_do_is_refused(url, path):
    error = refused(url, path)
    assert error["code"] == "task_not_served" and "tells classes of texts apart" in error["message"]


@pytest.mark.parametrize("path", ["/classify", "/predict"])
def test_a_server_that_generates_says_what_would(fake, path):
    error = refused(fake.url, path)
    assert error["code"] == "task_not_served" and "ForSequenceClassification" in error["message"]


def test_a_cross_encoder_has_a_class_of_one_label(tmp_path, serving):
    write_bert(tmp_path, num_labels=1)
    with serving(AsyncLLM(str(tmp_path), overrides={"executor.num_threads": 1}), names=("tiny",)) as url:
        (item,) = whole(url, "/classify", input="the sea")["data"]
        assert item["num_classes"] == 1 and item["label"] == "LABEL_0"
        (pair,) = whole(url, "/predict", inputs=["the sea", "a"])
        score = whole(url, "/score", text_1="the sea", text_2="a")["data"][0]["score"]
        assert pair["score"] == pytest.approx(score, abs=1e-6)
