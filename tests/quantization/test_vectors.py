"""Rule: of every weight format, a dense weight has its own library's bits, and a packed one is the same number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantization.vectors import names, vectors

from minivllm.kernels.cpu import blocks as kernels
from minivllm.kernels.cpu.blocks import BlockMatrix
from minivllm.layers.stored import ANY
from minivllm.quantization import mxfp4
from minivllm.quantization.gguf import dequantise

needs_kernels = pytest.mark.skipif(kernels.unsupported_reason() is not None, reason=str(kernels.unsupported_reason()))
every_case = pytest.mark.parametrize(("format", "case"), names())


@every_case
def test_a_dense_weight_has_the_librarys_bits(format, case):
    _, scheme, held, expected = vectors(format)[case]
    found = scheme.dequantise(held, expected.dtype)
    assert found.dtype == expected.dtype and torch.equal(found, expected)


@every_case
def test_the_declared_tensors_are_the_files(format, case):
    _, scheme, held, expected = vectors(format)[case]
    specs = {spec.name: spec for spec in scheme.tensors(*expected.shape)}
    assert {name for name, spec in specs.items() if not spec.optional} <= held.keys() <= specs.keys()
    for name, tensor in held.items():
        sizes = zip(specs[name].shape, tensor.shape, strict=True)
        assert all(asked in (ANY, size) for asked, size in sizes), name
        assert tensor.dtype == specs[name].dtype or (specs[name].dtype is None and tensor.is_floating_point()), name


@needs_kernels
@every_case
def test_blocks_have_the_same_weights_before_they_are_rounded(format, case):
    """A block's product of code and scale is not rounded: rounded to the library's dtype it is the library's."""
    _, scheme, held, expected = vectors(format)[case]
    kind, blocks = scheme.kind(expected.shape[1]), scheme.blocks(held)
    if blocks is None:
        return
    exact = dequantise(blocks)
    assert blocks.kind == kind and torch.equal(exact.to(expected.dtype), expected)
    x = torch.randn(3, expected.shape[1], generator=torch.Generator().manual_seed(0))
    product = x.double() @ exact.double().T  # inputs are rounded to 15 bits
    bound = 2**-14 * x.abs().max() * exact.abs().sum(1)
    assert ((BlockMatrix([blocks], expected.shape[1])(x).double() - product).abs() <= bound).all()


def packed_cases(format: str) -> set[str]:
    return {case for case, (_, scheme, held, _) in vectors(format).items() if scheme.blocks(held) is not None}


def test_what_is_packed_of_gptq():
    """All but groups of 16, act-order, and 8 bits whose zero points take q - zero out of a byte."""
    dense = {"gptq_4_16_symmetric", "gptq_8_32_asymmetric", "gptq_v2_8_32_asymmetric"}
    act_order = {"gptq_3_act_order", "gptq_4_act_order"}
    assert vectors("gptq").keys() - packed_cases("gptq") == dense | act_order


def test_what_is_packed_of_awq():
    assert vectors("awq").keys() - packed_cases("awq") == {"16_asymmetric"}


def test_mxfp4_is_packed_where_fp16_has_its_powers_of_two():
    assert packed_cases("mxfp4") == {"small"}


def test_experts_of_one_tensor_are_handed_out_by_the_names_that_their_scheme_declares():
    blocks, scales = torch.arange(2 * 4 * 1 * 16).view(2, 4, 1, 16), torch.arange(2 * 4).view(2, 4, 1)
    prefix, file = "model.layers.3.mlp.experts", Path("model.safetensors")
    given = [(f"{prefix}.down_proj_{part}", tensor, file) for part, tensor in (("blocks", blocks), ("scales", scales))]
    found = {name: tensor for name, tensor, _ in mxfp4.by_expert([*given, ("x", scales, file)])}
    assert list(found) == [*(f"{prefix}.{e}.down_proj.{part}" for part in ("blocks", "scales") for e in range(2)), "x"]
    assert torch.equal(found[f"{prefix}.1.down_proj.blocks"], blocks[1])
    assert torch.equal(found[f"{prefix}.1.down_proj.scales"], scales[1])


def test_what_is_packed_of_llm_compressor():
    """Asymmetric codes of 8 bits with q - zero beyond a byte, and all floats but MXFP4, are not."""
    packed = {"w8a16", "w8a16_channel", "w2a16", "w8a8_channel", "w8a8_tensor", "w8a8_group", "mxfp4"}
    assert packed_cases("llm_compressor") == packed


def test_what_is_packed_of_hqq():
    """Whole zero points, and groups of a multiple of 32 neighbours."""
    assert packed_cases("hqq") == {"4_32_axis_1_whole"}
