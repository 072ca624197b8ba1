"""EAGLE: one decoder layer guesses the model's next hidden state, and its LM head the token (Li et al. 2024).

The layer sees pairs. Pair i is the model's last hidden state of token i with the token that came next, i + 1:

    x_i = W [embedding(token i+1), hidden_i] + b;   g_i = layers(x_i), causal over pairs;   LM head(g_i) -> token i + 2

Behind the known tokens g_i stands in for hidden_(i+1), which the model has not computed, so drafts come one a pass.

Pair i has position i and its K and V lie in slot i of the request's own blocks. All tokens that the target kept in a
step become pairs in that step, so a published block serves both, with one small exception: pair n - 1 of a prefix found
in the cache was made with another request's token n, if the two part there. It makes a guess a little worse and no
token wrong (vLLM computes the last found block again instead).

Weights as published (safetensors or a sharded index): a Llama config.json; [model.]fc.weight [| bias], layers.N.* with
Llama's names but no input_layernorm in layer 0, and embed_tokens.weight, or else the target's. No final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from minivllm.attention.base import AttentionBackend, AttentionSpec
from minivllm.errors import ModelError
from minivllm.files import read_json
from minivllm.layers.embedding import Embedding
from minivllm.layers.linear import Linear, choose_method
from minivllm.layers.rotary import RotaryEmbedding
from minivllm.loading.dummy_weights import fill
from minivllm.loading.safetensors_io import read_tensors, weight_files
from minivllm.models import read_spec
from minivllm.models.checkpoint import Network, WeightMap, load_tensors
from minivllm.models.llama import LLAMA_WEIGHTS, DecoderLayer, LlamaSpec
from minivllm.models.spec import ModelSpec, RopeSpec
from minivllm.plan import Join, StepPlan
from minivllm.spec_decode.base import Drafts, Target
from minivllm.spec_decode.draft_model import DraftModelProposer
from minivllm.upload import upload

if TYPE_CHECKING:
    from minivllm.batch import InputBatch

EMBEDDING = "model.embed_tokens.weight"
WEIGHTS = WeightMap(
    top={"model.embed_tokens": ("embedding", ""), "model.fc": ("fc", "")},
    layer=LLAMA_WEIGHTS.layer,
)


class EagleHead(Network):
    def __init__(
        self,
        spec: LlamaSpec,
        dtype: torch.dtype,
        device: torch.device,
        bias: bool,
        embed: Callable[[Tensor], Tensor] | None,
    ):
        """embed: the target's, with whatever it does to a row; None: a table of its own."""
        super().__init__()
        self.spec, self.weights = spec, WEIGHTS
        self.attention_layers = [
            AttentionSpec(spec.num_heads, spec.num_kv_heads, spec.head_size, spec.head_size**-0.5, window)
            for window in spec.windows
        ]
        method = choose_method(device, dtype).method
        with device:
            self.embedding = Embedding(spec.vocab_size, spec.hidden_size, dtype) if embed is None else None
            size = spec.hidden_size
            self.fc = Linear(2 * size, {"": size}, bias=bias, dtype=dtype, method=method)
            self.rotary = RotaryEmbedding(spec.rope, spec.head_size, spec.max_position, dtype)
            self.layers = nn.ModuleList(DecoderLayer(spec, i, dtype, method) for i in range(spec.num_layers))
        self.layers[0].attention_norm = nn.Identity()
        self._embed = self.embedding if embed is None else embed

    def embed(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Pairs: token_ids [T] int64, hidden [T, hidden] -> x [T, hidden]."""
        return self.fc(torch.cat([self._embed(token_ids), hidden], -1))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, hidden], positions [T] int64 -> [T, hidden]."""
        rotate = self.rotary(positions)
        for layer in self.layers:
            x = layer(x, rotate)
        return x


def load_eagle(
    folder: Path, target: ModelSpec, embed: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device
) -> EagleHead:
    """embed: the target's. Raises ModelError unless the head fits the target."""
    config = read_json(folder / "config.json")
    if config.get("quantization_config"):
        raise ModelError(f"{folder}: an EAGLE head that is quantised is not supported")
    spec = read_spec({**config, "architectures": ["LlamaForCausalLM"]}, where=str(folder / "config.json"))
    for field in ("hidden_size", "vocab_size"):
        if getattr(spec, field) != getattr(target, field):
            raise ModelError(
                f"{folder}: this EAGLE head has {field}={getattr(spec, field)}, the model {getattr(target, field)}"
            )
    files = weight_files(folder)
    names = {name for name, *_ in _named(files)}
    shared = None if EMBEDDING in names else embed
    head = EagleHead(spec, dtype, device, "model.fc.bias" in names, shared).eval()
    load_tensors(head, _named(files), folder)
    head.finish()
    return head


def random_eagle(target: ModelSpec, dtype: torch.dtype, device: torch.device, seed: int) -> EagleHead:
    """A head that guesses at random, for tests and measurements: spec_decode.model=dummy:eagle."""
    head = EagleHead(_one_layer_like(target), dtype, device, True, None).eval()
    fill(head, seed)
    head.finish()
    return head


def _one_layer_like(target: ModelSpec) -> LlamaSpec:
    """Of the target's sizes and, where that is of the Llama family, of its kind. Beside any target an EAGLE head is a
    layer of Llama's."""
    common = {field.name: getattr(target, field.name) for field in fields(ModelSpec)}
    common |= {"num_layers": 1, "windows": target.windows[:1]}
    switches = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "qk_norm"), False)
    plain = {"rms_eps": 1e-6, "rope": RopeSpec(), **switches}
    return LlamaSpec(**common, **{name: getattr(target, name, value) for name, value in plain.items()})


