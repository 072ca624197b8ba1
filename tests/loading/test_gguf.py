"""Rule: a GGUF file, read as it is, is the model that transformers would have been given."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from loading.gguf_fixture import HEADS, KV_HEADS, SPECIAL, TEMPLATE, TOKENS, hf_tensors, permuted, write_gguf
from naive_attention import logits_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from minivllm.errors import ModelError
from minivllm.kernels.cpu.blocks import Blocks
from minivllm.layers.rotary import llama3, plain
from minivllm.loading import load_model, read_checkpoint, resolve
from minivllm.loading.gguf_convert import hf_config, hf_name
from minivllm.loading.gguf_file import GGUFFile
from minivllm.loading.gguf_tokenizer import merges_from_scores
from minivllm.loading.gguf_weights import dequantise, unpermute
from minivllm.models.gguf import shortest
from minivllm.models.spec import RopeSpec
from minivllm.runner.naive_worker import load_transformers

CPU = torch.device("cpu")
WRITABLE = [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]
TEXT = "hello world  123\n\n  don't héllo 日本 🤗 <|user|>hi<|end|> 12 <unused1>x"


@pytest.mark.parametrize("kind", WRITABLE, ids=lambda k: k.name)
def test_every_stored_type_converts_to_what_gguf_itself_dequantises(tmp_path, kind):
    expected = write_gguf(tmp_path / "m.gguf", kind=kind)
    lossless = {Type.F16: torch.float16, Type.BF16: torch.bfloat16}.get(kind, torch.float32)
    files = resolve(str(tmp_path / "m.gguf"), tmp_path / "cache")
    found = {name: tensor for name, tensor, _ in read_checkpoint(files)}
    file = GGUFFile(tmp_path / "m.gguf")
    for name, values in expected.items():
        stored = found.pop(hf_name(file, file.tensors[name]))
        assert torch.equal(stored.float(), torch.from_numpy(values)), name
        assert stored.dtype == (lossless if stored.dim() == 2 else torch.float32), name
    assert not found
    assert files.spec.dtype == str(lossless).removeprefix("torch.")


@pytest.mark.parametrize("kind", [t for t in Type if t in gguf.quants._type_traits], ids=lambda k: k.name)
def test_every_type_that_gguf_reads_is_read(tmp_path, kind):
    """K, I and other types that the package cannot write: random blocks, read through our header."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 255, (4, 2 * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    stored = raw.view({Type.F32: np.float32, Type.F16: np.float16}.get(kind, np.uint8))
    writer.add_tensor("x", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "t.gguf")
    info = file.tensors["x"]
    with np.errstate(all="ignore"):  # random bits make NaN and overflow
        found = dequantise(Blocks(info.type_name, file.bytes_of(info)))
        expected = gguf.quants.dequantize(stored, kind)
    assert found.shape == info.shape == (4, 2 * block)
    np.testing.assert_array_equal(found.float().numpy(), expected.astype(np.float32))


# transformers reads key_length only for some architectures: elsewhere the head size is what it takes as default.
@pytest.mark.parametrize(("arch", "head_size"), [("llama", 32), ("qwen2", 16), ("qwen3", 128)])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_those_of_transformers_own_gguf_loader(tmp_path, arch, head_size, tied):
    write_gguf(tmp_path / "m.gguf", arch, tied=tied, head_size=head_size)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    loaded = load_model(str(tmp_path / "m.gguf"), torch.float32, "cpu", cache_dir=tmp_path / "cache")
    ids = list(range(3, 43))
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0]
    # The same weights; fp32 sums in another order (see tests/models/test_llama.py for the size of that).
    torch.testing.assert_close(logits_of(loaded.model, ids), expected, rtol=0, atol=2e-4)
    assert loaded.spec.tie_embeddings == tied


def test_transformers_given_what_we_read_has_the_same_logits(tmp_path):
    write_gguf(tmp_path / "m.gguf", "qwen3")
    loaded = load_model(str(tmp_path / "m.gguf"), torch.float32, "cpu", cache_dir=tmp_path / "cache")
    oracle = load_transformers(resolve(str(tmp_path / "m.gguf"), tmp_path / "cache"), torch.float32, CPU, 0)
    with torch.inference_mode():
        expected = oracle(torch.tensor([[5, 6, 7, 8]])).logits[0]
    torch.testing.assert_close(logits_of(loaded.model, [5, 6, 7, 8]), expected, rtol=0, atol=2e-4)


