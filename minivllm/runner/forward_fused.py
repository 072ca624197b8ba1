"""`runner.forward=fused`: the decoder's small operations in C++ on a CPU (kernels/cpu/decoder.cpp).

A layer as written is some fifteen tensor operations, four of them products; at few tokens the others cost more than
their arithmetic. Here

    packed weights, panels or bf16 tiles alone
                     the whole stack is one call, with the adapters of few tokens each
    anything else    the same steps in Python around each layer's QuantMethod: four products, four calls

so weights in a library's layout, a mixture of both forms, and adapters in torch take the second way. The model as
written is the reference. Rows of the embedding are looked up in the same call, which saves one that makes them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from minivllm.attention.cpu import CPUAttention
from minivllm.attention.groups import backends_of
from minivllm.batch import BatchKey, InputBatch
from minivllm.compile.context import ForwardContext, attend, current
from minivllm.compile.graphs import Exact
from minivllm.kernels.cpu import decoder as kernels
from minivllm.kernels.cpu.decoder import DecoderKernels, Embedded, Shape, Stack, StackLayer
from minivllm.layers.description import Description
from minivllm.layers.linear import QuantMethod, RowwiseCPU, TiledCPU
from minivllm.lora.layer import LoRAMethod
from minivllm.models.decoder import Decoder
from minivllm.quantization.packed import PackedMethod
from minivllm.runner.forward import ForwardOptions, first_inputs
from minivllm.upload import upload

CPU = torch.device("cpu")
Form = Literal["matrix", "panels", "tiles"]  # the attribute of a layer that holds codes, exact floats, or bf16 tiles


def unavailable(model: nn.Module, device: torch.device) -> str | None:
    """Why this model's operations cannot be fused here, or None."""
    if device.type != "cpu":
        return f"operations are fused for CPUs, not for {device.type}"
    if not isinstance(model, Decoder):
        return f"operations are fused for decoders of minivllm/models/decoder.py, not for {type(model).__name__}"
    if model.placement.size > 1:
        return "operations are fused for a whole model, not for the part of one that a rank has"
    if isinstance(why := model.describe(), str):
        return f"operations are not fused: {why}"
    dtype = model.dtype
    if dtype not in kernels.KINDS:
        return f"operations are fused in bfloat16 and float32, not in {str(dtype).removeprefix('torch.')}"
    return kernels.unsupported_reason()


class FusedForward:
    decision: tuple[str, str]

    def __init__(self, model: nn.Module, device: torch.device, options: ForwardOptions):
        assert options.compile == "off", "EngineConfig.build refuses it"
        self._run: Callable[[InputBatch], Tensor] = lambda batch: model(*first_inputs(model, batch, device, Exact()))
        if (why := unavailable(model, device)) is not None:
            self.decision = ("eager", why)
        else:
            self._run = FusedModel(model).run
            self.decision = ("fused", "what a layer does beside its products is in C++ calls")

    def key_for(self, num_reqs: int, num_tokens: int, max_query: int, adapted: bool = False) -> BatchKey:
        return BatchKey(num_tokens)

    def warmup(self, run_dummy: Callable[[BatchKey], None]) -> None:
        """Nothing is built at the first call."""

    def __call__(self, batch: InputBatch) -> Tensor:
        return self._run(batch)


