"""Rule: of a compressed-tensors checkpoint, a dense weight has the library's own bits, and a packed one its codes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tolerances import rounded_inputs

from minivllm.errors import ModelError
from minivllm.kernels.cpu import blocks as kernels
from minivllm.layers.embedding import LMHead
from minivllm.layers.experts import Experts
from minivllm.layers.linear import Linear
from minivllm.loading import load_model
from minivllm.loading.dummy import hf_config, write_tokenizer
from minivllm.loading.dummy_weights import fill
from minivllm.models import MODELS, read_spec
from minivllm.quantization.base import read_format
from minivllm.quantization.compressed_tensors import PackQuantized
from minivllm.quantization.gguf import dequantise
from minivllm.quantization.packed import KeptPacked

VECTORS = Path(__file__).parent / "data" / "compressed_tensors.safetensors"  # by make_compressed_tensors.py
needs_kernels = pytest.mark.skipif(kernels.unsupported_reason() is not None, reason=str(kernels.unsupported_reason()))
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}

FP4 = WEIGHTS | {"num_bits": 4, "type": "float"}


def config_of(weights=WEIGHTS, targets=("Linear",), **others):
    groups = {"group_0": {"targets": list(targets), "weights": weights, "input_activations": None}}
    plain = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    return {"quantization_config": plain | {"config_groups": groups, "ignore": ["lm_head"]} | others}


@cache
def vectors():
    """{case: (scheme, its tensors, what the library makes of them)}."""
    with safe_open(VECTORS, "pt") as file:
        assert file.metadata()["made_by"] == "compressed-tensors 0.20.0"
        found = {}
        for name, weights in json.loads(file.metadata()["arguments"]).items():
            tensors = {k.split(".")[1]: file.get_tensor(k) for k in file.keys() if k.startswith(f"{name}.")}  # noqa: SIM118
            expected = tensors.pop("expected")
            found[name] = read_format(config_of(weights)).scheme_for("x"), tensors, expected
    return found


CASES = list(vectors())


@pytest.mark.parametrize("case", CASES)
def test_a_dense_weight_has_the_librarys_bits(case):
    scheme, held, expected = vectors()[case]
    found = scheme.dequantise(held, torch.float32)
    assert found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("case", CASES)
def test_the_declared_tensors_are_the_files(case):
    scheme, held, expected = vectors()[case]
    specs = scheme.tensors(*expected.shape)
    declared = {spec.name: (spec.shape, spec.dtype or held[spec.name].dtype) for spec in specs if not spec.optional}
    assert declared == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()}


@needs_kernels
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("group_8", "asymmetric_channel")])
def test_blocks_have_the_same_weights_before_they_are_rounded(case):
    """(q - zero) * scale takes 13 bits and more; the library rounds it to the scale's dtype, blocks do not."""
    scheme, held, expected = vectors()[case]
    blocks = scheme.blocks(held)
    assert blocks.kind == scheme.kind(expected.shape[1]) == ("Q4_0" if scheme.symmetric else "Q5_0")
    exact = dequantise(blocks)
    assert torch.equal(exact.to(expected.dtype), expected)
    wide = {name: tensor.double() if name == "weight_scale" else tensor for name, tensor in held.items()}
    assert torch.equal(exact.double(), scheme.dequantise(wide, torch.float64))


def test_what_fits_no_block_is_not_made_one():
    scheme, held, expected = vectors()["asymmetric_channel"]  # of scales in fp32
    assert scheme.kind(expected.shape[1]) == "Q5_0" and scheme.blocks(held) is None
    assert PackQuantized(8, True).kind(64) is None and PackQuantized(None, True).kind(80) is None


