"""Any decoder of the installed transformers, by its own code: for architectures that have no file here.

As vLLM's Transformers backend: the network is made from config.json on the meta device, its nn.Linear layers are
replaced by ours, and attention comes to `attend` (transformers_any_attention.py). So it is a network of the engine's
runner like any other: x is [T, hidden], a flat batch of tokens of many requests with their positions.

Nothing is believed that can be tried. When the weights are loaded, a few tokens are run four ways: as transformers
does with its own slowest attention, with ours one request by itself, two in one batch, and one in two steps. What
cannot run so (a mask or a state of its own, attention that does not come to us, positions that are not ours) shows
there, and is refused in a sentence before anything is served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.attention.base import AttentionSpec
from minivllm.errors import ModelError
from minivllm.layers.linear import choose_method
from minivllm.models.checkpoint import Network
from minivllm.models.transformers_any_attention import (
    NAME,
    Call,
    Continued,
    Measuring,
    Paged,
    Separate,
    answered_by,
    in_one_shape,
    register,
)
from minivllm.models.transformers_any_config import TransformersSpec, read_config, transformers_config
from minivllm.models.transformers_any_weights import TreeWeights, materialise, replace_linears
from minivllm.parallel.group import ONE_DEVICE, Ranks
from minivllm.parallel.placement import Placement

__all__ = ["TransformersNetwork", "read_config"]

LENGTHS = (7, 12)  # of the requests that are tried: behind each other, so that neither begins where positions do
# How far hidden states may lie apart, as a part of their size: of another order of sums in fp32, and of 16 bits, where
# a token may also meet another expert. A mask, a position or a state that is wrong changes them by their own size.
NEAR = {torch.float32: 2e-3}
NEAR_IN_16_BITS = 0.25


class Given(nn.Module):
    """Stands where a model with a head has its decoder: hands on the hidden states that it is given, so that whatever
    the model does behind its decoder (scales, soft caps) is done by its own code."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Output:
        return _Output(inputs_embeds)

    @property
    def decoder(self) -> Given:
        return self


