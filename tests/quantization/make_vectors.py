"""Make data/FORMAT.safetensors: matrices quantised and de-quantised by a format's own library, for test_vectors.py.

    python tests/quantization/make_vectors.py gptq tests/quantization/data/gptq.safetensors

in an environment that has the library: the file names it, and the version that made it. A case has a
quantization_config, the tensors of a matrix as a checkpoint keeps them, and `expected` [n_out, n_in].
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


class Case(NamedTuple):
    config: dict[str, Any]
    held: dict[str, Tensor]
    expected: Tensor


def weight_of(n_out: int, n_in: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n_out, n_in, generator=torch.Generator().manual_seed(seed)).mul_(0.05).add_(0.01).to(dtype)


def linear_of(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight
    return linear


def integer_parameters(weight: Tensor, bits: int, size: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scales, which fp16 holds, and zero points from 1 on, [n_out, groups]: version 1 cannot store a 0."""
    groups, top = weight.unflatten(1, (-1, size)), 2**bits - 1
    low, high = groups.aminmax(dim=-1)
    scales = (2 * groups.abs().amax(-1) if symmetric else high - low).div(top).half().float()
    zeros = torch.full_like(scales, 2 ** (bits - 1)) if symmetric else (-low / scales).round().clamp(1, top)
    return scales, zeros


def made_by_forward(module: nn.Module, n_in: int) -> Tensor:
    """[n_out, n_in]: products with the columns of the identity are exact."""
    return module(torch.eye(n_in, dtype=torch.float16)).view(n_in, -1).T.contiguous()


def gptq() -> tuple[str, dict[str, Case]]:
    """By auto-round's copy of AutoGPTQ's layer, which packs and multiplies; its -zp file is version 1."""
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    cases = {}
    for seed, (bits, size, symmetric, version_, n_in) in enumerate(
        [
            *((bits, 32, False, "gptq", 64) for bits in (2, 3, 4, 5, 6, 7, 8)),
            *((bits, 32, True, "gptq", 64) for bits in (2, 3, 4, 8)),
            *((bits, 32, False, "gptq_v2", 64) for bits in (3, 4, 8)),
            (4, 16, True, "gptq", 64),
            (4, -1, True, "gptq", 64),
        ]
    ):
        weight = weight_of(32, n_in, seed)
        module = qlinear_torch_zp if version_ == "gptq" else qlinear_torch
        layer = module.QuantLinear(bits, size, n_in, 32, bias=False)
        layer.device = "cpu"  # one of the two asks for it, and does not set it
        layer.pack(linear_of(weight), *integer_parameters(weight, bits, layer.group_size, symmetric), device="cpu")
        config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric, "desc_act": False}
        held = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        kind = f"{version_}_{bits}_{size}_{'symmetric' if symmetric else 'asymmetric'}"
        cases[kind] = Case(config | {"checkpoint_format": version_}, held, made_by_forward(layer, n_in))
    for bits in (3, 4):  # act-order: the library's own words, whatever groups the inputs are said to be of
        layer = qlinear_torch_zp.QuantLinear(bits, 32, 64, 32, bias=False, g_idx=True)
        weight = weight_of(32, 64, bits)
        layer.pack(linear_of(weight), *integer_parameters(weight, bits, 32, False), device="cpu")
        layer.g_idx = layer.g_idx[torch.randperm(64, generator=torch.Generator().manual_seed(bits))]
        config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": False, "desc_act": True}
        held = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        cases[f"gptq_{bits}_act_order"] = Case(config, held, made_by_forward(layer, 64))
    return "auto-round", cases


def awq() -> tuple[str, dict[str, Case]]:
    """By auto-round's copy of AutoAWQ's layer."""
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM

    cases = {}
    for seed, (size, zero_point) in enumerate([(32, True), (64, True), (32, False), (16, True), (-1, True)]):
        weight, config = weight_of(32, 64, seed), {"quant_method": "awq", "bits": 4, "version": "gemm"}
        scales, zeros = integer_parameters(weight, 4, 64 if size == -1 else size, not zero_point)
        layer = WQLinear_GEMM.from_linear(linear_of(weight), 4, size, scales=scales.T, zeros=zeros.T, device="cpu")
        held = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        config |= {"group_size": size, "zero_point": zero_point}
        cases[f"{size}_{'asymmetric' if zero_point else 'symmetric'}"] = Case(config, held, made_by_forward(layer, 64))
    return "auto-round", cases


def auto_round() -> tuple[str, dict[str, Case]]:
    """The same layers under the names of AutoRound's packing formats."""
    shared, cases = ("bits", "group_size", "sym"), {}
    for name, case in gptq()[1].items():
        if not case.config["desc_act"] and case.config["bits"] in (3, 4):
            packing = {"gptq": "auto_round:auto_gptq", "gptq_v2": "auto_round"}[case.config["checkpoint_format"]]
            cases[name] = case._replace(config={key: case.config[key] for key in shared} | {"packing_format": packing})
    for name, case in awq()[1].items():
        given = {"bits": 4, "group_size": case.config["group_size"], "sym": not case.config["zero_point"]}
        cases[f"awq_{name}"] = case._replace(config=given | {"packing_format": "auto_round:auto_awq"})
    named = {"quant_method": "auto-round", "data_type": "int"}
    return "auto-round", {name: case._replace(config=named | case.config) for name, case in cases.items()}