def test_ignore_lists_names_patterns_and_several_groups_are_read_as_the_library_reads_them():
    other = {"group_1": {"targets": ["re:.*down_proj$"], "weights": WEIGHTS | {"group_size": 64}}}
    groups = config_of()["quantization_config"]["config_groups"] | other
    ignore = ["lm_head", "re:.*layers[.]0[.].*", "model.layers.1.mlp.up_proj"]
    format = read_format(config_of(config_groups=groups, ignore=ignore))
    for module, size in {
        **{"lm_head": None, "model.layers.0.mlp.down_proj": None, "model.layers.1.mlp.up_proj": None},
        **{"model.layers.1.mlp.gate_proj": 32, "model.layers.1.mlp.down_proj": 64, "model.layers.1.mlp.up_proj.x": 32},
    }.items():
        scheme = format.scheme_for(module)
        assert (scheme and scheme.group_size) == size, module


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"format": "marlin-24"}, r'format "marlin-24" \(only pack-quantized, int-quantized, float-quantized, '),
        ({"quantization_status": "frozen"}, "quantization_status='frozen'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ({"weights": WEIGHTS | {"num_bits": 3}}, r"num_bits=3 of weights \(only 4, 8, 2\)"),
        ({"format": "int-quantized"}, r"num_bits=4 of weights \(only 8\)"),
        ({"format": "float-quantized"}, r"type='int' of weights \(only 'float'\)"),
        ({"format": "nvfp4-pack-quantized", "weights": FP4}, r"strategy='group' of weights \(only 'tensor_group'\)"),
        ({"format": "mxfp4-pack-quantized", "weights": FP4 | {"group_size": 16}}, "group_size=16"),
        ({"format": "mxfp4-pack-quantized", "weights": FP4 | {"symmetric": False}}, "symmetric=false"),
        ({"weights": WEIGHTS | {"dynamic": True}}, "dynamic=True"),
        ({"weights": WEIGHTS | {"actorder": "group"}}, "actorder='group'"),
        ({"weights": WEIGHTS | {"strategy": "block"}}, "strategy='block'"),
        ({"weights": WEIGHTS | {"group_size": -1}}, "group_size=-1"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_by_name(changes, what):
    with pytest.raises(ModelError, match=rf"config.json: .*{what}.* is not supported; take the plain model"):
        read_format(config_of(**changes))


@pytest.mark.parametrize("given", [{"config_groups": 3}, {"config_groups": {}, "ignore": ["re:("]}, {}])
def test_nonsense_is_a_clear_error(given):
    with pytest.raises(ModelError, match="quantization_config is missing or of the wrong kind"):
        read_format({"quantization_config": {"quant_method": "compressed-tensors"} | given})


def test_a_format_that_nobody_reads_is_named():
    with pytest.raises(ModelError, match=r'the checkpoint is quantised \("odd"\).*Supported: .*compressed-tensors'):
        read_format({"quantization_config": {"quant_method": "odd"}})
    assert read_format({}) is None


def pack(codes: torch.Tensor) -> torch.Tensor:
    words = (codes.to(torch.int64) + 8).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    return words.sum(-1).to(torch.uint32).view(torch.int32)


def write_checkpoint(
    folder: Path, shape: str, symmetric: bool = True, group_size: int = 32, dense: torch.dtype | None = None
) -> None:
    """A dummy's shape with W4A16 weights; dense: a plain checkpoint of the same, (q - zero) * scale in this dtype."""
    config = hf_config(shape)
    model = MODELS.get(config["architectures"][0])(read_spec(config), torch.bfloat16, torch.device("cpu"))
    fill(model, 0)
    scheme, tensors = PackQuantized(group_size, symmetric), {}
    packed = {name for name, place in model.checkpoint_modules().items() if is_packed(model, name, place[0])}
    for name, tensor in model.checkpoint_tensors().items():
        module = name.removesuffix(".weight")
        held = quantised(tensor, scheme) if module in packed else {"weight": tensor.clone()}
        if module in packed and dense:
            held |= {"weight_scale": held["weight_scale"].to(dense)}
            held = {"weight": scheme.dequantise(held, torch.float32)}
        tensors |= {f"{module}.{kind}": value for kind, value in held.items()} if name != module else {name: tensor}
    weights = WEIGHTS | {"symmetric": scheme.symmetric, "group_size": scheme.group_size}
    named = {} if dense else config_of(weights, ignore=["lm_head", "re:.*mlp[.]gate$"])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | named))
    write_tokenizer(folder, config["vocab_size"])
    save_file(tensors, folder / "model.safetensors")


def is_packed(model, name, ours) -> bool:
    module = model.get_submodule(ours)
    return name != "lm_head" and (isinstance(module, Linear) or ours.endswith(("experts.gate_up", "experts.down")))


