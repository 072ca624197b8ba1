"""How a format writes its calls, for the grammar that holds a call once begun (structured/calls.py).

A parser says so in `forms`, made of what stands here: texts, of which one comes, JSON, and where the next call may
begin. White space is as the templates write it, or none. A format that is none of JSON has only texts that a call
begins with, and what follows is free.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from minivllm.serve.tools.ask import ToolUse, call_schema, calls_schema
from minivllm.structured.params import Again, Calls, Form, Instance, Pattern, Spelled

Texts = tuple[str, ...]  # of which one comes
Parts = tuple[Texts | Instance | Again, ...]
ANY_OBJECT: dict[str, Any] = {"type": "object"}


class Writing:
    """What the calls of a request are made of."""

    def __init__(self, use: ToolUse, spell: Callable[[str], Pattern]):
        """spell: a text, with the special tokens that the tokenizer has for parts of it."""
        self._schemas, self._parallel, self._spell = use.schemas, use.parallel, spell

    @property
    def names(self) -> list[str]:
        return sorted(self._schemas)

    def one(self, **names: str) -> Instance:
        """A call as an object."""

        def schema(schemas: Mapping[str, Any]) -> dict[str, Any]:
            call, definitions = call_schema(schemas, {}, **names)
            return {**call, "$defs": definitions}

        return self._instance(schema)

    def array(self, first: Mapping[str, Any] | None = None, **names: str) -> Instance:
        """All calls, in an array."""
        return self._instance(lambda schemas: calls_schema(schemas, self._parallel, first, **names))

    def arguments(self) -> Iterator[tuple[str, Instance]]:
        """Of each function: its name, and its arguments, where the name stands outside of JSON."""
        for name, schema in self._schemas.items():
            yield name, Instance(json.dumps(schema), json.dumps(ANY_OBJECT))

    def again(self, *texts: str, to: int = 0) -> tuple[Again, ...]:
        """Behind a call: one of the texts, and another call from part `to` on, if the request takes several."""
        return (Again(self._ways(texts), to),) if self._parallel else ()

    def calls(self, forms: Iterable[Parts]) -> Calls:
        return Calls(forms=tuple(map(self._form, forms)))

    def _form(self, parts: Parts) -> Form:
        return tuple(Spelled(self._ways(part)) if isinstance(part, tuple) else part for part in parts)

    def _ways(self, texts: Texts) -> tuple[Pattern, ...]:
        return tuple(map(self._spell, texts))

    def _instance(self, schema: Callable[[Mapping[str, Any]], Any]) -> Instance:
        any_arguments = dict.fromkeys(self._schemas, ANY_OBJECT)
        return Instance(json.dumps(schema(self._schemas)), json.dumps(schema(any_arguments)))
