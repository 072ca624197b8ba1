"""Rule: a decoder with a head for classes says what transformers' does, and its config decides what it means."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from pooling.tiny import randomise
from tolerances import HIDDEN

from minivllm import LLM
from minivllm.errors import ConfigError, ModelError
from minivllm.loading import load_model
from minivllm.loading.dummy import write_tokenizer
from minivllm.models import read_spec

TEXTS = ["the sea", "a", "dogs, cats and 12 mice"]
ROPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CLASSIC = {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
OPT = {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 64}
HEADS = {  # {the head's class: its config's fields}: names of every form
    "LlamaForSequenceClassification": ROPE,
    "Qwen2ForSequenceClassification": ROPE | {"tie_word_embeddings": True},
    "Qwen3ForSequenceClassification": ROPE | {"head_dim": 16},
    "MistralForSequenceClassification": ROPE | {"sliding_window": 4},
    "Gemma3TextForSequenceClassification": ROPE | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 4},
    "Phi3ForSequenceClassification": ROPE,
    "Olmo2ForSequenceClassification": ROPE,
    "Qwen3MoeForSequenceClassification": ROPE
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "GPT2ForSequenceClassification": CLASSIC,
    "GPTJForSequenceClassification": CLASSIC | {"rotary_dim": 8},
    "OPTForSequenceClassification": OPT | {"vocab_size": 320, "max_position_embeddings": 64},
    "GPTNeoXForSequenceClassification": {k: v for k, v in ROPE.items() if k != "num_key_value_heads"},
}
BERT = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
BERT |= {"architectures": ["BertForSequenceClassification"], "vocab_size": 90, "max_position_embeddings": 64}


def write(folder, head: str, fields: dict, **more):
    cls = getattr(transformers, head)
    config = cls.config_class(**fields, pad_token_id=0, **more)
    config._attn_implementation = "eager"
    model = randomise(cls(config))
    model.save_pretrained(folder)
    write_tokenizer(folder, fields["vocab_size"])
    return model


@pytest.mark.parametrize("head", HEADS)
def test_a_decoders_logits_equal_transformers(tmp_path, head):
    oracle = write(tmp_path, head, HEADS[head], num_labels=3)
    with LLM(str(tmp_path), overrides={"executor.num_threads": 1, "debug.check": True}) as llm:
        found = llm.classify(TEXTS, use_activation=False, use_tqdm=False)
        likely = llm.classify(TEXTS, use_tqdm=False)
    for output, probable in zip(found, likely, strict=True):
        with torch.inference_mode():
            wanted = oracle(torch.tensor([output.prompt_token_ids])).logits[0]
        np.testing.assert_allclose(output.outputs.probs, wanted, rtol=0, atol=HIDDEN)
        np.testing.assert_allclose(probable.outputs.probs, wanted.softmax(-1), rtol=0, atol=HIDDEN)
        assert output.outputs.label == f"LABEL_{int(wanted.argmax())}" and output.outputs.num_classes == 3


def test_a_decoder_of_one_label_scores_pairs(tmp_path):
    oracle = write(tmp_path, "LlamaForSequenceClassification", ROPE, num_labels=1)
    with LLM(str(tmp_path), overrides={"executor.num_threads": 1}) as llm:
        (found,) = llm.score("the sea", "is blue", use_tqdm=False)
        assert found.prompt_token_ids == llm.tokenizer.encode("the sea") + llm.tokenizer.encode("is blue")
    with torch.inference_mode():
        wanted = oracle(torch.tensor([found.prompt_token_ids])).logits[0, 0].sigmoid()
    np.testing.assert_allclose(found.outputs.score, wanted, rtol=0, atol=HIDDEN)


@pytest.mark.parametrize(
    ("head", "fields", "message"),
    [
        ("Gemma2ForSequenceClassification", ROPE | {"head_dim": 16}, "soft cap"),
        ("BloomForSequenceClassification", CLASSIC | {"hidden_size": 64}, "ALiBi"),
    ],
)
def test_attention_that_reads_no_texts_at_once_is_refused_by_name(tmp_path, head, fields, message):
    write(tmp_path, head, fields)
    with pytest.raises(ConfigError, match=message):
        LLM(str(tmp_path))


def test_it_does_not_generate(tmp_path):
    write(tmp_path, "LlamaForSequenceClassification", ROPE, num_labels=3)
    with pytest.raises(ModelError, match="without its LM head"):
        load_model(str(tmp_path), torch.float32, "cpu")


def test_a_head_that_is_missing_is_named(tmp_path):
    write(tmp_path, "LlamaForSequenceClassification", ROPE, num_labels=3)
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="score.weight"):
        LLM(str(tmp_path))


# ------------------------------------------------------------------------------------------------- what a config says


def classifier(**fields):
    return read_spec(BERT | fields).classifier


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({"num_labels": 1}, "sigmoid"),
        ({"num_labels": 3}, "softmax"),
        ({}, "softmax"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 3, "problem_type": "single_label_classification"}, "softmax"),
        ({"num_labels": 1, "problem_type": "single_label_classification"}, "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, "identity"),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
        ({"num_labels": 3, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity"),
        ({"num_labels": 3, "sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}}, "sigmoid"),
        ({"num_labels": 3, "sentence_transformers": {"activation_fn": "torch.nn.Softmax"}}, "softmax"),
    ],
)
def test_the_activation_is_what_the_head_was_trained_or_saved_with(fields, activation):
    assert classifier(**fields).activation == activation


def test_labels_have_the_configs_names_or_numbers():
    assert classifier(id2label={"1": "bad", "0": "good"}).labels == ("good", "bad")
    assert classifier(num_labels=3).labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert classifier().labels == ("LABEL_0", "LABEL_1")
    assert read_spec(BERT | {"architectures": ["BertModel"]}).classifier is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"problem_type": "ranking"}, 'problem_type "ranking"'),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, "Tanh"),
        ({"sentence_transformers": 3}, "wrong kind"),
        ({"id2label": {"0": "a", "2": "b"}}, r"numbers \[0, 2\]"),
        ({"id2label": ["a"]}, "wrong kind"),
        ({"num_labels": 0}, "there are none"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(fields, message):
    with pytest.raises(ModelError, match=message):
        classifier(**fields)
