"""Make data/compressed_tensors.safetensors: matrices packed and de-quantised by compressed-tensors itself.

    python tests/quantization/make_compressed_tensors.py tests/quantization/data/compressed_tensors.safetensors

in an environment that has the library (pip install compressed-tensors); the file names the version that made it.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor as Compressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

CASES = {  # name -> (weights' arguments, dtype, shape)
    "group": ({"strategy": "group", "group_size": 32, "symmetric": True}, torch.bfloat16, (24, 128)),
    "group_64": ({"strategy": "group", "group_size": 64, "symmetric": True}, torch.float16, (24, 128)),
    "group_8": ({"strategy": "group", "group_size": 8, "symmetric": True}, torch.bfloat16, (24, 64)),
    "channel": ({"strategy": "channel", "symmetric": True}, torch.bfloat16, (24, 64)),
    "asymmetric": ({"strategy": "group", "group_size": 32, "symmetric": False}, torch.bfloat16, (20, 128)),
    "asymmetric_64": ({"strategy": "group", "group_size": 64, "symmetric": False}, torch.float16, (24, 128)),
    "asymmetric_channel": ({"strategy": "channel", "symmetric": False}, torch.float32, (20, 96)),
}


def qparams(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
    return calculate_qparams(groups.amin(-1), groups.amax(-1), args)


def main(path: str) -> None:
    tensors, arguments = {}, {}
    for seed, (name, (given, dtype, shape)) in enumerate(CASES.items()):
        weight = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul_(0.05).add_(0.01).to(dtype)
        args = QuantizationArgs(num_bits=4, type="int", **given)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        scale, zero = qparams(weight, args)
        packed = Compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
        tensors |= {f"{name}.{key}": value.contiguous() for key, value in packed.items()}
        tensors[f"{name}.expected"] = Compressor.decompress(packed, scheme)["weight"].contiguous()
        arguments[name] = json.loads(args.model_dump_json())
    made_by = f"compressed-tensors {version('compressed-tensors')}"
    save_file(tensors, path, {"made_by": made_by, "arguments": json.dumps(arguments)})


if __name__ == "__main__":
    main(sys.argv[1])