def test_unpermute_is_the_inverse_of_llama_cpps_permutation():
    q = np.arange(HEADS * 8 * 3).reshape(HEADS * 8, 3)
    assert not np.array_equal(permuted("blk.0.attn_q.weight", q), q)
    assert np.array_equal(unpermute(torch.from_numpy(permuted("blk.0.attn_q.weight", q)), HEADS).numpy(), q)
    k = np.arange(KV_HEADS * 8)  # biases are permuted too
    assert np.array_equal(unpermute(torch.from_numpy(permuted("blk.0.attn_k.bias", k)), KV_HEADS).numpy(), k)


def test_the_config_says_what_the_metadata_say(tmp_path):
    write_gguf(tmp_path / "m.gguf", tied=False)
    config = hf_config(GGUFFile(tmp_path / "m.gguf"))
    assert config["rms_norm_eps"] == 1e-5  # not 9.999999747378752e-06
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 32)
    assert config["vocab_size"] == len(TOKENS)
    assert config["tie_word_embeddings"] is False
    assert config["eos_token_id"] == [0, 2]  # end of text and end of turn


def test_a_llama_with_a_window_is_a_mistral(tmp_path):
    write_gguf(tmp_path / "m.gguf", extra={"llama.attention.sliding_window": 64})
    spec = resolve(str(tmp_path / "m.gguf"), tmp_path / "cache").spec
    assert spec.architecture == "MistralForCausalLM"
    assert spec.windows == (64, 64)


def test_llama3s_table_of_rope_factors_becomes_its_parameters(tmp_path):
    rope = RopeSpec("llama3", 10_000.0, 32.0, 8192, 1.0, 4.0)
    factors = (plain(rope, 32).per_pair / llama3(rope, 32).per_pair).numpy()
    write_gguf(tmp_path / "m.gguf", tensors=hf_tensors("llama", True) | {"rope_freqs.weight": factors})
    assert resolve(str(tmp_path / "m.gguf"), tmp_path / "cache").spec.rope == rope


def test_another_table_of_rope_factors_is_refused(tmp_path):
    odd = np.linspace(1, 3, 16, dtype=np.float32)
    write_gguf(tmp_path / "m.gguf", tensors=hf_tensors("llama", True) | {"rope_freqs.weight": odd})
    with pytest.raises(ModelError, match="rope_freqs.weight is not Llama 3's"):
        resolve(str(tmp_path / "m.gguf"), tmp_path / "cache")


@pytest.mark.parametrize("pre", ["default", "llama-bpe", "qwen2", "tekken"])
def test_the_tokenizer_equals_the_one_that_transformers_builds(tmp_path, pre):
    write_gguf(tmp_path / "m.gguf", pre=pre)
    ours = AutoTokenizer.from_pretrained(resolve(str(tmp_path / "m.gguf"), tmp_path / "cache").tokenizer_dir)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    assert ours(TEXT)["input_ids"] == theirs(TEXT)["input_ids"]
    assert ours.decode(ours(TEXT)["input_ids"]) == TEXT
    assert set(SPECIAL) <= set(ours.all_special_tokens) | set(ours.get_added_vocab())


def test_smollm_takes_each_digit_alone(tmp_path):
    write_gguf(tmp_path / "m.gguf", pre="smollm")
    tokenizer = AutoTokenizer.from_pretrained(resolve(str(tmp_path / "m.gguf"), tmp_path / "cache").tokenizer_dir)
    assert tokenizer.tokenize("12") == ["1", "2"]  # though "12" is a token
    assert tokenizer.tokenize("  1") == ["ĠĠ", "1"]


