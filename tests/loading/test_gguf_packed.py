"""Rule: what is kept packed is the file's matrix, block for block, and the model that computes with it the same model.

The truth is the model with de-quantised weights in fp32, whose numbers are what the `gguf` package decodes (test_gguf).
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from loading.gguf_fixture import WIDE, hf_tensors, random_blocks, write_gguf
from naive_attention import logits_of
from tolerances import rounded_inputs

from minivllm import LLM, SamplingParams
from minivllm.compile.opaque import is_opaque, name_of
from minivllm.compile.trace import skeleton, trace
from minivllm.errors import ModelError
from minivllm.kernels.cpu import blocks as kernels
from minivllm.kernels.cpu.blocks import Blocks
from minivllm.layers.embedding import BlockEmbedding, Embedding
from minivllm.loading import load_model, resolve
from minivllm.loading.gguf_weights import GGUFWeights
from minivllm.quantization.formats import STORED_BITS, dequantise, from_blocks
from minivllm.quantization.packed import TRITON, KeptPacked

needs_kernels = pytest.mark.skipif(kernels.unsupported_reason() is not None, reason=str(kernels.unsupported_reason()))
KINDS = [Type[name] for name in kernels.KINDS]
SPLIT = [Type[name] for name in STORED_BITS]
IDS = list(range(3, 43))


def mixed(*kinds: Type):
    """A kind for each matrix in turn, so that the parts of stacked layers differ."""
    given: dict[str, Type] = {}
    return lambda name: given.setdefault(name, kinds[len(given) % len(kinds)])


def load(path: Path, dtype=torch.float32, **options):
    """As an engine does whose dtype is left to the machine."""
    options = {"cache_dir": path.parent / "cache", "dtype_asked": False, **options}
    return load_model(str(path), dtype, "cpu", **options)


def rms(x: torch.Tensor) -> float:
    return float(x.double().pow(2).mean().sqrt())


def assert_same_model(found, expected) -> None:
    found, expected = logits_of(found.model, IDS), logits_of(expected.model, IDS)
    assert rms(found - expected) <= rounded_inputs(2 * 4 + 1) * rms(expected)


@pytest.mark.parametrize("kind", SPLIT, ids=lambda k: k.name)
def test_taking_blocks_apart_loses_nothing(kind):
    raw = random_blocks(kind, 16, 128, np.random.default_rng(0))
    packed = from_blocks([Blocks(kind.name, torch.from_numpy(part)) for part in np.split(raw, 2)])
    assert np.array_equal(dequantise(packed).numpy(), gguf.quants.dequantize(raw, kind))


def test_a_matrix_of_two_kinds_with_equal_bits_is_taken_apart_as_one():
    rng = np.random.default_rng(0)
    parts = [
        (kind, random_blocks(kind, rows, 128, rng)) for kind, rows in ((Type.Q4_0, 5), (Type.Q4_1, 16), (Type.Q4_0, 1))
    ]
    packed = from_blocks([Blocks(kind.name, torch.from_numpy(rows)) for kind, rows in parts])
    expected = np.concatenate([gguf.quants.dequantize(rows, kind) for kind, rows in parts])
    assert np.array_equal(dequantise(packed).numpy(), expected)


@needs_kernels
def test_a_matrix_whose_minima_fp16_cannot_hold_is_multiplied_as_it_is_stored(tmp_path):
    """Q4_0's minimum is -8 scales: the form with minima, which a GPU's kernel reads, does not hold it."""
    tensors = hf_tensors("llama", True)
    tensors["blk.0.ffn_up.weight"] *= 1e5
    tensors["blk.0.ffn_down.weight"] /= 1e5
    write_gguf(tmp_path / "m.gguf", kind=Type.Q4_0, tensors=tensors)
    found = load(tmp_path / "m.gguf")
    assert found.quantised.left.total() == 0
    assert_same_model(found, load(tmp_path / "m.gguf", dtype_asked=True))
    files = resolve(str(tmp_path / "m.gguf"), tmp_path / "cache")
    weights = GGUFWeights(files.weights[0], files.folder)
    places = (weights.matrices()[f"model.layers.0.mlp.{part}_proj"] for part in ("up", "gate"))
    large, other = map(weights.blocks, places)
    assert TRITON.takes([other]) and not TRITON.takes([other, large])


@needs_kernels
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_every_layer_keeps_its_own_rows_of_the_file(tmp_path, kind, tied):
    """q and k in the order of Hugging Face, though the file has them reordered."""
    expected = write_gguf(tmp_path / "m.gguf", kind=kind, tied=tied, **WIDE)
    found = load(tmp_path / "m.gguf")
    assert (found.quantization[0], found.linear[0]) == ("kept", "packed")
    layer = found.model.layers[1]
    of = {
        layer.attention.qkv: ("blk.1.attn_q", "blk.1.attn_k", "blk.1.attn_v"),
        layer.attention.o: ("blk.1.attn_output",),
        layer.mlp.gate_up: ("blk.1.ffn_gate", "blk.1.ffn_up"),
        layer.mlp.down: ("blk.1.ffn_down",),
        found.model.lm_head: ("token_embd" if tied else "output",),
    }
    for linear, names in of.items():
        assert isinstance(linear.method, KeptPacked) and linear.weight is None and linear.held is None
        weight = np.concatenate([expected[f"{name}.weight"] for name in names])
        found_weight = linear.matrix(torch.eye(linear.matrix.n_in)).T - (
            0 if linear.bias is None else linear.bias[:, None]
        )
        np.testing.assert_allclose(found_weight, weight, rtol=0, atol=1e-5)  # weights below 1; a one is not rounded
    ids = torch.tensor([5, 0, 5, 200])
    rows = found.model.embedding(ids)
    np.testing.assert_array_equal(rows, expected["token_embd.weight"][ids])


@needs_kernels
@pytest.mark.parametrize(("arch", "tied"), [("llama", True), ("qwen2", False), ("qwen2", True), ("qwen3", True)])
@pytest.mark.parametrize(
    "kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0, Type.Q5_0, Type.Q4_K, Type.IQ4_XS], ids=lambda k: k.name
)
def test_in_fp32_the_packed_model_is_the_dequantised_one(tmp_path, arch, tied, kind):
    write_gguf(tmp_path / "m.gguf", arch, kind, tied=tied, **WIDE)
    expected, found = load(tmp_path / "m.gguf", dtype_asked=True), load(tmp_path / "m.gguf")
    assert (expected.quantization[0], found.quantization[0], found.linear[0]) == ("none", "kept", "packed")
    assert (type(expected.model.embedding), type(found.model.embedding)) == (Embedding, BlockEmbedding)
    assert_same_model(found, expected)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("arch", "tied"), [("llama", False), ("qwen2", True)])
@pytest.mark.parametrize(
    "kinds",
    [(Type.Q4_K, Type.Q6_K, Type.Q5_0, Type.Q8_0), (Type.Q3_K, Type.Q2_K, Type.Q5_K), tuple(KINDS)],
    ids=["as Q4_K_M", "as Q2_K", "all"],
)
def test_kinds_that_differ_within_a_layer_stay_as_they_are(tmp_path, arch, tied, kinds, dtype):
    write_gguf(tmp_path / "m.gguf", arch, mixed(*kinds), tied=tied, **WIDE)
    expected, found = load(tmp_path / "m.gguf", dtype_asked=True), load(tmp_path / "m.gguf", dtype)
    assert found.quantised.left.total() == 0 and set(found.quantised.counts) == {kind.name for kind in kinds}
    if dtype is torch.float32:
        assert_same_model(found, expected)
    else:  # what activations in bf16 cost without any packing
        dense = load(tmp_path / "m.gguf", dtype, quantization="none")
        truth = logits_of(expected.model, IDS)
        assert rms(logits_of(found.model, IDS) - truth) <= 1.25 * rms(logits_of(dense.model, IDS) - truth)


@needs_kernels
@pytest.mark.parametrize("dense_copy", [True, False])
@pytest.mark.parametrize("kind", SPLIT, ids=lambda k: k.name)
def test_in_bf16_packed_weights_are_not_further_from_the_truth_than_dense_ones(tmp_path, kind, dense_copy):
    """bf16 activations are in both; only the dense ones round weights."""
    write_gguf(tmp_path / "m.gguf", kind=kind)

    def error(**options):
        loaded = load(tmp_path / "m.gguf", torch.bfloat16, **options)
        return rms(logits_of(loaded.model, IDS) - truth), loaded

    truth = logits_of(load(tmp_path / "m.gguf", dtype_asked=True).model, IDS)
    (dense, plain), (packed, kept) = error(quantization="none"), error(dense_copy=dense_copy)
    assert (plain.quantization[0], kept.quantization[0]) == ("none", "kept")
    assert packed <= 1.25 * dense
    if not kept.quantised.is_dual:  # with a copy, a prompt of this length is computed with it
        assert packed < 0.02 * truth.std()


@needs_kernels
def test_what_no_kernel_multiplies_is_dequantised_and_told(tmp_path):
    """With gguf's own decoder. A layer is packed whole or not at all."""
    kinds = {"attn_v": Type.IQ2_XXS, "ffn_down": Type.F16, "token_embd": Type.IQ2_XXS}
    write_gguf(tmp_path / "m.gguf", kind=lambda name: kinds.get(name.split(".")[-2], Type.Q4_K), tied=False, **WIDE)
    expected, found = load(tmp_path / "m.gguf", dtype_asked=True), load(tmp_path / "m.gguf")
    assert found.linear == ("packed", "7 in Q4_K, 2 dense (F16), 6 dense (IQ2_XXS in a layer of 3)")
    assert isinstance(found.model.embedding, Embedding) and found.model.layers[0].mlp.down.weight is None
    assert_same_model(found, expected)


