"""Rule: an encoder's classification head says what transformers' model says, in any batch."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from pooling.tiny import TEXTS, write_bert
from tolerances import HIDDEN

from minivllm import LLM
from minivllm.errors import BadRequest, ConfigError, ModelError, NeverFits
from minivllm.pooling import task

ONE = {"executor.num_threads": 1, "debug.check": True}
LABELS = {0: "calm", 1: "rough", 2: "frozen"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("classifier")


@pytest.fixture(scope="module")
def oracle(folder):
    return write_bert(folder, num_labels=3, id2label=LABELS)


@pytest.fixture(scope="module")
def llm(folder, oracle):
    with LLM(str(folder), overrides=ONE) as llm:
        yield llm


@torch.inference_mode()
def logits_of(oracle, token_ids) -> np.ndarray:
    return oracle(torch.tensor([token_ids])).logits[0].numpy()


def test_each_texts_classes_are_those_of_transformers(llm, oracle):
    found = llm.classify(TEXTS, use_tqdm=False)
    for output in found:
        logits = torch.tensor(logits_of(oracle, output.prompt_token_ids))
        np.testing.assert_allclose(output.outputs.probs, logits.softmax(0), rtol=0, atol=HIDDEN)
        assert output.outputs.label == LABELS[int(logits.argmax())] and output.outputs.num_classes == 3
    assert np.ptp([output.outputs.probs for output in found], axis=0).max() > 100 * HIDDEN
    (alone,) = llm.classify(TEXTS[2], use_tqdm=False)
    np.testing.assert_allclose(alone.outputs.probs, found[2].outputs.probs, rtol=0, atol=HIDDEN)


def test_logits_come_without_the_activation(llm, oracle):
    (found,) = llm.classify("the sea", use_activation=False, use_tqdm=False)
    np.testing.assert_allclose(found.outputs.probs, logits_of(oracle, found.prompt_token_ids), rtol=0, atol=HIDDEN)


def test_labels_of_which_several_are_true_each_have_a_sigmoid(tmp_path):
    oracle = write_bert(tmp_path, num_labels=3, problem_type="multi_label_classification")
    with LLM(str(tmp_path), overrides=ONE) as llm:
        (found,) = llm.classify("the sea", use_tqdm=False)
    wanted = torch.tensor(logits_of(oracle, found.prompt_token_ids)).sigmoid()
    np.testing.assert_allclose(found.outputs.probs, wanted, rtol=0, atol=HIDDEN)


def test_a_text_too_long_is_refused_or_cut(llm):
    long = "the sea is singing " * 20
    with pytest.raises(NeverFits, match="this model takes 64"):
        llm.classify(long)
    (found,) = llm.classify(long, truncate_prompt_tokens=-1, use_tqdm=False)
    assert len(found.prompt_token_ids) == 64
    (found,) = llm.classify(long, truncate_prompt_tokens=9, truncation_side="left", use_tqdm=False)
    assert len(found.prompt_token_ids) == 9


def test_what_a_classifier_does_not_do_is_refused_by_name(llm):
    with pytest.raises(BadRequest, match="is a classifier: it names classes and embeds nothing"):
        llm.embed("a")
    with pytest.raises(BadRequest, match="3 labels: a score is one number"):
        llm.score("a", "b")
    with pytest.raises(BadRequest, match="it has classify.., and generates nothing"):
        llm.generate("a")


def test_one_label_is_a_score_and_a_class(tmp_path):
    write_bert(tmp_path, num_labels=1)
    with LLM(str(tmp_path), overrides=ONE) as llm:
        assert llm.texts.task == task.SCORE
        (found,) = llm.classify("the sea", use_tqdm=False)
        assert found.outputs.label == "LABEL_0" and 0 < found.outputs.probs[0] < 1
        with pytest.raises(BadRequest, match="it has score.. and classify.., and generates nothing"):
            llm.generate("a")


def test_a_model_that_embeds_classifies_nothing(tmp_path):
    write_bert(tmp_path)
    with LLM(str(tmp_path), overrides=ONE) as llm, pytest.raises(BadRequest, match="has no classification head"):
        llm.classify("a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "score"}, "a BertForSequenceClassification with 3 labels: it can classify; .* of one label scores"),
        ({"task": "embed"}, "it can classify"),
        ({"pooling": "mean"}, "which reads a token of its own"),
    ],
)
def test_an_option_that_cannot_be_is_refused(folder, oracle, options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(str(folder), **options)


def test_a_classifier_cannot_be_asked_of_one_label_nor_of_none(tmp_path):
    write_bert(tmp_path, num_labels=1)
    with pytest.raises(ConfigError, match="with 1 label: it can score"):
        LLM(str(tmp_path), task="classify")
    with pytest.raises(ConfigError, match="a decoder with an LM head: it can generate or embed"):
        LLM("dummy:tiny", task="classify")


def test_labels_that_are_none_are_told_by_the_loader(tmp_path):

    write_bert(tmp_path, num_labels=3)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"id2label": ["a"]}))
    with pytest.raises(ModelError, match="wrong kind"):
        LLM(str(tmp_path))
