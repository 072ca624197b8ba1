"""`runner.forward=fused`: the decoder's small operations in C++ on a CPU (kernels/cpu/decoder.cpp).

A layer as written is some fifteen tensor operations, four of them products; at few tokens the others cost more than
their arithmetic. Here

    packed weights alone, or bf16 tiles alone
                     the whole stack is one call, with the adapters of few tokens each
    anything else    the same steps in Python around each layer's QuantMethod: four products, four calls

so weights in a library's layout, a mixture of both forms, and adapters in torch take the second way. The model as
written is the twin.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor, nn

from minivllm.attention.cpu import CPUAttention
from minivllm.compile.context import ForwardContext, attend, current
from minivllm.kernels.cpu import decoder as kernels
from minivllm.kernels.cpu.decoder import DecoderKernels, LayerWeights, Matrix, Shape, Stack, StackLayer
from minivllm.kernels.cpu.dense import DenseMatrix
from minivllm.kernels.cpu.linear import PackedMatrix
from minivllm.layers.linear import QuantMethod, TiledCPU
from minivllm.layers.norm import QKNorm
from minivllm.lora.layer import LoRAMethod
from minivllm.models.llama import LlamaModel
from minivllm.quantization.packed import QuantisedAtLoad
from minivllm.runner.batch import InputBatch
from minivllm.runner.forward import ForwardOptions, device_inputs
from minivllm.runner.inputs import BatchKey


def unavailable(model: nn.Module, device: torch.device) -> str | None:
    """Why this model's operations cannot be fused here, or None."""
    if device.type != "cpu":
        return f"operations are fused for CPUs, not for {device.type}"
    if type(model) is not LlamaModel:
        return f"operations are fused for the Llama family, not for {type(model).__name__}"
    if model.spec.experts is not None:
        return "operations are fused where every layer has one MLP, and this model has layers of experts"
    dtype = model.embedding.weight.dtype
    if dtype not in kernels.KINDS:
        return f"operations are fused in bfloat16 and float32, not in {str(dtype).removeprefix('torch.')}"
    return kernels.obstacle()


class FusedForward:
    def __init__(self, model: nn.Module, device: torch.device, options: ForwardOptions):
        assert options.compile == "off", "resolve() refuses it"
        self._run: Callable[[Tensor, Tensor], Tensor] = model
        if (obstacle := unavailable(model, device)) is not None:
            self.decision = ("eager", obstacle)
        else:
            self._run = FusedModel(model)
            self.decision = ("fused", "what a layer does beside its products is in C++ calls")
        self.device = device

    def key_for(self, num_reqs: int, num_tokens: int, max_query: int, adapted: bool = False) -> BatchKey:
        return BatchKey(num_tokens)

    def warmup(self, run_dummy: Callable[[BatchKey], None]) -> None:
        """Nothing is built at the first call."""

    def __call__(self, batch: InputBatch) -> Tensor:
        return self._run(*device_inputs(batch, self.device))


