"""What a decoder layer does around its products (decoder.cpp), for CPUs: norms, rotation, gate, residual; and the whole
stack in one call where every product is with packed weights, or every one with a DenseMatrix.

What a layer does is data (minivllm/layers/description.py). The reference, slow and obviously right, is the model as it
is written (minivllm/models).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivllm.kernels.cpu import blocks, build, dense, floats, linear
from minivllm.kernels.cpu.blocks import BlockMatrix
from minivllm.kernels.cpu.dense import DenseMatrix
from minivllm.kernels.cpu.floats import FloatMatrix
from minivllm.kernels.cpu.linear import PORTABLE, PackedMatrix
from minivllm.kernels.cpu.lora import SlotTable, Tasks
from minivllm.layers.description import Description, LayerDescription

NAME = "decoder"
KINDS = {torch.float32: 0, torch.bfloat16: 2}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


class Shape(NamedTuple):
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int


Matrix = PackedMatrix | BlockMatrix | DenseMatrix | FloatMatrix


class Embedded(NamedTuple):
    """A step's rows of the embedding."""

    rows: Tensor  # [vocab, hidden], or without ids [T, hidden]
    ids: Tensor | None  # [T] int64


class StackLayer(NamedTuple):
    """What the whole stack in one call needs of a layer."""

    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix
    kv: Tensor
    view: int  # of its attention plan
    plan: int  # of the step's: that of its KV group
    slots: tuple[SlotTable | None, ...] = (None,) * 4  # adapters of the four, where they may have some


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in LayerDescription._fields),
        *((name, c_void_p) for name in ("qkv", "o", "gate_up", "down", "kv")),
        *((name, c_int64) for name in ("view", "plan")),
        ("products", c_void_p * 4),
        ("slots", c_void_p * 4),
    ]


class _Decoder(ctypes.Structure):
    _fields_ = [
        ("layers", c_void_p),
        ("norm", c_void_p),
        *((name, c_int64) for name in ("num_layers", *Shape._fields)),
        *((name, c_int64) for name in ("kind", "activation", "qk_rounds", "qk_whole", "rotary_half", "neighbours")),
        *((name, c_float) for name in ("eps", "residual_scale", "embedding_scale")),
        *((name, c_int64) for name in ("path", "dense")),
        *((name, c_void_p) for name in ("attend", "adapt", "parallel")),
    ]


def unsupported_reason() -> str | None:
    """Why the kernels cannot be used here, or None. The first call may compile."""
    return build.unsupported_reason(NAME)


