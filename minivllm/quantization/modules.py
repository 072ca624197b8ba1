"""What most formats share: their settings, refused by name where they are not understood, and rules by module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from minivllm.errors import ModelError
from minivllm.patterns import patterns
from minivllm.quantization.base import Scheme

HEAD = "lm_head"


class Rule(NamedTuple):
    covers: Callable[[str], object]  # a module's name -> something true if the rule is about it
    scheme: Scheme | None


@dataclass(frozen=True, slots=True)
class ByModule:
    """A format: the first rule that covers a module says its scheme, and `scheme` is that of all others."""

    name: str
    rules: Sequence[Rule]
    scheme: Scheme | None

    def scheme_for(self, module: str) -> Scheme | None:
        return next((rule.scheme for rule in self.rules if rule.covers(module)), self.scheme)


class Settings:
    """quantization_config, field by field. What is not supported is a ModelError of one sentence, with the field."""

    def __init__(self, given: Mapping[str, Any], where: str, name: str):
        self.given, self.where, self.name = given, where, name

    def only(self, field: str, *fine: Any) -> Any:
        """The field's value, which is among these; the first if there is none."""
        value = self.given.get(field, fine[0])
        if not any(type(value) is type(one) and value == one for one in fine):
            raise self.unsupported(f"{field}={value!r} (only {', '.join(map(repr, fine))})")
        return value

    def group_size(self, default: int | None = None) -> int | None:
        """None for -1: one group of all inputs."""
        size = self.given.get("group_size", default)
        if not isinstance(size, int) or isinstance(size, bool) or (size <= 0 and size != -1):
            raise self.unsupported(f"group_size={size!r}")
        return None if size == -1 else size

    def texts(self, field: str) -> tuple[str, ...]:
        """Of a list of names or patterns; none if it is null or missing. Raises TypeError, ValueError."""
        given = self.given.get(field) or ()
        if isinstance(given, str) or not all(isinstance(text, str) for text in given):
            raise TypeError(f"{field} must be a list of names, got {given!r}")
        return tuple(given)

    def unsupported(self, what: str) -> ModelError:
        return ModelError(
            f"{self.where}: quantization_config of {self.name}: {what} is not supported; take the plain model or a "
            ".gguf"
        )


def unconverted(names: Sequence[str]) -> Rule:
    """A list of modules that were left as they are, as transformers reads it: an entry is a pattern from the name's
    start to the end of a part, or the name's end. Raises ValueError."""
    listed = patterns(names)
    return Rule(lambda module: module.endswith(tuple(names)) or any(p.begins_parts(module) for p in listed), None)


def head_unless(is_quantised: bool) -> list[Rule]:
    return [] if is_quantised else [Rule(lambda module: module == HEAD, None)]
