"""PoolingFrontEnd: a FrontEnd for a model that embeds, scores or classifies: all between text and the engine core's
vectors.

text -> tokens, checked -> Text -> EngineRequest ... Delta -> vector -> compared with another
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from msgspec.structs import replace

from minivllm.engine.messages import Facts
from minivllm.engine.pooled import PooledOutput, PooledProcessor
from minivllm.engine.tokenizer import LONGEST_TOKEN, TextTokenizer
from minivllm.errors import BadRequest, NeverFits
from minivllm.plan import Delta
from minivllm.pooling.task import CLASSIFY, EMBED, SCORE
from minivllm.pooling.text import WHOLE, Cut, Prompts, Text
from minivllm.request import AS_IT_IS, NO_TOKENS, EngineRequest, PoolingParams, sequence_ids

if TYPE_CHECKING:
    import numpy as np

Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, {"prompt": text} or {"prompt_token_ids": ids}


METHODS = {EMBED: "embed() and score()", SCORE: "score() and classify()", CLASSIFY: "classify()"}  # of LLM


class Scoring(NamedTuple):
    """How pairs are scored: what is run, and the scores of the pairs from its vectors."""

    texts: list[Text]
    documents: list[int]  # of each pair, the text that holds its document
    scores: Callable[[Sequence[np.ndarray]], list[float]]


class PoolingFrontEnd:
    def __init__(self, facts: Facts, number: int = 0, clock: Callable[[], float] = time.monotonic):
        """number: of several front ends of one engine. They share nothing, so it makes no difference here. clock: the
        core's."""
        self.clock = clock
        info = facts.info
        self.task, self.width, self.normalized = info["task"], info["width"], info["normalized"]
        self.prompts, self.labels = Prompts(*info["prompts"]), list(info["labels"])
        self.max_model_len, self.model_name = facts.max_model_len, facts.model_name
        self.tokenizer = TextTokenizer.load(Path(facts.tokenizer_dir))
        self.processor = PooledProcessor()
        self._vocab_size = info["vocab_size"]

    def pooling_requests(
        self, texts: Sequence[Text], request_id: str, asked: PoolingParams = AS_IT_IS, client: str = ""
    ) -> list[EngineRequest]:
        """One for each text. Their vectors, together, are expected from now on. client: whose share of the engine they
        take, where scheduler.policy is fair."""
        ids, now = sequence_ids(request_id, len(texts)), self.clock()
        self.processor.add(request_id, ids)
        return [
            EngineRequest(
                req_id,
                list(text.token_ids),
                NO_TOKENS,
                now,
                client=client,
                pooling=replace(asked, second=text.second),
            )
            for req_id, text in zip(ids, texts, strict=True)
        ]

    def process(
        self, deltas: list[Delta], named: Mapping[str, Any] | None = None
    ) -> tuple[list[PooledOutput], list[str]]:
        """What is complete, and the ids that the engine core shall abort. named: there is none."""
        return self.processor.process(deltas)

    def requests(self, *_: Any, **__: Any) -> NoReturn:
        """Raises BadRequest."""
        what = f"{self.model_name} runs under task {self.task}"
        raise BadRequest(f"{what}: it has {METHODS[self.task]}, and generates nothing")

    chat_prompt = requests

    def text(self, prompt: Prompt, cut: Cut = WHOLE, param: str = "prompt", prompt_name: str | None = None) -> Text:
        """Tokenised and checked. prompt_name: of the model's prompts, the one to put before the text.

        Raises BadRequest, which names `param`.
        """
        if isinstance(prompt, Mapping):
            if len(prompt) != 1 or not set(prompt) <= {"prompt", "prompt_token_ids"}:
                raise BadRequest('a prompt dictionary has "prompt" or "prompt_token_ids"', param)
            (prompt,) = prompt.values()
        most = self._most(cut)
        if isinstance(prompt, str):
            if not prompt:
                raise BadRequest("a text is empty", param)
            prompt = self._within_context(self.prompts.before(prompt_name) + prompt, cut, param)
            if most is None:
                return self._checked(Text(self.tokenizer.encode(prompt)), param)
            return self._checked(Text(self.tokenizer.encode_cut(prompt, most, cut.at_start)), param)
        if isinstance(prompt, Sequence) and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
            if prompt_name is not None:
                raise BadRequest("a prompt goes before a text, and these are token ids", "prompt_name")
            kept = slice(None) if most is None else slice(-most, None) if cut.at_start else slice(most)
            return self._checked(Text(list(prompt[kept])), param)
        raise BadRequest(f"a text is a string or a list of token ids, got {type(prompt).__name__}", param)

    def scoring(self, pairs: Sequence[tuple[str, str]], cut: Cut = WHOLE, prompt_name: str | None = None) -> Scoring:
        """Pairs of a query and a document, by the cosine of their vectors, each text being run once; or, by a
        cross-encoder, by its head over both. prompt_name: as in `text`. Raises BadRequest."""
        from minivllm.pooling.pool import cosine

        if self.task == CLASSIFY:
            raise BadRequest(f"{self.model_name} has {len(self.labels)} labels: a score is one number", "model")
        if self.task == SCORE:
            self.prompts.before(prompt_name)
            first = functools.lru_cache(1)(lambda query: self._bare(query, cut, "query"))  # most pairs share one
            texts = [self.pair(*pair, cut, first) for pair in pairs]
            return Scoring(texts, list(range(len(texts))), lambda found: [float(vector[0]) for vector in found])
        number = {text: i for i, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
        queries = {query for query, _ in pairs}
        texts = [self.text(text, cut, "query" if text in queries else "documents", prompt_name) for text in number]
        numbers = [(number[query], number[document]) for query, document in pairs]
        return Scoring(texts, [b for _, b in numbers], lambda found: [cosine(found[a], found[b]) for a, b in numbers])

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raises BadRequest for a length that the model's vectors cannot be cut to, or for a model without vectors."""
        if self.task != EMBED:
            does = "is a cross-encoder: it scores pairs" if self.task == SCORE else "is a classifier: it names classes"
            raise BadRequest(f"{self.model_name} {does} and embeds nothing", "model")
        if dimensions is not None and not 1 <= dimensions <= self.width:
            what = f"this model's vectors have {self.width}"
            raise BadRequest(f"dimensions must be between 1 and {self.width}, got {dimensions}: {what}", "dimensions")

    def check_classes(self) -> None:
        """Raises BadRequest for a model without a classification head."""
        if self.task == EMBED:
            raise BadRequest(f"{self.model_name} embeds: it has no classification head", "model")

    def label_of(self, probs: np.ndarray) -> str:
        """The likeliest class. probs [labels]."""
        return self.labels[int(probs.argmax())]

    def pair(
        self, query: str, document: str, cut: Cut = WHOLE, tokens_of: Callable[[str], Sequence[int]] | None = None
    ) -> Text:
        """As one text, for a classification head over both. tokens_of: the query's, as `_bare` makes them; None: it is
        tokenised for this pair alone. Raises BadRequest."""
        if not (query and document):
            raise BadRequest("a text is empty", "documents" if query else "query")
        first = self._bare(query, cut, "query") if tokens_of is None else tokens_of(query)
        second = self._bare(document, cut, "documents")
        return self._checked(Text(*self.tokenizer.joined(first, second, self._most(cut), cut.at_start)), "documents")

    def _bare(self, text: str, cut: Cut, param: str) -> Sequence[int]:
        tokens = self.tokenizer.bare(self._within_context(text, cut, param))
        if cut.max_tokens is None and len(tokens) > self.max_model_len:
            raise self._too_long(f"{len(tokens)} tokens", param)
        return tokens

    def _within_context(self, text: str, cut: Cut, param: str) -> str:
        """What of a text can be within the model's context, before any of it is tokenised. Raises BadRequest where it
        shall not be cut."""
        most = LONGEST_TOKEN * self.max_model_len
        if len(text) <= most:
            return text
        if cut.max_tokens is None:
            raise self._too_long(f"{len(text):,} characters", param)
        return text[-most:] if cut.at_start else text[:most]

    def _most(self, cut: Cut) -> int | None:
        """Tokens. Raises BadRequest."""
        name, most = "truncate_prompt_tokens", cut.max_tokens
        if cut.side not in ("left", "right"):
            raise BadRequest(f'truncation_side must be left or right, got "{cut.side}"', "truncation_side")
        if most == -1:
            return self.max_model_len
        if most is not None and most < 1:
            raise BadRequest(f"{name} must be -1 or at least 1, got {most}", name)
        if most is not None and most > self.max_model_len:  # vLLM refuses it too
            raise BadRequest(f"{name} is {most}; this model takes {self.max_model_len} tokens", name)
        return most

    def _too_long(self, length: str, param: str) -> NeverFits:
        how = "Shorten it, split it, or ask to have it cut: truncate_prompt_tokens=-1"
        return NeverFits(f"a text of {length}; this model takes {self.max_model_len} tokens. {how}", param)

    def _checked(self, text: Text, param: str) -> Text:
        length = len(text.token_ids)
        if not length:
            raise BadRequest("a text has no tokens", param)
        if length > self.max_model_len:
            raise self._too_long(f"{length} tokens", param)
        if (wrong := next((t for t in text.token_ids if not 0 <= t < self._vocab_size), None)) is not None:
            raise BadRequest(f"token id {wrong} is not in the vocabulary of {self._vocab_size}", param)
        return text


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
