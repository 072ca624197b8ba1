"""PoolingLLM: what LLM(...) is for a model that embeds or scores, with vLLM's names: LLM.embed and LLM.score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn

from minivllm.engine.frontend import make_config
from minivllm.engine.llm import LLM, as_list
from minivllm.engine.pooling import PoolingEngine, Prompt, paired
from minivllm.engine.pooling_core import PoolingRequest
from minivllm.errors import BadRequest, ConfigError, MinivllmError
from minivllm.pooling.text import Text

if TYPE_CHECKING:
    import numpy as np


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """One text's vector."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput  # .embedding: list[float], at unit length if the model says so
    finished: bool = True


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """How well one document answers its query."""

    request_id: str
    prompt_token_ids: list[int]  # of the document, or of the pair
    outputs: ScoringOutput  # .score: float
    finished: bool = True


class PoolingLLM(LLM):
    """Made by LLM(...), whose arguments it takes. A call returns when all of its texts are done."""

    def __init__(
        self,
        model: str | None = None,
        *,
        preset: str = "v1",
        overrides: Mapping[str, Any] | None = None,
        observers: Sequence[Any] = (),
        **vllm_names: Any,
    ):
        if observers:
            raise ConfigError("observers watch an engine that generates")
        self._engine = engine = PoolingEngine(make_config(model, preset, overrides, vllm_names))
        self.task, self.config, self.decisions, self.info = engine.task, engine.config, engine.decisions, engine.info
        self.max_model_len, self.model_name, self.tokenizer = engine.max_model_len, engine.model_name, engine.tokenizer
        self.stats = engine.core.stats
        self._ids = count()

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Each text's vector, in their order.

        dimensions: only the first numbers, at unit length again if the model's vectors are (Matryoshka).
        truncate_prompt_tokens: leave out the end of texts that have more tokens; -1: more than the model takes.
        Raises BadRequest before anything runs if one of the texts cannot be embedded.
        """
        from minivllm.pooling.pool import cut

        self._engine.check_dimensions(dimensions)
        texts = [self._engine.text(prompt, truncate_prompt_tokens) for prompt in as_list(prompts)]
        vectors = self._run(texts, use_tqdm)
        short = [cut(vector, dimensions, self._engine.normalized).tolist() for vector in vectors]
        return [
            EmbeddingRequestOutput(str(next(self._ids)), list(text.token_ids), EmbeddingOutput(vector))
            for text, vector in zip(texts, short, strict=True)
        ]

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well each document answers the query: by cosine similarity, or by a cross-encoder's head. Each of several
        queries goes with the document at its place. Raises BadRequest."""
        scoring = self._engine.scoring(paired(query, documents), truncate_prompt_tokens)
        scores = scoring.scores(self._run(scoring.texts, use_tqdm))
        return [
            ScoringRequestOutput(str(next(self._ids)), list(scoring.texts[document].token_ids), ScoringOutput(score))
            for document, score in zip(scoring.documents, scores, strict=True)
        ]

    def generate(self, *_: Any, **__: Any) -> NoReturn:
        what = f"{self.model_name} runs under task {self.task}"
        raise BadRequest(f"{what}: it has embed() and score(), and generates nothing")

    chat = beam_search = load_lora = unload_lora = generate

    def list_loras(self) -> list[Any]:
        return []

    def shutdown(self) -> None:
        """Free the model. The object cannot be used afterwards."""
        self._engine = None

    def _run(self, texts: Sequence[Text], use_tqdm: bool) -> list[np.ndarray]:
        from tqdm import tqdm

        core, done = self._engine.core, {}
        for i, text in enumerate(texts):
            core.add(PoolingRequest(str(i), text))
        try:
            with tqdm(total=len(texts), desc="Processed texts", disable=not use_tqdm, dynamic_ncols=True) as bar:
                while core.has_work:
                    finished = core.step().done
                    done.update((pooled.id, pooled) for pooled in finished)
                    bar.update(len(finished))
        finally:  # after an error or Ctrl-C nothing waits for the next call
            core.abort([str(i) for i in range(len(texts))])
        for i in range(len(texts)):
            if done[str(i)].error:
                raise MinivllmError(f"text {i}: {done[str(i)].error}")
        return [done[str(i)].vector for i in range(len(texts))]