class FusedModel:
    """Call it as the model, inside of a forward context."""

    def __init__(self, model: LlamaModel):
        self.model = model
        spec = model.spec
        shape = Shape(spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_size, spec.intermediate_size)
        weights = [LayerWeights(x.attention_norm.weight, x.mlp_norm.weight, _qk_norm(x)) for x in model.layers]
        rotary, eps = model.rotary, spec.rms_eps
        self.kernels = DecoderKernels(
            shape, weights, model.norm.weight, model.embedding.weight, rotary.cos, rotary.sin, eps, eps
        )
        self.norms = [norm for pair in self.kernels.norms for norm in pair] + [model.norm.weight]
        self._linears = linears(model)
        self._is_tiled = all(getattr(linear, "tiles", None) is not None for linear in self._linears)
        self._caches: list[Tensor] | None = None  # that the stacks are bound to
        self._stacks: dict[type[Matrix], Stack] = {}

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        token_ids, positions = token_ids.contiguous(), positions.contiguous()
        context = current()
        form = self._one_form(context, len(token_ids))
        if form is None:
            return self._layer_by_layer(token_ids, positions)
        y = torch.empty((len(token_ids), self.kernels.shape.hidden), dtype=self.kernels.dtype)
        adapted = next((method.products.step.tasks for method in self._methods() if is_adapted(method)), None)
        stack = self._stack(form, context)
        self.kernels.decode(stack, token_ids, positions, context.meta.handle, y, adapted)
        return y

    def _one_form(self, context: ForwardContext, num_tokens: int) -> type[Matrix] | None:
        """The form of all this step's products, if it is one that can be in one call. Asked anew: layers may have been
        given adapters."""
        if not isinstance(context.backend, CPUAttention):
            return None
        forms = {_form_of(method, num_tokens) for method in self._methods()}
        form = forms.pop() if len(forms) == 1 else None
        return form if form is not DenseMatrix or self._is_tiled else None

    def _methods(self) -> set[QuantMethod]:
        return {layer.method for layer in self._linears}

    def _stack(self, form: type[Matrix], context: ForwardContext) -> Stack:
        if self._caches is not context.kv_caches:
            self._caches, self._stacks = context.kv_caches, {}
        if form not in self._stacks:
            self._stacks[form] = self._make_stack("tiles" if form is DenseMatrix else "matrix", context)
        return self._stacks[form]

    def _make_stack(self, attribute: str, context: ForwardContext) -> Stack:
        backend = context.backend
        layers = [
            StackLayer(
                *(getattr(linear, attribute) for linear in products_of(x)),
                kv,
                backend.view_of[spec],
                tuple(linear.method.products.table if is_adapted(linear.method) else None for linear in products_of(x)),
            )
            for x, kv, spec in zip(self.model.layers, context.kv_caches, context.layers, strict=True)
        ]
        return Stack(self.kernels, layers, ctypes.cast(backend.lib.minivllm_attend, ctypes.c_void_p).value)

    def _layer_by_layer(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        kernels, shape, norms = self.kernels, self.kernels.shape, iter(self.norms[1:])
        num_tokens, q_rows = len(token_ids), shape.heads
        x = torch.empty((num_tokens, shape.hidden), dtype=kernels.dtype)
        y, gated = torch.empty_like(x), x.new_empty((num_tokens, shape.intermediate))
        kernels.embed(token_ids, x, y)
        for i, layer in enumerate(self.model.layers):
            qkv = layer.attention.qkv(y).contiguous()
            kernels.rotate(i, positions, qkv)
            heads = qkv.view(num_tokens, -1, shape.head_size)
            k_end = q_rows + shape.kv_heads
            attended = attend(heads[:, :q_rows], heads[:, q_rows:k_end], heads[:, k_end:], i)
            kernels.add_norm(layer.attention.o(attended.flatten(1)), next(norms), x, y)
            kernels.gate(layer.mlp.gate_up(y), gated)
            kernels.add_norm(layer.mlp.down(gated), next(norms), x, y)
        return y


def linears(model: LlamaModel) -> list[nn.Module]:
    return [linear for layer in model.layers for linear in products_of(layer)]


def products_of(layer: nn.Module) -> tuple[nn.Module, ...]:
    return layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down


def is_adapted(method: QuantMethod) -> bool:
    return isinstance(method, LoRAMethod)


def _form_of(method: QuantMethod, num_tokens: int) -> type[Matrix] | None:
    """What this step's products with such a layer are made with, if the whole stack can be."""
    if is_adapted(method):
        return _form_of(method.inner, num_tokens) if method.products.in_one_call else None
    if isinstance(method, QuantisedAtLoad):
        return PackedMatrix if num_tokens < method.limit.tokens else _form_of(method.dense, num_tokens)
    return DenseMatrix if isinstance(method, TiledCPU) else None


def _qk_norm(layer: nn.Module) -> Tensor | None:
    norm = layer.attention.qk_norm
    return norm.per_head if isinstance(norm, QKNorm) else None
