"""Launching products with 4-bit weights on a GPU."""

from typing import Any

import torch
import triton
from torch import Tensor

from minivllm.kernels.triton import packed_product
from minivllm.kernels.triton.interpreted import INTERPRETED
from minivllm.quantization.formats import GROUP, Packed, dequantise

BLOCK_N, BLOCK_ADD = 128, 512
MAX_SPLITS = 8


def constants(n_in: int, n_out: int, bias: bool, split: bool, block_m: int, upcast: bool) -> dict[str, Any]:
    fixed = {"N_IN": n_in, "N_OUT": n_out, "BIAS": bias, "SPLIT": split, "UPCAST": upcast}
    return fixed | {"BLOCK_M": block_m, "BLOCK_N": BLOCK_N}


class Matrix:
    """A weight matrix [n_out, n_in] in 4 bits, rearranged for packed_product.py."""

    traceable = False  # how many programs share a product follows from its number of tokens

    def __init__(self, packed: Packed, bias: Tensor | None = None):
        """packed: of 4 bits, on the device."""
        assert packed.bits == 4 and packed.scales.dtype == packed.minima.dtype == torch.float16, packed.bits
        self.n_out, num_groups = packed.scales.shape
        self.n_in = num_groups * GROUP
        self.codes = packed.codes.view(self.n_out, num_groups, GROUP // 2).transpose(0, 1).contiguous()
        self.scales, self.minima = packed.scales.T.contiguous(), packed.minima.T.contiguous()
        assert bias is None or (bias.shape == (self.n_out,) and bias.is_contiguous())
        self.bias = bias
        on_gpu = self.codes.device.type == "cuda"
        self.num_sms = torch.cuda.get_device_properties(self.codes.device).multi_processor_count if on_gpu else 1

    def dense(self) -> Tensor:
        """bf16 [n_out, n_in], each weight rounded once."""
        codes = self.codes.transpose(0, 1).reshape(self.n_out, -1)
        packed = Packed(codes, self.scales.T.contiguous(), self.minima.T.contiguous())
        return dequantise(packed).to(torch.bfloat16)

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [T, n_in] -> x W^T + bias [T, n_out] in out_dtype (x's)."""
        x = x if x.stride(1) == 1 else x.contiguous()
        return self.multiply(x, x.new_empty(len(x), self.n_out, dtype=out_dtype or x.dtype), self.num_sms)

    def multiply(self, x: Tensor, out: Tensor, num_sms: int = 1, block_m: int | None = None) -> Tensor:
        """x [T, n_in] -> x W^T + bias, in out [T, n_out]. num_sms: programs that the device should have at least, for
        which the groups are shared out."""
        count = len(x)
        assert x.shape == (count, self.n_in) and x.stride(1) == 1, (x.shape, x.stride())
        assert out.shape == (count, self.n_out) and out.is_contiguous()
        block_m = block_m or (16 if count <= 16 else 64)
        tiles = triton.cdiv(count, block_m), triton.cdiv(self.n_out, BLOCK_N)
        splits = max(1, min(-(-2 * num_sms // (tiles[0] * tiles[1])), MAX_SPLITS, self.n_in // GROUP))
        target = x.new_empty(splits, *out.shape, dtype=torch.float32) if splits > 1 else out
        bias, has_bias = (self.scales, False) if self.bias is None else (self.bias, True)
        upcast = INTERPRETED and x.dtype == torch.bfloat16
        packed_product.w4a16_kernel[(*tiles, splits)](
            *(x, self.codes, self.scales, self.minima, bias, target, x.stride(0), count),
            **constants(self.n_in, self.n_out, has_bias, splits > 1, block_m, upcast),
            num_warps=4,
            num_stages=4,
        )
        if splits > 1:
            packed_product.add_splits_kernel[(count, triton.cdiv(self.n_out, BLOCK_ADD))](
                *(target, bias, out, splits), N_OUT=self.n_out, BIAS=has_bias, BLOCK=BLOCK_ADD, num_warps=4
            )
        return out
