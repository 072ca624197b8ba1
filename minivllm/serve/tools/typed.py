"""Calls whose arguments are no JSON: it is made of them, member by member."""

from __future__ import annotations

from minivllm.serve.tools.json_reader import Reading
from minivllm.serve.tools.reader import Call, Functions, TaggedReader
from minivllm.serve.tools.values import Value, json_of, types_of


class TypedReader(TaggedReader):
    """The function's schema says what type a value has (values.py)."""

    def key(self, call: Call, key: str) -> None:
        self.made(call, f"{', ' if call.num_members else '{'}{json_of(key)}: ")
        call.num_members += 1

    def plain(self, call: Call, key: str, end: str, frame: str = "", types: frozenset[str] | None = None) -> Reading:
        """Plain text, and `end`. frame: what stands around it, once on each side, and is no part of it. types: the
        schema's, if the format says nothing else."""
        self.key(call, key)
        value = Value(self.types(call, key) if types is None else types, lambda text: self.made(call, text), frame)
        yield from self.until(end, value.add)
        value.end()

    def __init__(self, functions: Functions):
        super().__init__(functions)
        self._types: dict[tuple[str | None, str], frozenset[str]] = {}  # a schema is large, and a key may come often

    def types(self, call: Call, key: str) -> frozenset[str]:
        if (call.name, key) not in self._types:
            self._types[call.name, key] = types_of(self.functions[call.name], key)
        return self._types[call.name, key]

    def close(self, call: Call) -> None:
        call.has_arguments = True
        self.made(call, "}" if call.num_members else "{}")

    def made(self, call: Call, text: str) -> None:
        call.untold.append(text)
        call.looks_right = True
        self._tell(call)
