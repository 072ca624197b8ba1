"""Vectors, scores and orders at the paths and in the shapes of vLLM, TEI (text-embeddings-inference), Cohere and
llama.cpp: all are those of /v1/embeddings and /rerank, which test_embeddings.py has. Cohere's Python client was tried
against the same server."""

from __future__ import annotations

import base64
import math

import httpx
import numpy as np
import pytest
from pooling.tiny import TEXTS, write_bert, write_modules

from minivllm.engine.async_llm import AsyncLLM

QUERY, *DOCUMENTS = TEXTS


def server(tmp_path_factory, serving, num_labels=None, prompts=None):
    folder = tmp_path_factory.mktemp("model")
    write_bert(folder, **({"num_labels": num_labels} if num_labels else {}))
    if prompts:
        write_modules(folder, "Transformer", "Pooling", "Normalize", prompts=prompts, pooling_mode_mean_tokens=True)
    return serving(AsyncLLM(str(folder), overrides={"executor.num_threads": 1}), names=("tiny",))


@pytest.fixture(scope="module")
def url(tmp_path_factory, serving):
    with server(tmp_path_factory, serving) as url:
        yield url


@pytest.fixture(scope="module")
def cross(tmp_path_factory, serving):
    with server(tmp_path_factory, serving, num_labels=1) as url:
        yield url


def post(url, path, **body):
    return httpx.post(url + path, json=body, timeout=30)


def whole(url, path, **body):
    reply = post(url, path, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(url, path, **body):
    reply = post(url, path, **body)
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]


@pytest.fixture(scope="module")
def vectors(url):
    return np.array([item["embedding"] for item in whole(url, "/v1/embeddings", input=TEXTS)["data"]])


