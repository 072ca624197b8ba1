"""Rule: whatever was asked for is found, or one ModelError says what is wrong with which file and what to do."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from loading.gguf_fixture import write_gguf
from naive_attention import greedy, logits_of
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from minivllm.errors import ModelError
from minivllm.loading import hub, load_model, resolve
from minivllm.loading.dummy import SHAPES, write_tokenizer
from minivllm.loading.safetensors_io import Entry, write_tensors

CONFIG = LlamaConfig(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
IDS = [5, 6, 7, 8]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A whole little model in one file, untied."""
    path = tmp_path / "model"
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(path)
    write_tokenizer(path, CONFIG.vocab_size)
    return path


def load(path, **options):
    return load_model(str(path), torch.float32, "cpu", **options)


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# --- local folders


def test_shards_give_the_same_model_as_one_file(folder, tmp_path):
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    write_tokenizer(tmp_path / "shards", CONFIG.vocab_size)
    assert len(resolve(str(tmp_path / "shards")).weights) > 2
    assert torch.equal(logits_of(load(tmp_path / "shards").model, IDS), logits_of(load(folder).model, IDS))


def test_a_missing_shard_is_named(folder, tmp_path):
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    write_tokenizer(tmp_path / "shards", CONFIG.vocab_size)
    gone = sorted((tmp_path / "shards").glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelError, match=f"missing: {re.escape(gone.name)}"):
        resolve(str(tmp_path / "shards"))


def test_a_tied_checkpoint_may_carry_its_head_and_old_rope_tables(folder):
    edit_json(folder / "config.json", tie_word_embeddings=True)
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    model = load(folder).model
    hidden = torch.randn(2, CONFIG.hidden_size)
    torch.testing.assert_close(model.logits(hidden), hidden @ model.embedding.weight.T)


def test_the_name_is_the_folders_and_eos_ids_come_from_both_files(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    loaded = load(folder)
    assert (loaded.name, loaded.spec.eos_token_ids, loaded.tokenizer_dir) == ("model", (7, 2), folder)


def test_a_missing_tensor_is_named(folder):
    rewrite(folder, lambda t: t.pop("model.layers.1.mlp.down_proj.weight"))
    with pytest.raises(ModelError, match=r"1 tensors are missing: model\.layers\.1\.mlp\.down_proj\.weight"):
        load(folder)


def test_an_unexpected_tensor_is_named_with_its_file(folder):
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}))
    with pytest.raises(ModelError, match=r"q_proj\.bias\" in .*model\.safetensors"):
        load(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder):
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.ones(31)}))
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor \"model\.norm\.weight\" .*\[31\].*\[32\]"):
        load(folder)


@pytest.mark.parametrize("fraction", [0.0, 0.005, 0.5, 0.999])
def test_truncated_safetensors_name_the_file(folder, fraction):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(ModelError, match=r"model\.safetensors: truncated or corrupt.*Fetch the file again"):
        load(folder)


