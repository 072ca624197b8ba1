"""Rule: an adapter is served exactly or refused with the file, the field and what to do."""

from __future__ import annotations

import json

import pytest
import torch
from lora.adapters import ALL, NUM_LAYERS, SHAPES, write_adapter
from safetensors.torch import load_file, save_file

from minivllm.errors import AdapterError, MissingAdapter
from minivllm.lora.peft import Target, read_adapter

TARGETS = {
    f"model.layers.{i}.{module}": Target(n_in, n_out)
    for i in range(NUM_LAYERS)
    for module, (n_out, n_in) in SHAPES.items()
}
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def read(folder, max_rank=64):
    return read_adapter(str(folder), TARGETS, max_rank)


def edit(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "config, scale",
    [
        ({}, 2.0),
        ({"lora_alpha": 3}, 3 / 8),
        ({"use_rslora": True}, 16 / 8**0.5),
        ({"alpha_pattern": {"q_proj": 4}}, 0.5),
    ],
)
def test_the_scale_is_pefts(tmp_path, config, scale):
    found = read(write_adapter(tmp_path, 0, targets=("q_proj",), **config))
    assert set(found) == {f"model.layers.{i}.self_attn.q_proj" for i in range(NUM_LAYERS)}
    assert all(m.scale == pytest.approx(scale) for m in found.values())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"use_dora": True}, "use_dora is not supported: DoRA"),
        ({"bias": "all"}, "bias='all'"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"lora_bias": True}, "lora_bias is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"some_new_option": 3}, "some_new_option=3 is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"target_modules": ["q_proj", "lm_head"]}, '"lm_head" is not supported on this model'),
        ({"target_modules": ["embed_tokens"]}, '"embed_tokens" is not supported on this model'),
        ({"target_modules": ["q_prj"]}, 'Did you mean "q_proj"?'),
        ({"target_modules": "nothing"}, "names no module"),
        ({"target_modules": "(q_proj"}, "no regular expression"),
        ({"target_modules": "(?!a).*q_proj"}, "look-around.*A list of names will do"),
        ({"target_modules": "((a{1,99}){1,99}b{1,99}){1,99}"}, "target_modules: the pattern .* is too large"),
        ({"target_modules": "a" * 5000}, "has 5,000 characters"),
        ({"target_modules": ["q_proj"] * 5000}, "target_modules has 5,000 entries"),
        ({"exclude_modules": "(q_proj"}, "exclude_modules: the pattern"),
        ({"rank_pattern": {"(q_proj": 3}}, "rank_pattern: the pattern"),
        ({"target_modules": "((([a-z._0-9])+)+)+!"}, "names no module"),
        ({"target_modules": None}, "target_modules must be"),
        ({"layers_to_transform": [99]}, "names no module"),
        ({"r": 0}, "r must be a positive number"),
        ({"r": True}, "r must be a positive number"),
        ({"lora_alpha": "16"}, "lora_alpha must be a positive number"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern must map"),
        ({"r": 4}, r"has shape \[8, 64\], rank and model ask for \[4, 64\]"),
        ({"r": 128}, "has rank 128, and lora.max_rank admits 64"),
        ({"rank_pattern": {"v_proj": 65}}, "v_proj has rank 65"),
        ({"target_modules": ["q_proj"]}, "belong to no target module"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused_by_name(tmp_path, changes, message):
    edit(write_adapter(tmp_path, 0), **changes)
    with pytest.raises(AdapterError, match=message) as raised:
        read(tmp_path)
    assert "adapter_" in str(raised.value) and raised.value.param == "lora_path"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop(FIRST), "1 tensors are missing: .*layers.0.self_attn.q_proj.lora_A"),
        (lambda t: t.update({FIRST: t[FIRST][:, :-1].contiguous()}), r"has shape \[8, 63\]"),
        (lambda t: t.update({FIRST: t[FIRST].int()}), "not floating-point"),
        (
            lambda t: t.update({"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": t[FIRST]}),
            "no target module",
        ),
        (lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": t[FIRST]}), "on embeddings"),
        (lambda t: t.update({FIRST.replace("lora_A.weight", "lora_magnitude_vector"): t[FIRST]}), "DoRA"),
    ],
)
def test_wrong_tensors_are_refused_by_name(tmp_path, change, message):
    write_adapter(tmp_path, 0)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=message):
        read(tmp_path)


def test_missing_and_damaged_files_are_refused(tmp_path):
    with pytest.raises(MissingAdapter, match="no such folder"):
        read(tmp_path / "nowhere")
    with pytest.raises(AdapterError, match="no adapter_config.json"):
        read(tmp_path)
    write_adapter(tmp_path, 0)
    weights = tmp_path / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(AdapterError, match="truncated or corrupt"):
        read(tmp_path)
    weights.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterError, match="pickle"):
        read(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterError, match="not readable as JSON"):
        read(tmp_path)


def test_the_dtype_of_the_file_is_free(tmp_path):
    write_adapter(tmp_path, 0, targets=ALL)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    save_file({name: t.bfloat16() for name, t in tensors.items()}, tmp_path / "adapter_model.safetensors")
    assert {m.a.dtype for m in read(tmp_path).values()} == {torch.bfloat16}