def _named(files: Iterable[Path]) -> Iterator[tuple[str, Tensor, Path]]:
    for name, tensor, file in read_tensors(files):
        yield (name if name.startswith("model.") else f"model.{name}"), tensor, file


class EagleProposer(DraftModelProposer):
    def __init__(self, target: Target, head: EagleHead, attention: AttentionBackend, kv_caches: list[Tensor]):
        super().__init__(target, head, attention, kv_caches, own_kv=True, logits=target.model.logits)
        self.shift = 1  # a draft comes from the pair before it
        self.text: dict[int, list[int]] = {}  # by row: all known tokens
        self.states: dict[str, Tensor] = {}  # of each request that drafts: what its newest pair gave

    def join(self, row: int, join: Join) -> None:
        super().join(row, join)
        self.text[row] = list(join.token_ids)

    def leave(self, row: int) -> None:
        super().leave(row)
        self.text.pop(row, None)

    def propose(self, plan: StepPlan, batch: InputBatch, tokens: Drafts, hidden: Tensor) -> Drafts:
        self._batch, self._plan, self._hidden = batch, plan, hidden
        for req_id, row in zip(batch.req_ids, batch.rows.tolist(), strict=True):
            self.text[row] += tokens.get(req_id, ())
        self.states.clear()
        return super().propose(plan, batch, tokens, hidden)

    def run_model(self, batch: InputBatch) -> Tensor:
        """For timing: pairs of tokens and nothing."""
        blank = torch.zeros(len(batch.token_ids), self.model.spec.hidden_size, dtype=self._caches[0].dtype)
        return self._run(batch, batch.token_ids, blank.to(self._caches[0].device))

    def _run(self, batch: InputBatch, token_ids: np.ndarray | Tensor, hidden: Tensor) -> Tensor:
        def forward(batch: InputBatch) -> Tensor:
            x = self.model.embed(upload(token_ids, hidden.device), hidden)
            return self.model(x, upload(batch.positions, hidden.device))

        return self._run_forward(forward, batch)

    def _catch_up(self, rows: Mapping[str, int], ends: Mapping[str, int], known: Mapping[str, int]) -> Drafts:
        """Pairs of all tokens that the target kept in this step; the newest gives the first draft."""
        plan, token_ids, where = StepPlan(step=0), [], []
        for i, req_id in enumerate(self._batch.req_ids):
            start, end = self._plan.start[req_id], ends[req_id] - (req_id in known)
            plan.num_tokens[req_id], plan.start[req_id] = end - start, start
            token_ids += self.text[rows[req_id]][start + 1 : end + 1]
            first = int(self._batch.query_start[i])
            where += range(first, first + end - start)
        batch = self.inputs.build(plan, self.make_key(plan.total_tokens))
        hidden = self._hidden[upload(np.array(where), self._hidden.device)]
        out = self._run(batch, np.asarray(token_ids, np.int64), hidden)
        drafting = [i for i, req_id in enumerate(batch.req_ids) if req_id in known]
        last = batch.query_start[1:][drafting].astype(np.int64) - 1
        return {r: [t] for r, t in self._guess(out, batch, drafting, last).items()}

    def _pass(self, plan: StepPlan) -> dict[str, int]:
        batch = self.inputs.build(plan, self.make_key(plan.total_tokens))
        newest = np.asarray([plan.drafts[req_id][-1] for req_id in batch.req_ids], np.int64)
        out = self._run(batch, newest, torch.stack([self.states[req_id] for req_id in batch.req_ids]))
        return self._guess(out, batch, range(len(newest)), np.arange(len(newest)))

    def _guess(self, out: Tensor, batch: InputBatch, requests: Iterable[int], where: np.ndarray) -> dict[str, int]:
        """The token that follows each of the pairs `where`, which belong to these requests of the batch."""
        requests = np.asarray(list(requests), np.int64)
        if not len(requests):
            return {}
        states = out[upload(where, out.device)]
        positions = batch.positions_of(where, requests) + 2  # of what follows a pair
        tokens = self._choose(self.logits(states), batch.rows[requests], positions).tolist()
        req_ids = [batch.req_ids[i] for i in requests.tolist()]
        self.states.update(zip(req_ids, states, strict=True))
        return dict(zip(req_ids, tokens, strict=True))