def fp8() -> tuple[str, dict[str, Case]]:
    """De-quantised by transformers' converter, which takes the blocks' sizes from the scales' number."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    cases = {}
    for seed, (block, dtype) in enumerate(
        [
            ([128, 128], torch.float32),
            ([16, 32], torch.float32),
            ([16, 32], torch.bfloat16),
            ([16, 32], torch.float8_e8m0fnu),
            (None, torch.float32),
        ]
    ):
        n_out, n_in = (128, 128) if block == [128, 128] else (32, 64)
        weight, (rows, columns) = weight_of(n_out, n_in, seed), block or (n_out, n_in)
        blocks = weight.view(n_out // rows, rows, n_in // columns, columns)
        scales = (blocks.abs().amax((1, 3)) / 448).to(dtype)
        codes = (blocks / scales.float()[:, None, :, None]).clamp(-448, 448).view(n_out, n_in).to(torch.float8_e4m3fn)
        scales = scales if block else scales[0, 0]
        wide = torch.float32 if dtype.itemsize == 1 else None
        config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
        expected = Fp8Dequantize(None)._dequantize_one(codes, scales, wide)
        name = f"{'x'.join(map(str, block or ['tensor']))}_{str(dtype).removeprefix('torch.')}"
        cases[name] = Case(config, {"weight": codes, "weight_scale_inv": scales}, expected)
    return "transformers", cases


def mxfp4() -> tuple[str, dict[str, Case]]:
    """An expert of gpt-oss's layout, de-quantised by transformers; every exponent that fp16 can hold, and some more."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator, cases = torch.Generator().manual_seed(0), {}
    for name, low, high in (("small", 110, 125), ("beyond_fp16", 90, 160)):
        codes = torch.randint(0, 256, (1, 32, 2, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(low, high, (1, 32, 2), generator=generator).to(torch.uint8)
        expected = convert_moe_packed_tensors(codes, scales)[0].T.contiguous()
        cases[name] = Case({"quant_method": "mxfp4"}, {"blocks": codes[0], "scales": scales[0]}, expected)
    return "transformers", cases


def llm_compressor() -> tuple[str, dict[str, Case]]:
    """By the compressors of compressed-tensors; 4 bits in words are make_compressed_tensors.py's."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    integers, floats = {"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "float"}
    fp4 = {"num_bits": 4, "type": "float"}
    given = {
        "w8a16": ("pack-quantized", integers | {"strategy": "group", "group_size": 32}),
        "w8a16_channel": ("pack-quantized", integers | {"strategy": "channel"}),
        "w8a16_asymmetric": ("pack-quantized", integers | {"strategy": "group", "group_size": 32, "symmetric": False}),
        "w2a16": ("pack-quantized", {"num_bits": 2, "type": "int", "strategy": "group", "group_size": 32}),
        "w8a8_channel": ("int-quantized", integers | {"strategy": "channel"}),
        "w8a8_asymmetric": ("int-quantized", integers | {"strategy": "channel", "symmetric": False}),
        "w8a8_tensor": ("int-quantized", integers | {"strategy": "tensor"}),
        "w8a8_group": ("naive-quantized", integers | {"strategy": "group", "group_size": 32}),
        "fp8_tensor": ("float-quantized", floats | {"strategy": "tensor"}),
        "fp8_channel": ("float-quantized", floats | {"strategy": "channel"}),
        "fp8_block": ("float-quantized", floats | {"strategy": "block", "block_structure": [16, 24]}),
        "fp8_naive": ("naive-quantized", floats | {"strategy": "channel"}),
        "nvfp4": ("nvfp4-pack-quantized", fp4 | {"strategy": "tensor_group", "group_size": 16}),
        "mxfp4": ("mxfp4-pack-quantized", fp4 | {"strategy": "group", "group_size": 32}),
    }
    cases = {}
    for seed, (name, (layout, arguments)) in enumerate(given.items()):
        args = QuantizationArgs(**{"symmetric": True} | arguments)
        if layout == "nvfp4-pack-quantized":
            args.scale_dtype, args.zp_dtype = torch.float8_e4m3fn, torch.float8_e4m3fn
        if layout == "mxfp4-pack-quantized":
            args.scale_dtype, args.zp_dtype = torch.uint8, torch.uint8
        weight = weight_of(40, 64, seed, torch.bfloat16)
        whole = {"weight_global_scale": generate_gparam(weight.min(), weight.max())} if name == "nvfp4" else {}
        low, high = extremes(weight, arguments)
        scale, zero = calculate_qparams(low, high, args, global_scale=whole.get("weight_global_scale"))
        held = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero} | whole
        scheme, compressor = (
            QuantizationScheme(targets=["Linear"], weights=args),
            BaseCompressor.get_value_from_registry(layout),
        )
        held = compressor.compress(held, scheme)
        expected = compressor.decompress(dict(held), scheme)["weight"]
        group = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}
        config = {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed"}
        cases[name] = Case(config | {"config_groups": {"group_0": group}}, held, expected)
    return "compressed-tensors", cases


def extremes(weight: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The least and the largest number of what shares a scale, in the scales' shape."""
    match arguments["strategy"]:
        case "tensor":
            return weight.amin().view(1), weight.amax().view(1)
        case "block":
            rows, columns = arguments["block_structure"]
            missing = (-weight.shape[1] % columns, -weight.shape[0] % rows)
            blocks = nn.functional.pad(weight, (0, missing[0], 0, missing[1]))
            blocks = blocks.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
            return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.unflatten(1, (-1, arguments.get("group_size") or weight.shape[1]))
    return groups.amin(-1), groups.amax(-1)


def modelopt() -> tuple[str, dict[str, Case]]:
    """By ModelOpt's own tensors."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    weight = weight_of(32, 64)
    whole = weight.abs().amax() / (6 * 448)
    tensor, scales, whole = NVFP4QTensor.quantize(weight, 16, weights_scaling_factor_2=whole)
    given = {"scale": scales, "double_scale": whole, "block_sizes": {-1: 16}}
    held = {"weight": tensor._quantized_data, "weight_scale": scales, "weight_scale_2": whole}
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    cases = {"nvfp4": Case(config, held, tensor.dequantize(torch.float32, **given))}
    tensor, scales = FP8QTensor.quantize(weight)
    held = {"weight": tensor._quantized_data, "weight_scale": scales.float().squeeze()}
    expected = tensor.dequantize(torch.float32, scale=held["weight_scale"])
    return "nvidia-modelopt", cases | {"fp8": Case(config | {"quant_algo": "FP8"}, held, expected)}


def bitsandbytes() -> tuple[str, dict[str, Case]]:
    """By the library's functions, as its layers call them; 300 scales of a nested matrix are more than one block."""
    import bitsandbytes.functional as bnb

    cases = {}
    for seed, (numbers, nested, dtype) in enumerate(
        [
            ("nf4", False, torch.bfloat16),
            ("nf4", True, torch.float16),
            ("fp4", False, torch.float32),
            ("fp4", True, torch.bfloat16),
        ]
    ):
        weight = weight_of(300 if numbers == "nf4" and nested else 24, 64, seed, dtype)
        codes, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=numbers)
        held = {"weight": codes} | {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        config = {"bnb_4bit_quant_type": numbers, "bnb_4bit_use_double_quant": nested, "load_in_4bit": True}
        expected = bnb.dequantize_4bit(codes, state)
        cases[f"{numbers}{'_nested' if nested else ''}"] = Case(
            {"quant_method": "bitsandbytes"} | config, held, expected
        )
    codes, scales, _ = bnb.int8_vectorwise_quant(weight_of(24, 64, dtype=torch.float16))
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
    held = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    cases["int8"] = Case(config, held, bnb.int8_vectorwise_dequant(codes, scales))
    return "bitsandbytes", cases


def hqq() -> tuple[str, dict[str, Case]]:
    """By HQQLinear. Zero points are whole where they are rounded and its optimiser does not run; by default it does."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    cases = {}
    for bits, size, axis, optimised in [
        *((4, 32, 1, True), (4, 64, 0, True), (8, 64, 1, True), (2, 32, 1, True), (3, 64, 1, True), (1, 32, 1, True)),
        *((4, 16, 1, True), (4, 32, 1, False)),
    ]:
        arguments = BaseQuantizeConfig(nbits=bits, group_size=size, axis=axis)
        arguments["weight_quant_params"]["optimize"] = optimised
        linear = linear_of(weight_of(32, 64, bits))
        layer = HQQLinear(linear, arguments, compute_dtype=torch.float16, device="cpu", del_orig=False)
        layer.encoded_state_dict = True
        config = {"quant_method": "hqq", "quant_config": arguments, "skip_modules": ["lm_head"]}
        held = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        cases[f"{bits}_{size}_axis_{axis}{'' if optimised else '_whole'}"] = Case(config, held, layer.dequantize())
    return "hqq", cases


MAKERS = {
    "hqq": hqq,
    "bitsandbytes": bitsandbytes,
    "modelopt": modelopt,
    "auto_round": auto_round,
    "awq": awq,
    "llm_compressor": llm_compressor,
    "fp8": fp8,
    "gptq": gptq,
    "mxfp4": mxfp4,
}


def main(name: str, path: str) -> None:
    library, cases = MAKERS[name]()
    tensors = {f"{case}/{key}": value.contiguous() for case, of in cases.items() for key, value in of.held.items()}
    tensors |= {f"{case}/expected": of.expected.contiguous() for case, of in cases.items()}
    configs = {case: of.config for case, of in cases.items()}
    save_file(tensors, path, {"made_by": f"{library} {version(library)}", "configs": json.dumps(configs)})


if __name__ == "__main__":
    main(*sys.argv[1:])