class FusedModel:
    """Call it as the model, inside of a forward context."""

    def __init__(self, model: Decoder):
        """model: one that can be described."""
        self.model = model
        spec, described = model.spec, model.describe()
        assert isinstance(described, Description), described
        shape = Shape(spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_size, spec.intermediate_size)
        self.kernels = DecoderKernels(shape, described, model.dtype)
        self._linears = linears(model)
        self._methods: tuple[list[QuantMethod], set[QuantMethod]] = ([], set())  # of the layers in turn; each once
        self._whole = {
            form for form in get_args(Form) if all(getattr(x, form, None) is not None for x in self._linears)
        }
        self._caches: list[Tensor] | None = None  # that the stacks are bound to
        self._stacks: dict[Form, Stack] = {}

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        return self._decode(Embedded(x.contiguous(), None), positions.contiguous())

    def of_tokens(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """The same of the model's embeddings of tokens [T] int64, which nobody has to look up before."""
        return self._decode(self._embedded(token_ids.contiguous()), positions.contiguous())

    def run(self, batch: InputBatch) -> Tensor:
        if batch.overlays:
            return self(*first_inputs(self.model, batch, CPU, Exact()))
        return self.of_tokens(upload(batch.token_ids, CPU), upload(batch.positions, CPU))

    def _decode(self, embedded: Embedded, positions: Tensor) -> Tensor:
        context, num_tokens = current(), len(positions)
        form = self._one_form(context, num_tokens)
        if form is None:
            return self._layer_by_layer(embedded, positions)
        y = torch.empty((num_tokens, self.kernels.shape.hidden), dtype=self.kernels.dtype)
        adapted = next((method.products.step.tasks for method in self._methods[1] if is_adapted(method)), None)
        stack = self._stack(form, context)
        plans = context.meta if isinstance(context.meta, list) else [context.meta]  # of each KV group
        handles = [plan.handle for plan in plans]
        self.kernels.decode(stack, embedded, positions, handles, y, adapted)
        return y

    def _one_form(self, context: ForwardContext, num_tokens: int) -> Form | None:
        """The form of all this step's products, if it is one that can be in one call. Asked anew: layers may have been
        given adapters."""
        if not isinstance(backends_of(context.backend)[0], CPUAttention):
            return None
        methods = [linear.method for linear in self._linears]
        if methods != self._methods[0]:
            self._methods = methods, set(methods)
        forms = {_form_of(method, num_tokens) for method in self._methods[1]}
        form = forms.pop() if len(forms) == 1 else None
        return form if form in self._whole else None

    def _embedded(self, token_ids: Tensor) -> Embedded:
        table = self.model.embedding
        return (
            Embedded(self.model.embed(token_ids), None) if table.weight is None else Embedded(table.weight, token_ids)
        )

    def _stack(self, form: Form, context: ForwardContext) -> Stack:
        if self._caches is not context.kv_caches:
            self._caches, self._stacks = context.kv_caches, {}
        if form not in self._stacks:
            self._stacks[form] = self._make_stack(form, context)
        return self._stacks[form]

    def _make_stack(self, form: Form, context: ForwardContext) -> Stack:
        backends = backends_of(context.backend)
        layers = [
            StackLayer(
                *(getattr(linear, form) for linear in products_of(x)),
                kv,
                backends[spec.group].view_of[spec],
                spec.group,
                tuple(linear.method.products.table if is_adapted(linear.method) else None for linear in products_of(x)),
            )
            for x, kv, spec in zip(self.model.layers, context.kv_caches, context.layers, strict=True)
        ]
        return Stack(self.kernels, layers, ctypes.cast(backends[0].lib.minivllm_attend, ctypes.c_void_p).value)

    def _layer_by_layer(self, embedded: Embedded, positions: Tensor) -> Tensor:
        kernels, shape, described = self.kernels, self.kernels.shape, self.kernels.described
        num_tokens, q_rows = len(positions), shape.heads
        after = [*(of.attention_norm for of in described.layers[1:]), described.norm]
        x = torch.empty((num_tokens, shape.hidden), dtype=kernels.dtype)
        y, gated = torch.empty_like(x), x.new_empty((num_tokens, shape.intermediate))
        kernels.embed(embedded, x, y)
        for i, (layer, of) in enumerate(zip(self.model.layers, described.layers, strict=True)):
            qkv = layer.attention.qkv(y).contiguous()
            kernels.rotate(i, positions, qkv)
            heads = qkv.view(num_tokens, -1, shape.head_size)
            k_end = q_rows + shape.kv_heads
            attended = attend(heads[:, :q_rows], heads[:, q_rows:k_end], heads[:, k_end:], i)
            kernels.add_norm(layer.attention.o(attended.flatten(1)), of.attention_post_norm, of.mlp_norm, x, y)
            kernels.gate(layer.mlp.gate_up(y), gated)
            kernels.add_norm(layer.mlp.down(gated), of.mlp_post_norm, after[i], x, y)
        return y


def linears(model: Decoder) -> list[nn.Module]:
    return [linear for layer in model.layers for linear in products_of(layer)]


def products_of(layer: nn.Module) -> tuple[nn.Module, ...]:
    return layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down


def is_adapted(method: QuantMethod) -> bool:
    return isinstance(method, LoRAMethod)


def _form_of(method: QuantMethod, num_tokens: int) -> Form | None:
    """What this step's products with such a layer are made with, if the whole stack can be."""
    if is_adapted(method):
        return _form_of(method.inner, num_tokens) if method.products.in_one_call else None
    if isinstance(method, PackedMethod):
        return "matrix" if num_tokens < method.limit.tokens else _form_of(method.dense, num_tokens)
    if isinstance(method, RowwiseCPU):
        return "panels"
    return "tiles" if isinstance(method, TiledCPU) else None