@needs_kernels
@pytest.mark.parametrize("kind", [Type.F16, Type.IQ2_XXS], ids=lambda k: k.name)
def test_other_types_are_dequantised(tmp_path, kind):
    write_gguf(tmp_path / "m.gguf", kind=kind, **WIDE)
    loaded = load(tmp_path / "m.gguf", torch.bfloat16)
    assert loaded.quantization[0] == "none" and "no weight" in loaded.quantization[1]
    assert isinstance(loaded.model.embedding, Embedding)


def test_a_type_that_nobody_decodes_is_named(tmp_path):
    write_gguf(tmp_path / "m.gguf", kind=Type.Q8_0)
    files = resolve(str(tmp_path / "m.gguf"), tmp_path / "cache")
    index = files.folder / "tensors.json"
    index.write_text(index.read_text().replace('"Q8_0"', '"I8"'))
    with pytest.raises(ModelError, match=r'm\.gguf: tensor ".*" has type I8, which cannot be dequantised'):
        load(tmp_path / "m.gguf")


def test_a_file_that_was_cut_after_it_was_described_is_named(tmp_path):
    write_gguf(tmp_path / "m.gguf", kind=Type.Q4_1)
    files = resolve(str(tmp_path / "m.gguf"), tmp_path / "cache")
    path = tmp_path / "cut.gguf"
    path.write_bytes((tmp_path / "m.gguf").read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"cut\.gguf: truncated: tensor \"model\..* ends at byte"):
        GGUFWeights(path, files.folder)