def test_the_chat_template_comes_from_the_file(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    folder = resolve(str(tmp_path / "m.gguf"), tmp_path / "cache").tokenizer_dir
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["chat_template"] == TEMPLATE
    assert (config["bos_token"], config["eos_token"]) == ("<|user|>", "<|end|>")


def test_sentencepiece_merges_follow_the_scores():
    tokens, scores = ["a", "b", "c", "ab", "bc", "abc"], [0, 0, 0, -1.0, -2.0, -3.0]
    assert merges_from_scores(tokens, scores) == [("a", "b"), ("b", "c"), ("a", "bc"), ("ab", "c")]


def test_a_sentencepiece_vocabulary_encodes_as_transformers_does(tmp_path):
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        "h",
        "e",
        "l",
        "o",
        "▁h",
        "el",
        "hel",
        "lo",
    ]
    pieces += ["▁hel", "▁hello"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)]
    path = tmp_path / "m.gguf"
    write_sentencepiece(path, pieces, kinds)
    ours = AutoTokenizer.from_pretrained(resolve(str(path), tmp_path / "cache").tokenizer_dir)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in ("hello hello", "hello  hello", "héllo\n", "hello</s>"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
    assert ours("hello")["input_ids"] == [1, pieces.index("▁hello")]
    # Sentencepiece and llama.cpp write a space before any text; transformers not before one that begins with a space.
    assert ours(" hello")["input_ids"] == [1, pieces.index("▁"), pieces.index("▁hello")]
    assert ours.decode(ours("hello héllo")["input_ids"], skip_special_tokens=True) == "hello héllo"


def write_sentencepiece(path, pieces, kinds):
    """The tiny llama with another vocabulary: the embedding is cut or padded to it."""
    import loading.gguf_fixture as fixture

    def add_tokenizer(writer, pre):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(pieces)
        writer.add_token_scores([-float(i) for i in range(len(pieces))])
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_bos_token(True)

    kept = fixture.add_tokenizer
    fixture.add_tokenizer = add_tokenizer
    try:
        tensors = hf_tensors("llama", True)
        tensors["token_embd.weight"] = np.resize(tensors["token_embd.weight"], (len(pieces), 64))
        write_gguf(path, tensors=tensors)
    finally:
        fixture.add_tokenizer = kept


@pytest.mark.parametrize(
    ("value", "decimal"), [(np.float32(1e-5), 1e-5), (np.float32(1e5), 1e5), (np.float32(0.1), 0.1)]
)
def test_an_fp32_number_is_written_as_its_shortest_decimal(value, decimal):
    assert shortest(float(value)) == decimal


@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.3, 0.6, 0.99])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path, fraction):
    write_gguf(tmp_path / "whole.gguf")
    data = (tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(ModelError, match=r"cut\.gguf.*(truncated|not a GGUF)"):
        resolve(str(cut), tmp_path / "cache")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be opened"),
        (b"<html>not found</html>", "not a GGUF file"),
        (b"GGUF\x00\x00\x00\x03" + bytes(16), "big-endian"),
        (b"GGUF\x09\x00\x00\x00" + bytes(16), "version 9"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, "truncated or corrupt"),
    ],
)
def test_what_is_not_a_gguf_says_so(tmp_path, content, message):
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=f"bad.gguf.*{message}"):
        resolve(str(tmp_path / "bad.gguf"), tmp_path / "cache")


def test_an_unknown_architecture_names_the_known_ones(tmp_path):
    write_gguf(tmp_path / "m.gguf", "gemma", tensors={})
    with pytest.raises(ModelError, match='"gemma" is not supported. Supported: llama, qwen2, qwen3'):
        resolve(str(tmp_path / "m.gguf"), tmp_path / "cache")


@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])  # Mixtral's files say llama
def test_a_mixture_of_experts_is_sent_to_safetensors(arch, tmp_path):
    write_gguf(tmp_path / "m.gguf", arch, extra={f"{arch}.expert_count": 8})
    with pytest.raises(ModelError, match="a mixture of experts is not read from GGUF. Take its safetensors folder"):
        resolve(str(tmp_path / "m.gguf"), tmp_path / "cache")


def test_an_unknown_pre_tokenizer_is_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf", pre="future-v9")
    with pytest.raises(ModelError, match='pre-tokenizer "future-v9" is not known'):
        resolve(str(tmp_path / "m.gguf"), tmp_path / "cache")


def test_a_missing_and_a_foreign_tensor_are_named(tmp_path):
    tensors = hf_tensors("llama", True)
    write_gguf(tmp_path / "less.gguf", tensors={n: t for n, t in tensors.items() if n != "blk.1.ffn_up.weight"})
    with pytest.raises(ModelError, match=r"1 tensors are missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(str(tmp_path / "less.gguf"), torch.float32, "cpu", cache_dir=tmp_path / "cache")
    write_gguf(tmp_path / "more.gguf", tensors=tensors | {"blk.0.ssm_a.weight": np.ones((4, 32), np.float32)})
    with pytest.raises(ModelError, match='"blk.0.ssm_a.weight" has no place'):
        resolve(str(tmp_path / "more.gguf"), tmp_path / "cache")


def test_a_failed_conversion_leaves_nothing_behind(tmp_path):
    write_gguf(tmp_path / "m.gguf", pre="future-v9")
    with pytest.raises(ModelError):
        resolve(str(tmp_path / "m.gguf"), tmp_path / "cache")
    assert [p for p in (tmp_path / "cache").iterdir() if p.is_dir()] == []