@pytest.fixture(scope="module")
def ranked(url):
    results = whole(url, "/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    return [(item["index"], item["relevance_score"]) for item in results]


# ----------------------------------------------------------------------------------------------------------------- TEI


def test_teis_embed_is_a_list_of_unit_vectors(url, vectors):
    found = np.array(whole(url, "/embed", inputs=TEXTS))
    np.testing.assert_allclose(found, vectors / np.linalg.norm(vectors, axis=1)[:, None], atol=1e-6)
    (short,) = whole(url, "/embed", inputs=QUERY, dimensions=8)
    assert len(short) == 8 and math.isclose(math.hypot(*short), 1, abs_tol=1e-5)
    assert "truncate=true" in refused(url, "/embed", inputs="the sea " * 100)["message"]
    assert whole(url, "/embed", inputs="the sea " * 100, truncate=True)
    assert refused(url, "/embed", inputs="")["param"] == "inputs"
    (raw,) = whole(url, "/embed", inputs="a", normalize=False)
    (unit,) = whole(url, "/embed", inputs="a")
    assert math.hypot(*raw) > 2
    np.testing.assert_allclose(np.array(raw) / math.hypot(*raw), unit, atol=1e-6)


def test_a_request_with_texts_is_ranked_in_teis_shape(url, ranked):
    found = whole(url, "/rerank", query=QUERY, texts=DOCUMENTS, return_text=True)
    assert [item["index"] for item in found] == [index for index, _ in ranked]
    np.testing.assert_allclose([item["score"] for item in found], [score for _, score in ranked], atol=1e-6)
    assert [item["text"] for item in found] == [DOCUMENTS[index] for index, _ in ranked]
    assert set(whole(url, "/rerank", query=QUERY, texts=DOCUMENTS)[0]) == {"index", "score"}
    assert whole(url, "/rerank", query=QUERY, texts=["the sea " * 100], truncate=True)
    assert refused(url, "/rerank", query=QUERY, texts=["the sea " * 100])["param"] == "texts"
    for both in ({}, {"texts": DOCUMENTS, "documents": DOCUMENTS}):
        assert refused(url, "/rerank", query=QUERY, **both)["param"] == "documents"


def test_similarity_keeps_the_order_of_the_request(url, ranked):
    found = whole(url, "/similarity", inputs={"source_sentence": QUERY, "sentences": DOCUMENTS})
    np.testing.assert_allclose(found, [dict(ranked)[i] for i in range(len(DOCUMENTS))], atol=1e-6)
    error = refused(url, "/similarity", inputs={"source_sentence": QUERY, "sentences": []})
    assert error["param"] == "inputs.sentences"


def test_info_says_what_the_model_is_and_takes(url, cross):
    about = httpx.get(f"{url}/info").json()
    assert (about["model_id"], about["max_input_length"]) == ("tiny", 64)
    assert list(about["model_type"]) == ["embedding"]
    assert list(httpx.get(f"{cross}/info").json()["model_type"]) == ["reranker"]


# -------------------------------------------------------------------------------------------------------------- Cohere


def test_coheres_embed_gives_every_form_that_is_asked_for(url, vectors):
    kinds = ["float", "base64", "ubinary", "binary"]
    found = whole(url, "/v2/embed", model="tiny", texts=TEXTS, input_type="search_query", embedding_types=kinds)
    assert found["response_type"] == "embeddings_by_type" and found["texts"] == TEXTS
    assert found["meta"]["billed_units"]["input_tokens"] > 0 and list(found["embeddings"]) == kinds
    floats = np.array(found["embeddings"]["float"])
    np.testing.assert_allclose(floats, vectors, atol=1e-6)
    decoded = [np.frombuffer(base64.b64decode(text), "<f4") for text in found["embeddings"]["base64"]]
    np.testing.assert_allclose(decoded, vectors, atol=1e-6)
    packed = np.packbits(floats >= 0, axis=1)
    assert np.array_equal(found["embeddings"]["ubinary"], packed)
    assert np.array_equal(found["embeddings"]["binary"], packed.astype(int) - 128)


def test_coheres_inputs_and_lengths(url, vectors):
    parts = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    found = whole(url, "/v2/embed", inputs=parts)["embeddings"]
    assert list(found) == ["float"]
    np.testing.assert_allclose(found["float"], vectors, atol=1e-6)
    (short,) = whole(url, "/v2/embed", texts=["the sea " * 100], output_dimension=8)["embeddings"]["float"]
    assert len(short) == 8
    for fields, param in (
        ({"texts": ["the sea " * 100], "truncate": "NONE"}, "texts"),
        ({"texts": ["a"], "input_type": "poetry"}, "input_type"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types"),
        ({"texts": ["a"], "images": ["data:"]}, "images"),
        ({}, "texts"),
    ):
        assert refused(url, "/v2/embed", **fields)["param"] == param
    assert post(url, "/v2/embed", texts=["a"], model="embed-v4").status_code == 404


def test_a_text_is_cut_on_the_side_that_is_asked_for(url, cross):
    long, end = "the sea " * 40 + "is " * 70, "is " * 62
    wanted = whole(url, "/v1/embeddings", input=end)["data"][0]["embedding"]
    vllm = whole(url, "/v1/embeddings", input=long, truncate_prompt_tokens=-1, truncation_side="left")
    cohere = whole(url, "/v2/embed", texts=[long], truncate="START")
    tei = whole(url, "/embed", inputs=long, truncate=True, truncation_direction="Left")
    for found in (vllm["data"][0]["embedding"], cohere["embeddings"]["float"][0], tei[0]):
        np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert cohere["meta"]["billed_units"] == {"input_tokens": 64, "image_tokens": 0}
    for served in (url, cross):
        right, left = (
            whole(served, "/rerank", query=QUERY, texts=[long], truncate=True, truncation_direction=side)[0]["score"]
            for side in ("Right", "left")
        )
        assert right != left
    whole(url, "/similarity", inputs={"source_sentence": long, "sentences": ["a"]}, parameters={"truncate": True})


@pytest.fixture(scope="module")
def prompted(tmp_path_factory, serving):
    prompts = {"query": "the sea ", "passage": "is ", "clustering": "mice "}
    with server(tmp_path_factory, serving, prompts=prompts) as url:
        yield url


def test_what_a_text_is_for_chooses_the_models_prompt(prompted, url):
    def vector(served, path="/v2/embed", **body):
        found = whole(served, path, **body)
        return np.array(found[0] if path == "/embed" else found["embeddings"]["float"][0])

    for input_type, prompt in (
        ("search_query", "the sea "),
        ("query", "the sea "),
        ("search_document", "is "),
        ("clustering", "mice "),
        ("classification", ""),
        (None, ""),
    ):
        wanted = vector(url, texts=[prompt + "singing"])
        np.testing.assert_allclose(vector(prompted, texts=["singing"], input_type=input_type), wanted, atol=1e-6)
    wanted = vector(url, "/embed", inputs="the sea singing")
    np.testing.assert_allclose(vector(prompted, "/embed", inputs="singing", prompt_name="query"), wanted, atol=1e-6)
    assert refused(prompted, "/v2/embed", texts=["a"], input_type="poetry")["message"].startswith(
        "Unsupported input_type"
    )
    error = refused(prompted, "/embed", inputs="a", prompt_name="document")
    assert error["param"] == "prompt_name" and "Prompts: query, passage, clustering" in error["message"]
    of = {"source_sentence": "singing", "sentences": ["a", "singing"]}
    found = whole(prompted, "/similarity", inputs=of, parameters={"prompt_name": "query"})
    named = {"source_sentence": "the sea singing", "sentences": ["the sea a", "the sea singing"]}
    np.testing.assert_allclose(found, whole(url, "/similarity", inputs=named), atol=1e-6)


@pytest.mark.parametrize("path", ["/v2/rerank", "/reranking", "/v1/reranking"])
def test_rerank_is_the_same_at_other_servers_paths(url, ranked, path):
    found = whole(url, path, model="tiny", query=QUERY, documents=DOCUMENTS, top_n=2)["results"]
    assert [(item["index"], item["relevance_score"]) for item in found] == ranked[:2]


def scores(url, **body):
    return [each["score"] for each in whole(url, "/score", **body)["data"]]


def test_documents_are_cut_where_cohere_says(url, cross):
    for served in (url, cross):
        long = [f"the sea {word * 100}" for word in ("the ", "sea ")]
        assert post(served, "/v2/rerank", query=QUERY, documents=long).status_code == 400
        first, second = whole(served, "/v2/rerank", query=QUERY, documents=long, max_tokens_per_doc=2)["results"]
        assert first["relevance_score"] == second["relevance_score"]
        cut = whole(served, "/score", text_1=QUERY, text_2=long, max_tokens_per_doc=2)["data"]
        assert [each["score"] for each in cut] == [pytest.approx(first["relevance_score"], abs=1e-6)] * 2
        short = scores(served, text_1="the sea", text_2=DOCUMENTS, max_tokens_per_doc=0)
        assert scores(served, text_1="the sea is", text_2=DOCUMENTS) != pytest.approx(short, abs=1e-3)
        for query in ("the sea is", ["the sea singing"] * len(DOCUMENTS)):
            found = scores(served, text_1=query, text_2=DOCUMENTS, max_tokens_per_query=2, max_tokens_per_doc=45)
            assert found == pytest.approx(short, abs=1e-6)
        best = whole(served, "/rerank", query="the sea is", documents=DOCUMENTS, max_tokens_per_query=2)["results"]
        assert {item["index"]: item["relevance_score"] for item in best} == pytest.approx(
            dict(enumerate(short)), abs=1e-6
        )
        assert refused(served, "/rerank", query="a", documents=["a"], max_tokens_per_doc=-1)["param"]
    reply = post(url, "/rerank", query=QUERY, documents=["a"], max_chunks_per_doc=10)
    assert reply.headers["x-minivllm-ignored"] == "max_chunks_per_doc"
    assert refused(url, "/rerank", query=QUERY, documents=["a"], rank_fields=["title"])["param"] == "rank_fields"


# ---------------------------------------------------------------------------------------------------------------- vLLM


def test_pooling_gives_the_vectors_under_their_other_name(url, vectors):
    found = whole(url, "/pooling", input=TEXTS)
    assert {item["object"] for item in found["data"]} == {"pooling"} and found["usage"]["prompt_tokens"] > 0
    np.testing.assert_allclose([item["data"] for item in found["data"]], vectors, atol=1e-6)
    assert isinstance(whole(url, "/pooling", input="a", encoding_format="base64")["data"][0]["data"], str)
    assert refused(url, "/pooling", input="a", task="token_embed")["param"] == "task"


@pytest.mark.parametrize(("first", "second"), [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
def test_a_score_has_several_names_for_its_texts(url, first, second):
    wanted = whole(url, "/score", text_1=QUERY, text_2=DOCUMENTS)["data"]
    assert whole(url, "/score", **{first: QUERY, second: DOCUMENTS})["data"] == wanted
    assert refused(url, "/score", **{first: "", second: "a"})["param"] == first


def test_the_tokenizers_configuration_is_shown(url):
    about = httpx.get(f"{url}/tokenizer_info").json()
    assert "chat_template" in about and len(about) > 1


# ------------------------------------------------------------------------------------------------------ what is missing


@pytest.mark.parametrize("path", ["/embed_all", "/embed_sparse"])
def test_what_no_model_here_can_do_is_refused_by_name(url, path):
    reply = post(url, path, inputs="a")
    assert reply.status_code == 501 and path in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/embed", "/similarity", "/v2/embed", "/v2/rerank", "/pooling", "/reranking", "/info"]
)
def test_a_server_that_generates_says_what_would(fake, path):
    reply = httpx.request("GET" if path == "/info" else "POST", fake.url + path, json={})
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "task_not_served"


def test_a_cross_encoder_embeds_nothing(cross):
    for path in ("/embed", "/similarity", "/v2/embed", "/pooling"):
        assert "scores pairs" in refused(cross, path)["message"]
    found = whole(cross, "/rerank", query=QUERY, texts=DOCUMENTS)
    assert [item["score"] for item in found] == sorted((item["score"] for item in found), reverse=True)


def test_keys_guard_all_of_it(serving, fake_engine):
    with serving(fake_engine, api_keys=["k"]) as url:
        for path in ("/embed", "/v2/rerank", "/pooling", "/classify"):
            assert post(url, path).status_code == 401
        assert httpx.get(f"{url}/info").status_code == httpx.get(f"{url}/tokenizer_info").status_code == 401