def quantised(weight: torch.Tensor, scheme: PackQuantized) -> dict[str, torch.Tensor]:
    groups = weight.float().unflatten(1, (-1, scheme.group_size))
    low, high = groups.aminmax(dim=-1)
    scales = ((groups.abs().amax(-1) / 7) if scheme.symmetric else (high - low) / 15).bfloat16()
    zeros = torch.zeros_like(scales) if scheme.symmetric else (-8 - low / scales.float()).round().clamp(-8, 7)
    codes = (groups / scales.float()[..., None] + zeros.float()[..., None]).round().clamp(-8, 7).flatten(1)
    held = {"weight_packed": pack(codes), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    return held | ({} if scheme.symmetric else {"weight_zero_point": pack(zeros.T).T.contiguous()})


@needs_kernels
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_model_is_the_dequantised_one_dense_and_packed(tmp_path, symmetric):
    from naive_attention import logits_of

    write_checkpoint(tmp_path / "w4a16", "tiny-short", symmetric)
    write_checkpoint(tmp_path / "rounded", "tiny-short", symmetric, dense=torch.bfloat16)
    write_checkpoint(tmp_path / "exact", "tiny-short", symmetric, dense=torch.float32)
    dense = load_model(str(tmp_path / "w4a16"), torch.float32, "cpu")
    packed = load_model(str(tmp_path / "w4a16"), torch.float32, "cpu", dtype_asked=False)
    rounded, exact = (load_model(str(tmp_path / name), torch.float32, "cpu").model for name in ("rounded", "exact"))
    assert (dense.quantization[0], packed.quantization[0]) == ("none", "kept")
    assert "compressed-tensors: model.dtype=float32" in dense.quantization[1]
    kind = "Q4_0" if symmetric else "Q5_0"
    assert packed.linear[1] == f"14 in {kind}, 1 dense (not packed in the file)"  # q, k, v, o, gate, up, down; the head
    assert all(isinstance(layer.attention.qkv.method, KeptPacked) for layer in packed.model.layers)
    assert type(packed.model.lm_head) is LMHead and not isinstance(packed.model.lm_head.method, KeptPacked)
    ids = list(range(20))
    assert torch.equal(logits_of(dense.model, ids), logits_of(rounded, ids))
    expected = logits_of(exact, ids)
    error = (logits_of(packed.model, ids) - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert error <= rounded_inputs(4 * 2 + 1)


@needs_kernels
def test_a_group_that_no_block_holds_is_dense_and_said_to_be(tmp_path):
    write_checkpoint(tmp_path / "w4a16", "tiny-short", group_size=16)
    found = load_model(str(tmp_path / "w4a16"), torch.bfloat16, "cpu")
    assert found.quantised is None and found.quantization[0] == "none" and "no block" in found.quantization[1]


@needs_kernels
def test_experts_are_dequantised_by_the_same_seam(tmp_path):
    from naive_attention import logits_of

    write_checkpoint(tmp_path / "w4a16", "tiny-moe", group_size=16)
    write_checkpoint(tmp_path / "dense", "tiny-moe", group_size=16, dense=torch.bfloat16)
    found, plain = (load_model(str(tmp_path / name), torch.float32, "cpu") for name in ("w4a16", "dense"))
    stacks = [[m.gate_up.weight for m in loaded.model.modules() if isinstance(m, Experts)] for loaded in (found, plain)]
    assert stacks[0] and all(torch.equal(a, b) for a, b in zip(*stacks, strict=True))
    assert torch.equal(logits_of(found.model, [1, 2, 3]), logits_of(plain.model, [1, 2, 3]))


def test_a_missing_scale_and_a_wrong_dtype_are_named(tmp_path):
    write_checkpoint(tmp_path / "w4a16", "tiny-short")
    path = tmp_path / "w4a16" / "model.safetensors"
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    name = "model.layers.1.mlp.down_proj.weight_scale"
    save_file({k: v for k, v in tensors.items() if k != name}, path)
    with pytest.raises(ModelError, match=f"1 tensors are missing: {name}"):
        load_model(str(tmp_path / "w4a16"), torch.float32, "cpu")
    name = name.replace("scale", "packed")
    save_file(tensors | {name: tensors[name].to(torch.int64)}, path)
    with pytest.raises(ModelError, match=rf'"{name}" is int64, and must be int32'):
        load_model(str(tmp_path / "w4a16"), torch.float32, "cpu")
