"""The worker of executor.kind=naive: transformers' model, attention and cache under the project's control plane."""

from __future__ import annotations

from minivllm.attention.base import AttentionBackend, AttentionSpec
from minivllm.engine.build.worker import WorkerBuilder
from minivllm.kv_groups import KVGroups, one_group
from minivllm.loading import LoadedModel, resolve
from minivllm.lora.slots import NoAdapters
from minivllm.runner.block_moves import NoBlockMoves
from minivllm.runner.head_sampling import SamplingHead
from minivllm.runner.inputs import Rows
from minivllm.runner.memory import Sizes
from minivllm.runner.model_state import NoState
from minivllm.runner.naive_worker import (
    NaiveWorker,
    NoAttention,
    OneByOne,
    TransformersModel,
    load_transformers,
)
from minivllm.runner.prompt_logprobs import PromptLogprobs
from minivllm.runner.runner import ModelRunner
from minivllm.sampling.verify import Verifier, match
from minivllm.spec_decode.base import NoProposer, Recipe


class NaiveWorkerBuilder(WorkerBuilder):
    kind = NaiveWorker

    def load(self) -> LoadedModel:
        asked = self.config.model
        files = resolve(asked.path, tokenizer=asked.tokenizer, network=asked.network)
        model = TransformersModel(load_transformers(files, self.dtype, self.device, asked.seed), files.spec)
        linear = ("transformers", "executor.kind=naive: layers and weights as transformers keeps them")
        weights = ("none", "executor.kind=naive: all weights in the model's dtype")
        told = (files.tokenizer_dir, files.name, files.source, weights, linear, files.seconds)
        return LoadedModel(model, files.spec, *told)

    def choose_attention(self, layers: list[AttentionSpec], recipe: Recipe) -> tuple[str, type[AttentionBackend]]:
        name, reason = "transformers", "executor.kind=naive: what transformers takes for this model"
        return self.decisions.note("runner.attention", name, reason), NoAttention

    def make_groups(self, layers: list[AttentionSpec], recipe: Recipe) -> KVGroups:
        """What transformers keeps of a window is its own affair."""
        return one_group([layer.kind for layer in layers])

    def profile_run(self, *_: object) -> None:
        """The block pool is a ledger: nothing has to be left to forwards."""

    def make_runner(self, loaded: LoadedModel, backend: AttentionBackend, sizes: Sizes, recipe: Recipe) -> ModelRunner:
        model, sampler = loaded.model, self._sampler(loaded)
        inputs, prompt_logprobs = self.make_inputs(self._input_sizes(sizes)), PromptLogprobs(model.logits)
        head = SamplingHead(model, inputs, sampler, Verifier(sampler, match), NoProposer(), prompt_logprobs)
        return ModelRunner(
            model=model,
            forward=OneByOne(model, self.device),
            attention=backend,
            kv_caches=[],
            inputs=inputs,
            rows=Rows(self.config.scheduler.max_num_seqs),
            head=head,
            block_moves=NoBlockMoves(),
            adapters=NoAdapters(),
            model_state=NoState(),
            states=(sampler, prompt_logprobs),
        )
