"""Rule: what is kept packed is the file's matrix, code for code, and the model that computes with it the same model."""

from __future__ import annotations

import sys

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from loading.gguf_fixture import hf_tensors, write_gguf
from naive_attention import logits_of
from safetensors.torch import load_file

from minivllm.errors import ModelError
from minivllm.kernels.cpu import linear as kernels
from minivllm.loading import load_model, resolve
from minivllm.loading.gguf_packed import split, stored_bits
from minivllm.quantization import Packed, dequantise
from minivllm.quantization.packed import KeptPacked
from minivllm.quantization.select import Choice

needs_kernels = pytest.mark.skipif(kernels.obstacle() is not None, reason=str(kernels.obstacle()))
KINDS = [Type.Q4_0, Type.Q4_1, Type.Q8_0]
IDS = list(range(3, 43))


def random_blocks(kind: Type, rows: int = 16, blocks: int = 4) -> np.ndarray:
    """Every code, and finite scales of every size (uint8 [rows, bytes])."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (rows, blocks, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for at in (0, 2) if kind is Type.Q4_1 else (0,):
        half = rng.normal(0, 10.0 ** rng.integers(-4, 2, (rows, blocks))).astype(np.float16)
        raw[..., at : at + 2] = half[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_taking_blocks_apart_loses_nothing(kind):
    raw = random_blocks(kind)
    parts = [None if part is None else torch.from_numpy(part) for part in split(kind.name, raw)]
    assert np.array_equal(dequantise(Packed(*parts)).numpy(), gguf.quants.dequantize(raw, kind))


def test_a_matrix_whose_minima_fp16_cannot_hold_is_not_kept_packed(tmp_path):
    """Q4_0's minimum is -8 scales."""
    tensors = hf_tensors("llama", True)
    tensors["blk.0.ffn_up.weight"] *= 1e5
    write_gguf(tmp_path / "m.gguf", kind=Type.Q4_0, tensors=tensors)
    bits = stored_bits(resolve(str(tmp_path / "m.gguf"), tmp_path / "cache").packed())
    assert "model.layers.0.mlp.up_proj" not in bits and "model.layers.0.mlp.gate_proj" in bits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_the_packed_file_means_what_the_dequantised_one_says(tmp_path, kind, tied):
    write_gguf(tmp_path / "m.gguf", kind=kind, tied=tied)
    files = resolve(str(tmp_path / "m.gguf"), tmp_path / "cache")
    dense, packed = load_file(files.weights[0]), load_file(files.packed())
    bits = stored_bits(files.packed())
    names = {name.removesuffix(".weight") for name, t in dense.items() if t.dim() == 2}
    assert set(bits) == names - {"model.embed_tokens"} | {"lm_head"}  # look-ups are of the dense embedding
    assert set(bits.values()) == {8 if kind is Type.Q8_0 else 4}
    for module in bits:
        found = dequantise(Packed(*(packed.get(f"{module}.{part}") for part in ("codes", "scales", "minima"))))
        expected = dense["model.embed_tokens.weight" if tied and module == "lm_head" else f"{module}.weight"]
        assert torch.equal(found, expected), module


@needs_kernels
@pytest.mark.parametrize(("arch", "tied"), [("llama", True), ("qwen2", False), ("qwen3", True)])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_in_fp32_the_packed_model_is_the_dequantised_one(tmp_path, monkeypatch, arch, tied, kind):
    """Users get no packed weights in fp32 unless they ask; here it shows that every layer has its own codes."""
    write_gguf(tmp_path / "m.gguf", arch, kind, tied=tied)
    path, cache = str(tmp_path / "m.gguf"), tmp_path / "cache"
    expected = load_model(path, torch.float32, "cpu", cache_dir=cache)
    monkeypatch.setattr(sys.modules["minivllm.loading.load"], "choose", lambda *a: Choice("kept", "for this test"))
    found = load_model(path, torch.float32, "cpu", cache_dir=cache)
    assert (expected.quantization[0], found.quantization[0], found.linear[0]) == ("none", "kept", "packed")
    assert isinstance(found.model.layers[1].attention.qkv.method, KeptPacked)
    torch.testing.assert_close(  # fp32 sums in another order, as in test_gguf.py
        logits_of(found.model, IDS), logits_of(expected.model, IDS), rtol=0, atol=2e-4
    )


@needs_kernels
@pytest.mark.parametrize("dense_copy", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_in_bf16_packed_weights_are_not_further_from_the_truth_than_dense_ones(tmp_path, kind, dense_copy):
    """The truth: the de-quantised model in fp32. bf16 activations are in both; only the dense ones round weights."""
    write_gguf(tmp_path / "m.gguf", kind=kind)
    path, cache = str(tmp_path / "m.gguf"), tmp_path / "cache"

    def error(**options):
        loaded = load_model(path, torch.bfloat16, "cpu", cache_dir=cache, **options)
        return (logits_of(loaded.model, IDS) - truth).pow(2).mean().sqrt(), loaded

    truth = logits_of(load_model(path, torch.float32, "cpu", cache_dir=cache).model, IDS)
    (dense, plain), (packed, kept) = error(quantization="none"), error(dense_copy=dense_copy)
    assert (plain.quantization[0], kept.quantization[0]) == ("none", "kept")
    assert packed <= 1.25 * dense
    if not dense_copy:  # with a copy, a prompt of this length is computed with it
        assert packed < 0.02 * truth.std()


@needs_kernels
def test_other_types_are_dequantised(tmp_path):
    write_gguf(tmp_path / "m.gguf", kind=Type.Q5_1)
    loaded = load_model(str(tmp_path / "m.gguf"), torch.bfloat16, "cpu", cache_dir=tmp_path / "cache")
    assert loaded.quantization[0] == "none" and "no weight" in loaded.quantization[1]


@needs_kernels
def test_a_truncated_packed_file_is_named(tmp_path):
    write_gguf(tmp_path / "m.gguf", kind=Type.Q4_1)
    files = resolve(str(tmp_path / "m.gguf"), tmp_path / "cache")
    path = files.packed()
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"packed\.safetensors: truncated or corrupt"):
        load_model(str(tmp_path / "m.gguf"), torch.bfloat16, "cpu", cache_dir=tmp_path / "cache")


def test_fp32_and_none_never_make_the_packed_file(tmp_path):
    write_gguf(tmp_path / "m.gguf", kind=Type.Q4_1)
    load_model(str(tmp_path / "m.gguf"), torch.float32, "cpu", cache_dir=tmp_path / "cache")
    load_model(str(tmp_path / "m.gguf"), torch.bfloat16, "cpu", cache_dir=tmp_path / "cache", quantization="none")
    assert not [p for p in (tmp_path / "cache").iterdir() if p.name.startswith("packed")]