@needs_kernels
@pytest.mark.parametrize("options", [{}, {"dtype_asked": True}, {"quantization": "none"}, {"quantization": "int4"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_weight_is_written_to_the_cache(tmp_path, dtype, options):
    write_gguf(tmp_path / "m.gguf", kind=Type.Q4_1)
    load(tmp_path / "m.gguf", dtype, **options)
    names = ["config.json", "generation_config.json", "tensors.json", "tokenizer.json", "tokenizer_config.json"]
    names.append("unknown_keys.json")
    assert (
        sorted(path.name for path in (tmp_path / "cache").rglob("*.*") if path.is_file() and path.suffix != ".lock")
        == names
    )


@needs_kernels
def test_a_matrix_of_another_shape_than_the_models_is_named(tmp_path):
    tensors = hf_tensors("llama", True, **WIDE)
    tensors["blk.1.ffn_up.weight"] = tensors["blk.1.ffn_up.weight"][:-32]
    write_gguf(tmp_path / "m.gguf", tensors=tensors, **WIDE)
    for options in ({}, {"dtype_asked": True}):
        with pytest.raises(
            ModelError, match=r"up_proj\.weight\" has shape \[480, 256\], config\.json asks for \[512, 256\]"
        ):
            load(tmp_path / "m.gguf", **options)


@needs_kernels
def test_a_missing_matrix_is_named_where_the_others_are_packed(tmp_path):
    tensors = hf_tensors("llama", True)
    del tensors["blk.1.ffn_up.weight"]
    write_gguf(tmp_path / "m.gguf", tensors=tensors)
    with pytest.raises(ModelError, match=r"1 tensors are missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path / "m.gguf")


MEMORY = """
import sys, torch
from minivllm.loading import load_model

def anonymous():
    with open("/proc/self/smaps_rollup") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("Anonymous:"))

load_model({warm!r}, torch.float32, "cpu", cache_dir={cache!r}, dtype_asked=False)  # imports, threads, compiled kernels
before = anonymous()
loaded = load_model({path!r}, torch.float32, "cpu", cache_dir={cache!r}, dtype_asked=False)
ids = torch.arange(8)
loaded.model.logits(loaded.model.embedding(ids))
print(anonymous() - before)
"""


@needs_kernels
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the kernel tells what memory is made of")
@pytest.mark.parametrize("tied", [True, False])
def test_memory_is_at_most_the_file_and_some(tmp_path, tied):
    """Of a file of some 60 MB: what is multiplied is repacked, what is looked up stays in the file."""
    import subprocess
    import sys

    shape = {"head_size": 256, "hidden": 1024, "ffn": 14_336}
    kinds = {"attn_v": Type.Q6_K, "ffn_down": Type.Q6_K, "token_embd": Type.Q6_K, "output": Type.Q6_K}
    path = tmp_path / "m.gguf"
    write_gguf(path, "qwen2", lambda name: kinds.get(name.split(".")[-2], Type.Q4_K), tied=tied, decode=False, **shape)
    write_gguf(tmp_path / "warm.gguf", "qwen2", Type.Q4_K, **WIDE)
    assert 55e6 < path.stat().st_size < 75e6
    code = MEMORY.format(path=str(path), warm=str(tmp_path / "warm.gguf"), cache=str(tmp_path / "cache"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(re.fullmatch(r"(\d+)\n", done.stdout)[1]) <= 1.15 * path.stat().st_size


@needs_kernels
def test_a_trace_holds_the_products_as_operations(tmp_path):
    """Where the forward is compiled, they are called between its pieces; tokens are looked up before it."""
    write_gguf(tmp_path / "m.gguf", kind=mixed(Type.Q4_K, Type.Q6_K), **WIDE)
    graph = trace(skeleton(load(tmp_path / "m.gguf").model)).graph.graph
    called = Counter(name_of(node.target) for node in graph.nodes if is_opaque(node.target))
    assert called == {"linear": 2 * 4, "attend": 2}


@needs_kernels
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_fused_and_eager_forwards_give_the_same_tokens(tmp_path, dtype):
    """With the look-up, the stack and the LM head on kinds that differ."""
    write_gguf(tmp_path / "m.gguf", "qwen2", mixed(Type.Q4_K, Type.Q6_K, Type.Q5_0), **WIDE)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = {}
    for forward in ("eager", "fused"):
        with LLM(str(tmp_path / "m.gguf"), dtype=dtype, overrides={"runner.forward": forward}) as llm:
            chosen = {d.field: d for d in llm.decisions}
            assert chosen["model.quantization"].value == "kept"
            if forward == "fused":
                assert chosen["runner.forward"].value == "fused"
            outputs = llm.generate([IDS, IDS[:7]], params, use_tqdm=False)
            found[forward] = [output.outputs[0].token_ids for output in outputs]
    assert found["fused"] == found["eager"] and all(len(tokens) == 12 for tokens in found["fused"])
