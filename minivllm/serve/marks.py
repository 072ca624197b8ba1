"""Which parser of a registry reads what a model's chat template writes: of tool calls, or of thinking.

A parser's `marks` show that a template writes its format: all texts of one of them. The first parser whose marks a
template has is the template's, so one whose marks another's include stands behind it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from minivllm.registry import Registry


class Choice(NamedTuple):
    parser: Any  # None: there is none
    name: str
    reason: str


def configured(registry: Registry, name: str) -> Choice:
    """Raises ConfigError for a name that is none."""
    return Choice(registry.get(name), name, "as configured")


def found(registry: Registry, template: str, otherwise: str) -> Choice:
    """template: the source. otherwise: why there is no parser for it."""
    for name in registry.names():
        parser = registry.get(name)
        for marks in parser.marks:
            if all(mark in template for mark in marks):
                return Choice(parser, name, f"the chat template has {' and '.join(marks)}")
    return Choice(None, "none", otherwise)
