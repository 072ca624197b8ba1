"""NaiveWorker: the model as transformers runs it, one request after the other, each over a cache of its own.

The baseline that everything else is measured against: no batch, no pool, no paging. The control plane stays the
project's: it plans steps and counts blocks, which are a ledger here that no tensor stands behind. What a plan asks to
be computed for a request is one call of the Hugging Face model over that request's DynamicCache. Sampling is the
project's own, so parameters mean the same; with scheduler.max_num_seqs=1 the loop around it is that of `generate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from minivllm.attention.base import AttentionSpec
from minivllm.batch import BatchKey, InputBatch
from minivllm.errors import ModelError
from minivllm.loading import read_checkpoint
from minivllm.loading.sources import DUMMY_PREFIX, ModelFiles
from minivllm.models import MODELS
from minivllm.models.checkpoint import fuse, of_all_experts
from minivllm.models.spec import ModelSpec
from minivllm.plan import AsyncOutput, StepOutput, StepPlan
from minivllm.runner.runner import ModelRunner
from minivllm.runner.worker import Worker


class NaiveWorker(Worker):
    """Keeps a cache for each request, from its join to its leave."""

    def __init__(self, runner: ModelRunner, *parts: Any):
        super().__init__(runner, *parts)
        self._one_by_one: Any = runner.forward

    def execute(self, plan: StepPlan) -> StepOutput | AsyncOutput[StepOutput]:
        self._one_by_one.apply(plan)
        return super().execute(plan)


class OneByOne:
    """A ForwardRunner: each request of a batch by itself, over a DynamicCache that lives from its join to its leave."""

    decision: tuple[str, str] = ("eager", "transformers' own model, as it is written")

    def __init__(self, model: TransformersModel, device: torch.device):
        self.model = model
        self.device = device
        self._caches: dict[str, Any] = {}

    def apply(self, plan: StepPlan) -> None:
        for req_id in plan.leaves:
            self._caches.pop(req_id, None)
        for join in plan.joins:
            self._caches[join.req_id] = self.model.new_cache()

    def key_for(self, num_reqs: int, num_tokens: int, max_query: int, adapted: bool = False) -> BatchKey:
        return BatchKey(num_tokens)

    def warmup(self, run_dummy: Any) -> None:
        """Nothing to warm."""

    def __call__(self, batch: InputBatch) -> Tensor:
        hidden = []
        for i, req_id in enumerate(batch.req_ids):
            begin, end = int(batch.query_start[i]), int(batch.query_start[i + 1])
            hidden.append(self._one(req_id, int(batch.positions[begin]), batch.token_ids[begin:end].tolist()))
        return torch.cat(hidden)  # [T, hidden]

    def _one(self, req_id: str, start: int, token_ids: list[int]) -> Tensor:
        """token_ids from position start on -> their hidden states [len(token_ids), hidden]."""
        cache = self._caches[req_id]
        assert cache.get_seq_length() == start, f"{req_id}: the plan goes on at {start}, its cache does not end there"
        return self.model.hidden(torch.tensor([token_ids], device=self.device), cache)


class TransformersModel:
    """A Hugging Face causal LM as a ModelRunner sees a model. attention_layers say what a token's K and V weigh."""

    def __init__(self, model: Any, spec: ModelSpec):
        self.model = model
        self.attention_layers = [
            AttentionSpec(
                spec.num_heads, spec.num_kv_heads, spec.head_size, spec.head_size**-0.5, window, latent=spec.latent
            )
            for window in spec.windows
        ]

    def new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def hidden(self, ids: Tensor, cache: Any) -> Tensor:
        """ids [1, n], the n tokens after those in the cache -> [n, hidden], the final norm applied."""
        decoder = self.model.get_decoder()
        return decoder(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden] -> [S, vocab] in fp32."""
        return self.model.get_output_embeddings()(hidden).float()


class NoAttention:
    """Stands where a paged attention backend would: transformers attends by itself."""

    graphs: ClassVar[Literal["none"]] = "none"
    block_axis: ClassVar[int] = 0
    host_tables: ClassVar[bool] = True  # the forward reads its tokens there

    def __init__(self, *_: object):  # what backends are built with
        pass

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return None

    def prepare(self, batch: InputBatch) -> None:
        return None


def load_transformers(files: ModelFiles, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """The same weights as minivllm.loading.load() gives our own model, a dummy's random ones included."""
    import transformers

    if files.spec.num_source:
        raise ModelError(f"{files.name}: executor.kind=naive runs decoders alone, and this model has an encoder")
    if files.format is not None:
        raise ModelError(f"{files.name}: transformers' own model is not loaded from {files.format.name} weights")
    if files.is_gguf:
        config = transformers.AutoConfig.from_pretrained(files.folder, dtype=dtype, trust_remote_code=False)
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
        tensors = {name: tensor for name, tensor, _ in read_checkpoint(files)}
        table = MODELS.get(files.spec.network)(files.spec, dtype, torch.device("meta")).weights
        _fill(model, fuse(tensors, table.fused), files)
        return model.to(device).eval()
    if files.weights:
        with _no_progress_bar():
            model = transformers.AutoModelForCausalLM.from_pretrained(
                files.folder, dtype=dtype, trust_remote_code=False
            )
        return model.to(device).eval()
    from minivllm.loading.dummy import hf_config
    from minivllm.loading.dummy_weights import fill

    ours = MODELS.get(files.spec.network)(files.spec, dtype, device)
    fill(ours, seed)
    kind = getattr(transformers, files.spec.architecture)
    model = kind(kind.config_class(**hf_config(files.name.removeprefix(DUMMY_PREFIX)))).to(device, dtype).eval()
    _fill(model, fuse(of_all_experts(ours.checkpoint_tensors()), ours.weights.fused), files)
    return model


def _fill(model: Any, tensors: dict[str, torch.Tensor], files: ModelFiles) -> None:
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = ["lm_head.weight"] if files.spec.tie_embeddings else []
    assert not unexpected and list(missing) in ([], tied), f"missing {missing}, unexpected {unexpected}"


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
