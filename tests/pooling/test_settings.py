"""Rule: the vector is made as the model's own files say, and what they say and is not supported is refused by name."""

from __future__ import annotations

import json

import pytest
from pooling.tiny import write_modules

from minivllm.errors import BadRequest, ModelError
from minivllm.pooling.settings import read_settings

MEAN = {"pooling_mode_mean_tokens": True}


def settings(folder, asked="auto"):
    found = read_settings(folder, True, asked)
    return found.kind, found.normalize, found.max_tokens


@pytest.mark.parametrize(
    ("switch", "kind"),
    [("pooling_mode_mean_tokens", "mean"), ("pooling_mode_cls_token", "cls"), ("pooling_mode_lasttoken", "last")],
)
def test_each_switch_names_a_rule(tmp_path, switch, kind):
    off = {"pooling_mode_max_tokens": False, "word_embedding_dimension": 48}
    write_modules(tmp_path, "Transformer", "Pooling", "Normalize", limit=32, **off, **{switch: True})
    assert settings(tmp_path) == (kind, True, 32)


def test_the_newer_form_names_the_rule(tmp_path):
    write_modules(tmp_path, "Transformer", "Pooling", pooling_mode="lasttoken")
    assert settings(tmp_path) == ("last", False, None)


def test_without_files_an_encoder_takes_the_mean_and_a_decoder_the_last_token(tmp_path):
    assert settings(tmp_path) == ("mean", True, None)
    assert read_settings(None, False).kind == "last"


def test_what_the_user_asks_for_goes_before_what_the_files_say(tmp_path):
    write_modules(tmp_path, "Transformer", "Pooling", pooling_mode_cls_token=True)
    assert settings(tmp_path, "mean") == ("mean", False, None)


@pytest.mark.parametrize(
    ("steps", "pooling", "message"),
    [
        (("Transformer", "Pooling", "Dense"), {"pooling_mode_mean_tokens": True}, "Dense"),
        (("Transformer",), {}, "only Transformer, Pooling and Normalize"),
        (("Transformer", "Pooling"), {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens is not supported"),
        (("Transformer", "Pooling"), {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, r"\+ pooling"),
        (("Transformer", "Pooling"), {}, "no pooling"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, steps, pooling, message):
    write_modules(tmp_path, *steps, **pooling)
    with pytest.raises(ModelError, match=message):
        settings(tmp_path)


def test_prompts_are_known_by_their_names(tmp_path):
    write_modules(tmp_path, "Transformer", "Pooling", prompts={"query": "q: ", "document": ""}, **MEAN)
    prompts = read_settings(tmp_path, True).prompts
    assert [prompts.before(name) for name in ("query", "document", None)] == ["q: ", "", ""]
    with pytest.raises(BadRequest, match='no prompt of the name "passage". Prompts: query, document'):
        prompts.before("passage")
    write_modules(tmp_path, "Transformer", "Pooling", prompts={"query": "q: "}, default="query", **MEAN)
    assert read_settings(tmp_path, True).prompts.before(None) == "q: "


@pytest.mark.parametrize(
    ("prompts", "default", "pooling", "message"),
    [
        ({}, "query", {}, 'default_prompt_name "query" is none of its prompts'),
        (["query"], None, {}, '"prompts" must be texts by their names'),
        ({"query": 1}, None, {}, '"prompts" must be texts by their names'),
        ({"query": "q: "}, None, {"include_prompt": False}, "include_prompt=false, a mean without the prompt's tokens"),
    ],
)
def test_prompts_that_cannot_be_put_before_a_text_are_refused(tmp_path, prompts, default, pooling, message):
    write_modules(tmp_path, "Transformer", "Pooling", prompts=prompts, default=default, **MEAN, **pooling)
    with pytest.raises(ModelError, match=message):
        settings(tmp_path)


def test_a_mean_without_prompts_that_there_are_none_of_is_a_mean(tmp_path):
    write_modules(tmp_path, "Transformer", "Pooling", prompts={"query": ""}, include_prompt=False, **MEAN)
    assert settings(tmp_path) == ("mean", False, None)


def test_lower_casing_is_refused(tmp_path):
    write_modules(tmp_path, "Transformer", "Pooling", **MEAN)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    with pytest.raises(ModelError, match="do_lower_case"):
        settings(tmp_path)


def test_a_damaged_file_is_an_error_that_names_it(tmp_path):
    write_modules(tmp_path, "Transformer", "Pooling", pooling_mode_mean_tokens=True)
    (tmp_path / "1_Pooling" / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="1_Pooling/config.json: expected a JSON object"):
        settings(tmp_path)
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ModelError, match="modules.json: not readable"):
        settings(tmp_path)