class DecoderKernels:
    """Tensors are named, not copied; all are dense and on the CPU, in `dtype`, one of KINDS, but for the norms. Each
    function writes its result into a tensor that the caller gives; T is the number of tokens, which may be none."""

    def __init__(self, shape: Shape, described: Description, dtype: torch.dtype):
        self.shape, self.dtype, self.described, layers = shape, dtype, described, described.layers
        _check_described(shape, described, dtype)
        self.layers = (_Layer * len(layers))(*(_Layer(*map(_address, layer)) for layer in layers))
        self._lib, parallel = build.library(NAME), build.torch_parallel()
        self.decoder = _Decoder(
            ctypes.addressof(self.layers),
            described.norm.data_ptr(),
            len(layers),
            *shape,
            KINDS[dtype],
            ACTIVATIONS[described.activation],
            described.qk_rounds,
            described.qk_whole,
            next((layer.cos.shape[1] for layer in layers if layer.cos is not None), 0),
            described.neighbours,
            described.eps,
            described.residual_scale,
            described.embedding_scale,
            PORTABLE,
            parallel=parallel,
        )
        self._at = ctypes.addressof(self.decoder)
        for name, num_pointers in (("embed", 4), ("add_norm", 5), ("gate", 2), ("decode", 6)):
            self._declare(name, [c_void_p] * num_pointers)
        self._declare("rotate", [c_int64, c_void_p, c_void_p])

    def _declare(self, name: str, arguments: list) -> None:
        function = getattr(self._lib, f"minivllm_{name}")
        function.restype, function.argtypes = None, [c_void_p, c_int64, c_int64, *arguments]
        setattr(self, f"_{name}", function)

    def embed(self, embedded: Embedded, x: Tensor, y: Tensor) -> None:
        """x = the tokens' embeddings, scaled where they are looked up, y = x normalised for the first layer; both
        [T, hidden]."""
        self._check(embedded.rows, x, y)
        self._embed(self._at, *_size(x), *map(_address, embedded), x.data_ptr(), y.data_ptr())

    def add_norm(self, delta: Tensor, post: Tensor | None, weight: Tensor | None, x: Tensor, y: Tensor) -> None:
        """x += delta, or its norm `post`, scaled; then y = x normalised by `weight`, or x. All [T, hidden], and both
        norms [hidden] float32."""
        self._check(delta, x, y)
        assert all(norm is None or norm.shape == (self.shape.hidden,) for norm in (post, weight))
        pointers = map(_address, (delta, post, weight, x, y))
        self._add_norm(self._at, *_size(x), *pointers)

    def rotate(self, layer: int, positions: Tensor, qkv: Tensor) -> None:
        """qkv [T, (heads + 2 kv_heads) head_size]: q and k normalised if the layer says so, and turned, in place."""
        self._check(qkv)
        self._rotate(self._at, *_size(qkv), layer, positions.data_ptr(), qkv.data_ptr())

    def gate(self, gate_up: Tensor, y: Tensor) -> None:
        """gate_up [T, 2 intermediate] -> y [T, intermediate] = act(gate) up."""
        self._check(gate_up, y)
        self._gate(self._at, *_size(y), gate_up.data_ptr(), y.data_ptr())

    def decode(
        self,
        stack: Stack,
        embedded: Embedded,
        positions: Tensor,
        plans: Sequence[int],
        y: Tensor,
        adapted: Tasks | None = None,
    ) -> None:
        """All layers: positions [T] int64 -> y [T, hidden], the final norm applied. plans: the attention's, of each KV
        group. adapted: the tokens that have an adapter."""
        self._check(embedded.rows, y)
        groups = None if adapted is None else adapted.address
        rows, handles = map(_address, embedded), (c_void_p * len(plans))(*plans)
        self._decode(stack.at, *_size(y), *rows, positions.data_ptr(), handles, groups, y.data_ptr())

    def _check(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            assert tensor.is_contiguous() and tensor.dtype is self.dtype, (tensor.stride(), tensor.dtype)


class Stack:
    """All layers, with dense matrices or with those of the other classes, for `decode`. attend: the address of
    minivllm_attend."""

    def __init__(self, kernels: DecoderKernels, layers: Sequence[StackLayer], attend: int):
        kinds = {type(matrix) for layer in layers for matrix in layer[:4]}
        products = {kind: _product_of(kind) for kind in kinds}
        self.given = kernels, layers  # kept alive
        self._layers = type(kernels.layers).from_buffer_copy(kernels.layers)
        for to, layer in zip(self._layers, layers, strict=True):
            to.qkv, to.o, to.gate_up, to.down = (matrix.address for matrix in layer[:4])
            to.kv, to.view, to.plan = layer.kv.data_ptr(), layer.view, layer.plan
            to.products[:] = [products[type(matrix)] for matrix in layer[:4]]
            to.slots[:] = [None if table is None else table.address for table in layer.slots]
        decoder = self._decoder = _Decoder.from_buffer_copy(kernels.decoder)
        self.at = ctypes.addressof(decoder)
        decoder.layers, decoder.attend = ctypes.addressof(self._layers), attend
        if DenseMatrix in kinds:
            assert len(kinds) == 1 and kernels.dtype is torch.bfloat16 and all(layer.gate_up.halves for layer in layers)
            decoder.dense = 1
        if PackedMatrix in kinds:
            decoder.path = linear.best_path() if kernels.dtype is torch.bfloat16 else PORTABLE
        if any(table is not None for layer in layers for table in layer.slots):
            decoder.adapt = _function(build.library("lora").minivllm_lora)


def _check_described(shape: Shape, described: Description, dtype: torch.dtype) -> None:
    tables = [(layer.cos, layer.sin) for layer in described.layers if layer.cos is not None and layer.sin is not None]
    assert len({cos.shape[1] for cos, _ in tables}) <= 1
    for cos, sin in tables:
        assert cos.shape == sin.shape and cos.shape[1] * 2 <= shape.head_size and cos.dtype is sin.dtype is dtype
    for layer in described.layers:
        assert (layer.cos is None) == (layer.sin is None)
        assert layer.qk_norm is None or layer.qk_norm.shape == (shape.heads + shape.kv_heads, shape.head_size)
    norms = [described.norm, *(norm for layer in described.layers for norm in layer[:4] if norm is not None)]
    assert all(norm.shape == (shape.hidden,) for norm in norms)
    heads = [layer.qk_norm for layer in described.layers if layer.qk_norm is not None]
    assert all(norm.is_contiguous() and norm.dtype is torch.float32 for norm in (*norms, *heads))
    assert all(table.is_contiguous() and table.device.type == "cpu" for both in tables for table in both)


def _product_of(kind: type[Matrix]) -> int:
    if kind is BlockMatrix:
        return blocks.linear_address()
    if kind is FloatMatrix:
        return floats.linear_address()
    if kind is DenseMatrix:
        return _function(build.library(dense.NAME).minivllm_dense_linear)
    return _function(build.library(linear.NAME).minivllm_linear)


def _function(function: Any) -> int:
    return ctypes.cast(function, c_void_p).value


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _size(x: Tensor) -> tuple[int, int]:
    return len(x), torch.get_num_threads()