def test_bad_json_names_the_file(folder):
    (folder / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(ModelError, match=r"config\.json: not readable as JSON"):
        load(folder)


def test_a_folder_that_is_no_model_says_what_one_holds(tmp_path):
    with pytest.raises(ModelError, match="no config.json"):
        resolve(str(tmp_path))


def test_pickled_weights_are_not_opened(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights.*save_pretrained"):
        resolve(str(folder))


def test_no_weights_at_all_is_an_error(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        resolve(str(folder))


def test_a_quantised_checkpoint_is_refused(folder):
    edit_json(folder / "config.json", quantization_config={"quant_method": "odd"})
    with pytest.raises(ModelError, match=r'config\.json: the checkpoint is quantised \("odd"\)'):
        resolve(str(folder))


def test_a_single_file_that_is_no_gguf_is_refused(folder):
    with pytest.raises(ModelError, match="must be a .gguf"):
        resolve(str(folder / "model.safetensors"))


# --- tokenizers


def test_without_a_tokenizer_the_error_says_so_and_another_may_be_given(folder, tmp_path):
    (folder / "tokenizer.json").rename(tmp_path / "kept.json")
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match="no tokenizer.json"):
        resolve(str(folder), tmp_path / "cache")
    other = tmp_path / "other"
    other.mkdir()
    write_tokenizer(other, 320)
    assert resolve(str(folder), tmp_path / "cache", tokenizer=str(other)).tokenizer_dir == other


def test_a_slow_tokenizer_is_converted_once_into_the_cache(folder, tmp_path):
    (folder / "tokenizer.json").unlink()
    alphabet = {"<|endoftext|>": 0, "h": 1, "i": 2, "hi": 3, "Ġ": 4}
    (folder / "vocab.json").write_text(json.dumps(alphabet))
    (folder / "merges.txt").write_text("#version: 0.2\nh i\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (folder / "chat_template.jinja").write_text("x")
    first = resolve(str(folder), tmp_path / "cache").tokenizer_dir
    assert first.parent == tmp_path / "cache"
    assert Tokenizer.from_file(str(first / "tokenizer.json")).encode("hi").ids == [3]
    assert (first / "chat_template.jinja").read_text() == "x"
    stamp = first.stat().st_mtime_ns
    assert resolve(str(folder), tmp_path / "cache").tokenizer_dir.stat().st_mtime_ns == stamp


# --- GGUF in the cache


def test_a_gguf_is_described_once_and_again_when_it_changes(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    first = resolve(str(tmp_path / "m.gguf"), tmp_path / "cache")
    again = resolve(str(tmp_path / "m.gguf"), tmp_path / "cache")
    assert "convert" in first.seconds and "convert" not in again.seconds
    assert first.weights == again.weights == (tmp_path / "m.gguf",) and first.folder == again.folder
    write_gguf(tmp_path / "m.gguf", tied=False)
    assert resolve(str(tmp_path / "m.gguf"), tmp_path / "cache").spec.tie_embeddings is False


def test_a_new_conversion_version_converts_anew(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf")
    first = resolve(str(tmp_path / "m.gguf"), tmp_path / "cache")
    monkeypatch.setattr("minivllm.loading.gguf_convert.CONVERSION_VERSION", 99)
    assert resolve(str(tmp_path / "m.gguf"), tmp_path / "cache").folder != first.folder


def test_the_streaming_writer_writes_what_safetensors_reads(tmp_path):
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.randn(2, 2).half()}
    entries = [Entry(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
    write_tensors(tmp_path / "x.safetensors", entries, iter(tensors.values()))
    found = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_the_streaming_writer_begins_nothing_that_a_disk_has_no_room_for(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(OSError, match="12 bytes needed, 10 free"):
        write_tensors(tmp_path / "x.safetensors", [Entry("a", (3,), torch.float32)], iter([torch.ones(3)]))
    assert not (tmp_path / "x.safetensors").exists()


def test_a_full_disk_is_one_error(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf")

    def full(path, *_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("minivllm.loading.gguf_convert._write_json", full)
    with pytest.raises(ModelError, match=r"cache cannot be written.*No space left on device.*config\.json"):
        resolve(str(tmp_path / "m.gguf"), tmp_path / "cache")


# --- dummies


def test_a_dummy_is_random_repeatable_finite_and_runs(tmp_path):
    first, same, other = (
        load_model("dummy:tiny", torch.bfloat16, "cpu", seed, cache_dir=tmp_path).model for seed in (0, 0, 1)
    )
    logits = logits_of(first, IDS)
    assert torch.equal(logits, logits_of(same, IDS))
    assert not torch.equal(logits, logits_of(other, IDS))
    assert logits.isfinite().all() and 0.1 < logits.std() < 10
    assert len(set(greedy(first, IDS, 8))) > 1


@pytest.mark.parametrize("name", SHAPES)
def test_every_dummy_shape_resolves_with_a_tokenizer_of_its_size(name, tmp_path):
    files = resolve(f"dummy:{name}", tmp_path)
    assert Tokenizer.from_file(str(files.tokenizer_dir / "tokenizer.json")).get_vocab_size() == files.spec.vocab_size


def test_known_shapes_have_their_published_sizes(tmp_path):
    published = {"smollm2-135m": 134.5e6, "qwen3-0.6b": 596e6, "llama-3.1-8b": 8.03e9, "gemma3-270m": 268.1e6}
    published |= {"qwen3-30b-a3b": 30.53e9, "qwen3-4b": 4.02e9, "llama-3.2-1b": 1.236e9}
    for name, size in published.items():
        assert resolve(f"dummy:{name}", tmp_path).spec.num_parameters == pytest.approx(size, rel=2e-3)


def test_the_dummy_tokenizer_speaks_text(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(resolve("dummy:tiny", tmp_path).tokenizer_dir)
    text = "héllo 日本 🤗\n\t  12<|im_end|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token_id == 2
    assert all(tokenizer.decode([i]) for i in range(512))


# --- names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135", 'Did you mean "smollm2-135m"'),
        ("smolm2-135m", 'Did you mean "smollm2-135m"'),
        ("dummy:tinny", 'Did you mean "tiny"'),
        ("./modle", r'Did you mean "model"'),
        ("no/such/folder/at/all", "no such file or folder"),
        ("weights/model.gguf", "no such file or folder"),
    ],
)
def test_a_typo_is_answered_with_the_nearest_name_and_never_reaches_the_hub(name, message, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(hub, "download", lambda *_: pytest.fail("asked the Hub"))
    with pytest.raises(ModelError, match=message):
        resolve(name)


def test_a_hub_that_cannot_be_reached_is_one_error_that_says_what_to_do(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r'"owner/name".*cannot be reached.*local folder or a \.gguf') as caught:
        resolve("owner/name")
    assert caught.value.__cause__ is None  # no library traceback behind it


def test_a_failing_connection_is_the_same_error(monkeypatch):
    import httpx
    import huggingface_hub

    def fail(*args, **options):
        raise httpx.ConnectError("[Errno -3] Temporary failure in name resolution")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match="cannot be reached.*name resolution"):
        resolve("owner/name")


def test_of_a_librarys_error_only_what_went_wrong_is_told(monkeypatch):
    import huggingface_hub

    def fail(*args, **options):
        raise ValueError("Got: ConnectError: no route\nAn error happened. See the manual of our functions.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=r"fetch it \(ConnectError: no route\)\. Give a local folder"):
        resolve("owner/name")


def test_only_what_could_be_a_model_is_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".nodel").mkdir()
    (tmp_path / "modes.txt").touch()
    with pytest.raises(ModelError) as caught:
        resolve("./modex")
    assert "Did you mean" not in str(caught.value)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match='Did you mean "model.gguf"'):
        resolve("./model.ggf")


def test_a_snapshot_of_the_hub_is_loaded_as_a_folder(folder, monkeypatch):
    monkeypatch.setattr(hub, "download", lambda repo: folder)
    files = resolve("owner/name")
    assert (files.name, files.weights[0].parent) == ("owner/name", folder)
