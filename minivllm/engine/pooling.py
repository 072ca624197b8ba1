"""PoolingEngine: a model that embeds or scores, and all between text and its core. PoolingLLM and AsyncPooler drive it.

text -> tokens, checked -> Text ... vector -> cut to `dimensions`, or compared with another
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm import waiting
from minivllm.config import Decision, EngineConfig
from minivllm.engine.pooling_core import PoolingCore
from minivllm.engine.tokenizer import TextTokenizer
from minivllm.errors import BadRequest, ConfigError, NeverFits
from minivllm.pooling.task import EMBED, SCORE, choose_task
from minivllm.pooling.text import Text

if TYPE_CHECKING:
    import numpy as np

    from minivllm.pooling.model import PoolingModel

Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, {"prompt": text} or {"prompt_token_ids": ids}

# What an engine that pools reads. Any other option that is set is refused: it would do nothing.
OPTIONS = (
    *("model.path", "model.tokenizer", "model.dtype", "model.device", "model.quantization", "model.dense_copy"),
    *("model.task", "model.pooling", "model.max_model_len", "model.seed"),
    *("scheduler.max_num_seqs", "scheduler.max_num_batched_tokens", "executor.num_threads", "debug.check"),
)


class Scoring(NamedTuple):
    """How pairs are scored: what is run, and the scores of the pairs from its vectors."""

    texts: list[Text]
    documents: list[int]  # of each pair, the text that holds its document
    scores: Callable[[Sequence[np.ndarray]], list[float]]


class PoolingEngine:
    """Raises ConfigError for options that do nothing here, and ModelError."""

    def __init__(self, config: EngineConfig):
        refuse_unread(config)
        settled = waiting.settle()  # before torch
        from minivllm.pooling.model import PoolingModel

        task = choose_task(config)
        self.config, self.task = config, task.value
        model = PoolingModel(config, self.task)
        self.decisions = [task, *model.decisions, *([settled] if model.device.type == "cpu" else [])]
        budget = config.scheduler.max_num_batched_tokens
        self.max_model_len = self._decide_length(model, budget)
        self.core = PoolingCore(model, config.scheduler.max_num_seqs, budget, config.debug.check)
        self.model_name, self.info, self.width = model.name, model.info(), model.width
        self.normalized = model.settings.normalize
        self.tokenizer = TextTokenizer.load(model.tokenizer_dir)
        self._vocab_size = model.spec.vocab_size

    def text(self, prompt: Prompt, max_tokens: int | None = None, param: str = "prompt") -> Text:
        """Tokenised and checked. max_tokens: leave out the end of a longer text; -1: of one that the model cannot take.

        Raises BadRequest, which names `param`.
        """
        if isinstance(prompt, Mapping):
            if len(prompt) != 1 or not set(prompt) <= {"prompt", "prompt_token_ids"}:
                raise BadRequest('a prompt dictionary has "prompt" or "prompt_token_ids"', param)
            (prompt,) = prompt.values()
        if max_tokens is not None and max_tokens != -1 and max_tokens < 1:
            name = "truncate_prompt_tokens"
            raise BadRequest(f"{name} must be -1 or at least 1, got {max_tokens}", name)
        most = self.max_model_len if max_tokens in (None, -1) else min(max_tokens, self.max_model_len)
        if isinstance(prompt, str):
            if not prompt:
                raise BadRequest("a text is empty", param)
            ids = self.tokenizer.encode(prompt) if max_tokens is None else self.tokenizer.encode_cut(prompt, most)
            return self._checked(Text(ids), param)
        if isinstance(prompt, Sequence) and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
            return self._checked(Text(list(prompt[: None if max_tokens is None else most])), param)
        raise BadRequest(f"a text is a string or a list of token ids, got {type(prompt).__name__}", param)

    def scoring(self, pairs: Sequence[tuple[str, str]], max_tokens: int | None = None) -> Scoring:
        """Pairs of a query and a document, by the cosine of their vectors, each text being run once; or, by a
        cross-encoder, by its head over both. max_tokens as in `text`. Raises BadRequest."""
        from minivllm.pooling.pool import cosine

        if self.task == SCORE:
            texts = [self._pair(*pair, max_tokens) for pair in pairs]
            return Scoring(texts, list(range(len(texts))), lambda found: [float(vector[0]) for vector in found])
        number = {text: i for i, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
        queries = {query for query, _ in pairs}
        texts = [self.text(text, max_tokens, "query" if text in queries else "documents") for text in number]
        numbers = [(number[query], number[document]) for query, document in pairs]
        return Scoring(texts, [b for _, b in numbers], lambda found: [cosine(found[a], found[b]) for a, b in numbers])

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raises BadRequest for a length that the model's vectors cannot be cut to, or for a model without vectors."""
        if self.task != EMBED:
            raise BadRequest(f"{self.model_name} is a cross-encoder: it scores pairs and embeds nothing", "model")
        if dimensions is not None and not 1 <= dimensions <= self.width:
            what = f"this model's vectors have {self.width}"
            raise BadRequest(f"dimensions must be between 1 and {self.width}, got {dimensions}: {what}", "dimensions")

    def _pair(self, query: str, document: str, max_tokens: int | None) -> Text:
        if not (query and document):
            raise BadRequest("a text is empty", "documents" if query else "query")
        if max_tokens is not None:
            raise BadRequest("a cross-encoder's pairs are not cut: shorten the texts", "truncate_prompt_tokens")
        return self._checked(Text(*self.tokenizer.encode_pair(query, document)), "documents")

    def _checked(self, text: Text, param: str) -> Text:
        length = len(text.token_ids)
        if not length:
            raise BadRequest("a text has no tokens", param)
        if length > self.max_model_len:
            raise NeverFits(
                f"a text of {length} tokens; this model takes {self.max_model_len}. Shorten it, split it, or ask to "
                "have it cut: truncate_prompt_tokens=-1",
                param,
            )
        if (wrong := next((t for t in text.token_ids if not 0 <= t < self._vocab_size), None)) is not None:
            raise BadRequest(f"token id {wrong} is not in the vocabulary of {self._vocab_size}", param)
        return text

    def _decide_length(self, model: PoolingModel, budget: int) -> int:
        asked = self.config.model.max_model_len
        if asked is not None and asked > min(model.spec.max_position, budget):
            raise ConfigError(
                f"model.max_model_len={asked}: the model has {model.spec.max_position} positions, and one step "
                f"{budget} tokens (scheduler.max_num_batched_tokens)"
            )
        length, reason = asked or min(model.max_tokens, budget), "as configured"
        if not asked and budget >= model.max_tokens:
            reason = "what the model was made for"
        elif not asked:
            reason = f"of {model.max_tokens}: a step takes a text whole, and scheduler.max_num_batched_tokens={budget}"
        self.decisions.append(Decision("model.max_model_len", length, reason))
        return length


def refuse_unread(config: EngineConfig) -> None:
    plain, given = EngineConfig().flat(), config.flat()
    unread = [field for field in given if field not in OPTIONS and given[field] != plain[field]]
    if unread:
        raise ConfigError(
            f"{', '.join(unread)}: model.task={choose_task(config).value} has no KV cache and generates nothing, so "
            f"this would do nothing. Leave it out (options that count: {', '.join(OPTIONS)})"
        )


def paired(query: str | Sequence[str], documents: str | Sequence[str]) -> list[tuple[str, str]]:
    """One query with each document, or several with the document at the same place. Raises BadRequest."""
    queries = [query] if isinstance(query, str) else list(query)
    found = [documents] if isinstance(documents, str) else list(documents)
    if not queries or not found:
        raise BadRequest("there is nothing to score: give a query and documents", "documents" if queries else "query")
    if len(queries) == 1:
        queries *= len(found)
    if len(queries) != len(found):
        raise BadRequest(f"{len(queries)} queries, but {len(found)} documents: give one query, or as many", "documents")
    return list(zip(queries, found, strict=True))
