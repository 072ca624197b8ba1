"""Rule: a Whisper that CTranslate2 keeps is the one that it was made of; what is none is refused, in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loading.ctranslate2_fixture import copy_without, model_bin, variables, write_folder
from models.speech import save_whisper
from safetensors.torch import load_file

from minivllm.errors import ModelError
from minivllm.loading import ctranslate2, load_model, resolve

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Any]:
    """(a folder of transformers, its model)."""
    folder = tmp_path_factory.mktemp("whisper")
    return folder, save_whisper(folder)


@pytest.fixture(scope="module")
def kept(made, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ctranslate2")
    write_folder(folder, model_bin(variables(made[1])), made[0])
    return folder


def test_it_is_the_model_that_it_was_made_of(made, kept, tmp_path):
    first = resolve(str(kept), tmp_path / "cache")
    assert "convert" in first.seconds and first.source == f"local folder {kept}, converted from CTranslate2"
    assert first.name == kept.name and first.spec.bos_token_id == first.spec.eos_token_ids[0] == 0
    again = resolve(str(kept), tmp_path / "cache")
    assert again.weights == first.weights and "convert" not in again.seconds
    found, expected = load_file(first.weights[0]), load_file(made[0] / "model.safetensors")
    assert found.keys() == expected.keys() - {"proj_out.weight"}
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    ours = load_model(str(kept), torch.float32, CPU, cache_dir=tmp_path / "cache").model
    whole = load_model(str(made[0]), torch.float32, CPU).model
    x = torch.randn(*ours.input_shape)
    with torch.inference_mode():
        for (layer, kv), (other, theirs) in zip(ours.encode(x), whole.encode(x), strict=True):
            assert layer == other and torch.equal(kv, theirs)


def test_what_is_not_to_be_said_is_kept(kept, tmp_path):
    ctranslate2.convert(kept / "model.bin", tmp_path)
    told = ctranslate2.read_json(tmp_path / "generation_config.json")
    assert told["suppress_tokens"] == [5, 6] and told["begin_suppress_tokens"] == [7]
    assert told["eos_token_id"] == 0 and told["decoder_start_token_id"] == 320


def test_16_bits_stay_16_bits(made, tmp_path):
    write_folder(tmp_path, model_bin(variables(made[1], "float16")), made[0])
    files = resolve(str(tmp_path), tmp_path / "cache")
    assert files.spec.dtype == "float16"
    assert {tensor.dtype for tensor in load_file(files.weights[0]).values()} == {torch.float16}


def test_a_folder_with_safetensors_is_read_as_such(made, tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((made[0] / name).read_bytes())
    (tmp_path / "model.bin").write_bytes(b"something else")
    assert resolve(str(tmp_path), tmp_path / "cache").weights == (tmp_path / "model.safetensors",)


def changed(found: dict[str, np.ndarray], **changes: Any) -> dict[str, np.ndarray]:
    return {name: value for name, value in (found | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: model_bin(v, version=5), "version 5 of CTranslate2's format is not read"),
        (lambda v: model_bin(v, kind="TransformerSpec"), "a TransformerSpec of CTranslate2 is not supported"),
        (lambda v: model_bin(v)[:1000], "damaged or cut off"),
        (lambda v: model_bin(v)[:3], "damaged or cut off"),
        (lambda v: model_bin(v)[:12] + b"\xff" * 40, "damaged or cut off"),
        (lambda v: model_bin(changed(v, **{"decoder/layer_norm/gamma": None})), "tensors are missing"),
        (lambda v: model_bin(changed(v, **{"decoder/num_heads": None})), "no variable 'decoder/num_heads'"),
        (lambda v: model_bin(changed(v, **{"decoder/activation": np.array(0, np.int8)})), "activation 0, or ALiBi"),
        (lambda v: model_bin(changed(v, **{"decoder/alibi": np.array(1, np.int8)})), "activation 3, or ALiBi"),
        (lambda v: model_bin(changed(v, **{"decoder/more/weight": np.zeros(3, "f4")})), "has no place in a Whisper"),
        (
            lambda v: model_bin({n: a.astype("i1") if n.endswith("linear_0/weight") else a for n, a in v.items()}),
            "in 8 or 16 bit integers",
        ),
        (
            lambda v: model_bin({n: a + 1 if n.endswith("self_attention/linear_0/bias") else a for n, a in v.items()}),
            "has a bias of keys",
        ),
    ],
)
def test_what_is_no_whisper_is_refused(change, message, made, tmp_path):
    write_folder(tmp_path, change(variables(made[1])), made[0])
    with pytest.raises(ModelError, match=message):
        load_model(str(tmp_path), torch.float32, CPU, cache_dir=tmp_path / "cache")


def test_a_folder_needs_whispers_tokenizer(kept, made, tmp_path):
    copy_without(kept, tmp_path / "a", "tokenizer.json")
    with pytest.raises(ModelError, match=r"no tokenizer.json beside model.bin"):
        resolve(str(tmp_path / "a"), tmp_path / "cache")
    (tmp_path / "a" / "tokenizer.json").write_bytes((made[0] / "tokenizer.json").read_bytes())
    with pytest.raises(ModelError, match=r"no token <\|startoftranscript\|>: it is not a Whisper's"):
        resolve(str(tmp_path / "a"), tmp_path / "cache")
