"""What a request wants of the thinking: whether it is shown, how many tokens it may take, how much effort the chat
template is told; and where the grammar of its answer begins."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from minivllm.errors import BadRequest
from minivllm.request import SamplingParams
from minivllm.serve.protocol import ChatRequest
from minivllm.serve.reasoning.answer import ReasoningAnswer, ThinkingTokens
from minivllm.serve.reasoning.reader import ReasoningReader, Start
from minivllm.serve.structured import is_of_raw_text
from minivllm.serve.tools.answer import Answer
from minivllm.structured.params import Pattern, Prelude, StructuredParams

if TYPE_CHECKING:
    from minivllm.engine.tokenizer import TextTokenizer

SWITCHES = ("enable_thinking", "thinking")  # of Qwen's templates and others like them, and of Granite's and DeepSeek's


@dataclass(frozen=True, slots=True)
class Thinking:
    """Of one request to a model that thinks."""

    parser: type[ReasoningReader]
    start: Start
    shown: bool
    functions: Collection[str] = ()  # that the answer may call

    def reader(self) -> ReasoningReader:
        return self.parser(self.start, self.functions)

    def answer(self, rest: Answer) -> Answer:
        return ReasoningAnswer(self.reader(), rest, self.shown)

    def tokens(self, tokenizer: TextTokenizer) -> ThinkingTokens:
        return ThinkingTokens(self.reader, tokenizer)


def thinking(
    body: ChatRequest, prompt: str, parser: type[ReasoningReader] | None, functions: Collection[str] = ()
) -> Thinking | None:
    """prompt: as rendered. functions: that the answer may call. None: nobody here tells this model's thinking from its
    answers. Raises BadRequest for a budget that could not be kept."""
    if parser is None:
        if budget(body) is not None:
            why = "thinking_token_budget needs a model whose thinking can be read"
            raise BadRequest(f"{why}: start the server with --reasoning-parser", "thinking_token_budget")
        return None
    begun = body.messages[-1].content if body.continue_final_message else None
    begun = begun if begun is None or isinstance(begun, str) else "\n".join(part.text or "" for part in begun)
    return Thinking(parser, parser.start_of(prompt, begun), body.include_reasoning is not False, functions)


def budget(body: ChatRequest) -> int | None:
    return None if body.thinking_token_budget == -1 else body.thinking_token_budget


def with_thinking(
    params: SamplingParams, thought: Thinking, max_tokens: int | None, tokenizer: TextTokenizer
) -> SamplingParams:
    """With special tokens in the text if the format's markers are such; and with the thinking in front of the grammar
    that holds the answer, or of a free answer if something of the request begins with it."""
    parser, special = thought.parser, partial(special_id, tokenizer)
    if any(special(marker) is not None for marker in parser.markers):
        params = params.replace(skip_special_tokens=False)
    if thought.start is Start.BEHIND:
        return params
    if params.structured is not None:
        if is_of_raw_text(params.structured):
            thought = replace(thought, functions=())  # no call leads out of it
        prelude = prelude_of(thought, special, max_tokens, holds=True)
        return params.replace(structured=msgspec.structs.replace(params.structured, prelude=prelude))
    if (field := begins_behind(params, max_tokens, tokenizer)) is None:
        return params
    prelude = prelude_of(thought, special, max_tokens, holds=False)
    return params.replace(structured=StructuredParams(prelude=prelude, field=field))


def begins_behind(params: SamplingParams, max_tokens: int | None, tokenizer: TextTokenizer) -> str | None:
    """The field of a request for a free answer for which the engine must know, token by token, where the thinking ends.
    Stop strings are not among them: text is enough (engine/detokenizer.py). Nor is any of them where no grammar can
    follow the tokens: they are about the whole output then."""
    if max_tokens is not None:
        return "thinking_token_budget"
    ends = () if params.ignore_eos else tokenizer.eos_token_ids
    asked = {
        "min_tokens": params.min_tokens,
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": params.biases_to_end(ends),
    }
    field = next((name for name, value in asked.items() if value), None)
    return field if field and tokenizer.has_bytes and tokenizer.eos_token_ids else None


def prelude_of(thought: Thinking, special: Callable[[str], int | None], max_tokens: int | None, holds: bool) -> Prelude:
    """holds: the answer is held to something, so that nothing but an ending, or a call of the format's own, leads out
    of the thinking."""
    parser = thought.parser
    specials = {marker: token for marker in parser.markers if (token := special(marker)) is not None}
    pattern = partial(pattern_of, specials=specials)
    is_fresh = thought.start is Start.FRESH
    calls = parser.calls(thought.functions) if thought.functions else ()
    leavings = calls if holds else (*parser.leavings, *calls)
    spelled = [(ending,) for ending in parser.endings if ending in specials]  # the reader takes them in letters, too
    return Prelude(
        openings=tuple(part for opening in parser.openings for part in pattern(opening)) if is_fresh else (),
        endings=(*map(pattern, parser.endings), *spelled),
        leavings=tuple(map(pattern, leavings)),
        farewell=pattern(parser.farewell),
        before=pattern(parser.before) if is_fresh else (),
        max_tokens=max_tokens,
    )


def pattern_of(text: str, specials: dict[str, int]) -> Pattern:
    if not specials:
        return (text,) if text else ()
    parts = re.split(f"({'|'.join(map(re.escape, specials))})", text)
    return tuple(specials.get(part, part) for part in parts if part)


def special_id(tokenizer: TextTokenizer, text: str) -> int | None:
    """Of the special token that the text is; None: it is none."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 and ids[0] in tokenizer.special_ids else None


def effort_variables(effort: str | None, variables: Collection[str]) -> dict[str, Any]:
    """What a chat template that reads these variables is told of `reasoning_effort`; nothing: it has no use for it."""
    if effort is None:
        return {}
    told: dict[str, Any] = {"reasoning_effort": effort, **dict.fromkeys(SWITCHES, effort != "none")}
    return {name: value for name, value in told.items() if name in variables}
