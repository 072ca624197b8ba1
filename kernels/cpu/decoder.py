"""What a decoder layer does around its products (decoder.cpp), for CPUs: norms, rotation, gate, residual; and the whole
stack in one call where every product is with a PackedMatrix, or every one with a DenseMatrix.

Its twin, slow and obviously right, is the model as it is written (minivllm/models/llama.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from minivllm.kernels.cpu import build, dense
from minivllm.kernels.cpu.dense import DenseMatrix
from minivllm.kernels.cpu.linear import PORTABLE, PackedMatrix, best_path
from minivllm.kernels.cpu.lora import SlotTable, Tasks

NAME = "decoder"
KINDS = {torch.float32: 0, torch.bfloat16: 2}


class LayerWeights(NamedTuple):
    attention_norm: Tensor  # [hidden]
    mlp_norm: Tensor  # [hidden]
    qk_norm: Tensor | None  # [heads + kv_heads, head_size]


class Shape(NamedTuple):
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int


Matrix = PackedMatrix | DenseMatrix


class StackLayer(NamedTuple):
    """What the whole stack in one call needs of a layer."""

    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix
    kv: Tensor
    view: int  # of the attention plan
    slots: tuple[SlotTable | None, ...] = (None,) * 4  # adapters of the four, where they may have some


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in LayerWeights._fields),
        *((name, c_void_p) for name in ("qkv", "o", "gate_up", "down", "kv")),
        ("view", c_int64),
        ("slots", c_void_p * 4),
    ]


class _Decoder(ctypes.Structure):
    _fields_ = [
        ("layers", c_void_p),
        *((name, c_void_p) for name in ("norm", "embedding", "cos", "sin")),
        *((name, c_int64) for name in ("num_layers", *Shape._fields, "kind")),
        *((name, c_float) for name in ("eps", "qk_eps")),
        *((name, c_int64) for name in ("path", "dense")),
        *((name, c_void_p) for name in ("linear", "attend", "adapt", "parallel")),
    ]


def obstacle() -> str | None:
    """Why the kernels cannot be used here, or None. The first call may compile."""
    return build.obstacle(NAME)


class DecoderKernels:
    """Tensors are named, not copied; all are dense, in one dtype of KINDS, on the CPU. Each function writes its result
    into a tensor that the caller gives; T is the number of tokens, of which there may be none."""

    def __init__(
        self,
        shape: Shape,
        layers: Sequence[LayerWeights],
        norm: Tensor,  # [hidden]
        embedding: Tensor,  # [vocab, hidden]
        cos: Tensor,  # [max_position, head_size / 2]
        sin: Tensor,
        eps: float,
        qk_eps: float,
    ):
        self.shape, self.dtype = shape, norm.dtype
        self.given = [norm, embedding, cos, sin, *(t for layer in layers for t in layer if t is not None)]
        assert all(t.is_contiguous() and t.dtype is norm.dtype and t.device.type == "cpu" for t in self.given)
        assert embedding.shape[1] == shape.hidden and cos.shape == sin.shape and cos.shape[1] * 2 == shape.head_size
        for layer in layers:
            assert layer.attention_norm.shape == layer.mlp_norm.shape == norm.shape == (shape.hidden,)
            assert layer.qk_norm is None or layer.qk_norm.shape == (shape.heads + shape.kv_heads, shape.head_size)
        self.vocab_size, self.max_position = len(embedding), len(cos)
        self.layers = (_Layer * len(layers))(*(_Layer(*map(_address, layer)) for layer in layers))
        self.norms = [(layer.attention_norm, layer.mlp_norm) for layer in layers]
        self._lib, parallel = build.library(NAME), build.torch_parallel()
        self.decoder = _Decoder(
            ctypes.addressof(self.layers),
            *map(_address, (norm, embedding, cos, sin)),
            len(layers),
            *shape,
            KINDS[norm.dtype],
            eps,
            qk_eps,
            PORTABLE,
            parallel=parallel,
        )
        self._at = ctypes.addressof(self.decoder)
        for name, num_pointers in (("embed", 3), ("add_norm", 4), ("gate", 2), ("decode", 5)):
            self._declare(name, [c_void_p] * num_pointers)
        self._declare("rotate", [c_int64, c_void_p, c_void_p])

    def _declare(self, name: str, arguments: list) -> None:
        function = getattr(self._lib, f"minivllm_{name}")
        function.restype, function.argtypes = None, [c_void_p, c_int64, c_int64, *arguments]
        setattr(self, f"_{name}", function)

    def embed(self, token_ids: Tensor, x: Tensor, y: Tensor) -> None:
        """x = the embeddings of token_ids [T] int64, y = x normalised for the first layer; both [T, hidden]."""
        self._check(x, y)
        self._embed(self._at, *_size(x), token_ids.data_ptr(), x.data_ptr(), y.data_ptr())

    def add_norm(self, delta: Tensor, weight: Tensor, x: Tensor, y: Tensor) -> None:
        """x += delta, then y = x normalised; all [T, hidden]."""
        self._check(delta, x, y)
        assert weight.shape == (self.shape.hidden,) and weight.dtype is self.dtype
        self._add_norm(self._at, *_size(x), delta.data_ptr(), weight.data_ptr(), x.data_ptr(), y.data_ptr())

    def rotate(self, layer: int, positions: Tensor, qkv: Tensor) -> None:
        """qkv [T, (heads + 2 kv_heads) head_size]: q and k normalised if the layer says so, and turned, in place."""
        self._check(qkv)
        self._rotate(self._at, *_size(qkv), layer, positions.data_ptr(), qkv.data_ptr())

    def gate(self, gate_up: Tensor, y: Tensor) -> None:
        """gate_up [T, 2 intermediate] -> y [T, intermediate] = silu(gate) up."""
        self._check(gate_up, y)
        self._gate(self._at, *_size(y), gate_up.data_ptr(), y.data_ptr())

    def decode(
        self,
        stack: Stack,
        token_ids: Tensor,
        positions: Tensor,
        plan: int,
        y: Tensor,
        adapted: Tasks | None = None,
    ) -> None:
        """All layers: token_ids and positions [T] int64 -> y [T, hidden], the final norm applied. adapted: the tokens
        that have an adapter."""
        self._check(y)
        groups = None if adapted is None else adapted.address
        self._decode(stack.at, *_size(y), token_ids.data_ptr(), positions.data_ptr(), plan, groups, y.data_ptr())

    def _check(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            assert tensor.is_contiguous() and tensor.dtype is self.dtype, (tensor.stride(), tensor.dtype)


class Stack:
    """All layers, with matrices of one class, for `decode`. attend: the address of minivllm_attend."""

    def __init__(self, kernels: DecoderKernels, layers: Sequence[StackLayer], attend: int):
        kind = type(layers[0].qkv)
        assert all(type(matrix) is kind for layer in layers for matrix in layer[:4])
        self.given = kernels, layers  # kept alive
        self._layers = type(kernels.layers).from_buffer_copy(kernels.layers)
        for to, layer in zip(self._layers, layers, strict=True):
            to.qkv, to.o, to.gate_up, to.down = (matrix.address for matrix in layer[:4])
            to.kv, to.view = layer.kv.data_ptr(), layer.view
            to.slots[:] = [None if table is None else table.address for table in layer.slots]
        decoder = self._decoder = _Decoder.from_buffer_copy(kernels.decoder)
        self.at = ctypes.addressof(decoder)
        decoder.layers, decoder.attend = ctypes.addressof(self._layers), attend
        if kind is DenseMatrix:
            assert kernels.dtype is torch.bfloat16 and all(layer.gate_up.halves for layer in layers)
            decoder.dense, product = 1, build.library(dense.NAME).minivllm_dense_linear
        else:
            product = build.library("packed_linear").minivllm_linear
            decoder.path = best_path() if kernels.dtype is torch.bfloat16 else PORTABLE
        decoder.linear = ctypes.cast(product, c_void_p)
        if any(table is not None for layer in layers for table in layer.slots):
            decoder.adapt = ctypes.cast(build.library("lora").minivllm_lora, c_void_p)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _size(x: Tensor) -> tuple[int, int]:
    return len(x), torch.get_num_threads()