class _Output:
    """A ModelOutput of which all but the hidden states is None."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class TransformersNetwork(Network):
    stack = "decoder."
    by_row_unsupported_reason = "transformers' own code computes its norms and the rest as it likes"

    def __init__(self, spec: TransformersSpec, dtype: torch.dtype, device: torch.device, ranks: Ranks = ONE_DEVICE):
        super().__init__()
        if ranks.placement.size > 1:
            raise ModelError(f"{spec.architecture} runs by transformers' own code, which is not spread over devices")
        self.spec, self.dtype, self.placement = spec, dtype, Placement()
        self.linear_method, self.linear_reason = choose_method(device, dtype)
        self.attention_layers: list[AttentionSpec] = []  # known once the weights are: `finish`
        self._calls: list[Call] = []
        self._first_position = 0
        self._near = NEAR.get(dtype, NEAR_IN_16_BITS)
        network = self._tried(lambda: _make(spec, dtype))
        self.weights = TreeWeights(network)  # type: ignore[assignment]  # as a WeightMap
        with device:
            self.num_replaced = replace_linears(network, self.linear_method)
        materialise(network, device)
        _keep_in_fp32(network, dtype)
        self._tried(lambda: _initialise_buffers(network))
        self._embed = [network.get_input_embeddings()]  # in a list: it is the decoder's module
        self._prefix = network.base_model_prefix
        if not hasattr(network, self._prefix):
            raise ModelError(f"{spec.architecture} cannot run by transformers' own code: its decoder is not apart")
        self.decoder = getattr(network, self._prefix)
        setattr(network, self._prefix, Given())
        self.lm = network

    # ------------------------------------------------------------------------------------------------------ weights

    def theirs(self, name: str) -> str:
        """Of a module here, the name in transformers' model."""
        owner, _, rest = name.partition(".")
        return f"{self._prefix}.{rest}".rstrip(".") if owner == "decoder" else rest

    def renamed(self, tensors: Iterable[tuple[str, Any, Path]]) -> Iterator[tuple[str, Any, Path]]:
        return self.weights.renamed(self, tensors)  # type: ignore[attr-defined]

    @torch.inference_mode()
    def finish(self) -> None:
        """Every weight is loaded: repack, and try what was not believed. Raises ModelError."""
        super().finish()
        self._tried(self._try)

    # ------------------------------------------------------------------------------------------------------ a step

    def embed(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """token_ids [T] int64 -> x [T, hidden], in `out` if that is given."""
        x = self._embed[0](token_ids[None])[0]
        return x if out is None else out.copy_(x)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, hidden], positions [T] int64 -> hidden [T, hidden], the final norm applied."""
        with answered_by(Paged(self._calls, self.attention_layers)):
            return self._hidden(x, positions)

    def _hidden(self, x: Tensor, positions: Tensor) -> Tensor:
        positions = positions + self._first_position
        return self.decoder(inputs_embeds=x[None], position_ids=positions[None], use_cache=False)[0][0]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden] -> [S, vocab] in fp32."""
        return self.lm(inputs_embeds=hidden[None], use_cache=False).logits[0].float()

    @property
    def capture_unsupported_reason(self) -> str | None:
        """Why no capture may hold a whole forward."""
        return "transformers' own code may ask on the host what its tensors hold"

    @property
    def described(self) -> str:
        """For the start-up table."""
        kinds = {layer.sliding_window for layer in self.attention_layers if layer.sliding_window}
        windows = f", windows of {', '.join(map(str, sorted(kinds)))} tokens" if kinds else ""
        return (
            f"{self.spec.architecture} by its own code: {len(self.attention_layers)} attentions{windows} and "
            f"{self.num_replaced} linear layers are the engine's"
        )

    # ------------------------------------------------------------------------------------------- what is tried first

    def _try(self) -> None:
        ids = _some_tokens(self.spec.vocab_size, next(self.parameters()).device)
        first = self._measured(ids[0])
        expected = [self._as_transformers(part) for part in ids]
        apart = self._apart(ids, expected, first.calls)
        pad = getattr(self.lm.config, "pad_token_id", None)
        if apart > self._near and isinstance(pad, int):  # RoBERTa's kind counts positions from behind the padding's
            self._first_position = pad + 1
            apart = self._apart(ids, expected, first.calls)
            self.spec = replace(self.spec, max_position=self.spec.max_position - pad - 1)
        in_steps = self._apart_in_steps(ids[1], expected[1], first.calls)
        for what, found in (("two requests in one batch", apart), ("a request in two steps", in_steps)):
            if not found <= self._near:
                raise ModelError(
                    f"hidden states of {what} are {found:.2g} of their size away from transformers' own, and at most "
                    f"{self._near:g} is rounding: it keeps something of a request that the engine does not give it"
                )
        self._calls, self.attention_layers = first.calls, in_one_shape(first.calls)

    def _measured(self, ids: Tensor) -> Measuring:
        """At least as many calls as layers; one with two of them has two caches."""
        first, end = Measuring(), ""
        with answered_by(first):
            try:
                self.decoder(input_ids=ids[None], use_cache=False)
            except ModelError:
                raise
            except Exception as e:  # of code that looks into a mask, say
                end = f" ({_said(e)})"
        if end or len(first.calls) < self.spec.num_layers:
            raise ModelError(
                f"of {self.spec.num_layers} layers {len(first.calls)} gave their attention to the engine: the others "
                f"have a state, or attend by themselves{end}"
            )
        return first

    def _as_transformers(self, ids: Tensor) -> Tensor:
        """ids [n] -> [n, hidden], by its own slowest attention."""
        self.decoder.set_attn_implementation("eager")
        try:
            return self.decoder(input_ids=ids[None], use_cache=False)[0][0]
        finally:
            self.decoder.set_attn_implementation(NAME)

    def _apart(self, ids: list[Tensor], expected: list[Tensor], calls: list[Call]) -> float:
        """How far two requests in one batch are from each by itself, as a part of its size: the furthest token."""
        both = torch.cat([torch.arange(n, device=ids[0].device) for n in LENGTHS])
        with answered_by(Separate(LENGTHS, calls)):
            hidden = self._hidden(self.embed(torch.cat(ids)), both)
        return _furthest(hidden, torch.cat(expected))

    def _apart_in_steps(self, ids: Tensor, expected: Tensor, calls: list[Call]) -> float:
        positions, cut = torch.arange(len(ids), device=ids.device), len(ids) // 2 - 1
        with answered_by(Continued(calls)):
            parts = [self._hidden(self.embed(ids[at]), positions[at]) for at in (slice(0, cut), slice(cut, None))]
        return _furthest(torch.cat(parts), expected)

    def _tried(self, action: Callable[[], Any]) -> Any:
        """What it gives. Raises ModelError, of one sentence, whatever transformers raises."""
        try:
            return action()
        except ModelError as e:
            raise ModelError(f"{self.spec.architecture} cannot run by transformers' own code: {e}") from e
        except Exception as e:
            own_table = isinstance(e, KeyError) and NAME in str(e)
            why = "it chooses its attention from a table of its own" if own_table else _said(e)
            raise ModelError(f"{self.spec.architecture} cannot run by transformers' own code: {why}") from e


def _furthest(hidden: Tensor, expected: Tensor) -> float:
    """Of [n, hidden] each: how far a token's are apart at most, as a part of their size."""
    apart = (hidden - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    return float(apart.nan_to_num(float("inf")).max())


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"


def _make(spec: TransformersSpec, dtype: torch.dtype) -> Any:
    """With its head, on the meta device."""
    import transformers

    register()
    kind = getattr(transformers, spec.architecture)
    config = transformers_config({k: v for k, v in spec.config.items() if k != "quantization_config"}, kind.__name__)
    with torch.device("meta"):
        return kind._from_config(config, attn_implementation=NAME, dtype=dtype).eval()


def _keep_in_fp32(network: Any, dtype: torch.dtype) -> None:
    """What transformers keeps so when it loads a checkpoint in 16 bits."""
    names = set(network._keep_in_fp32_modules_strict or ()) if dtype is not torch.float32 else set()
    names |= set(network._keep_in_fp32_modules or ()) if dtype is torch.float16 else set()
    for name, module in network.named_modules():
        if names & set(name.split(".")):
            module.float()


def _initialise_buffers(network: Any) -> None:
    """Tables that no checkpoint has, as transformers makes them when it loads one."""
    for parameter in network.parameters():
        parameter._is_hf_initialized = True
    network.initialize_weights()


def _some_tokens(vocab_size: int, device: torch.device) -> list[Tensor]:
    """Of each request that is tried; the first ids are often special ones."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randint(min(16, vocab_size // 2), vocab_size, (n,), generator=generator) for n in LENGTHS]
    return [ids.to(device) for ids in found]
