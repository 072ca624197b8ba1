"""Registry[T]: the options of one axis, by name, imported on first use.

A registry holds strings ("package.module:attribute"), so that naming an option costs no import: `python -m minivllm
features` lists Triton and CUDA parts on a machine that has neither. Only the composition root (`engine/build/`) calls
`get`; everything below it receives built objects.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Generic, TypeVar

from minivllm.errors import ConfigError

T = TypeVar("T")
LONGEST_NAME = 200


def did_you_mean(name: str, known: Iterator[str] | list[str] | tuple[str, ...]) -> str:
    """' Did you mean "x"?' for the closest known name, or ''."""
    if len(name) > LONGEST_NAME:  # comparing takes the square of its length
        return ""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f' Did you mean "{close[0]}"?' if close else ""


class Registry(Generic[T]):
    def __init__(self, axis: str, options: dict[str, str | type[T]], pair: str | None = None):
        """pair: "module:attribute" of a function that makes one option of two, which is then named "first,second"."""
        self.axis = axis
        self._options: dict[str, Any] = dict(options)
        self._pair = pair

    def register(self, name: str, target: str | Any) -> None:
        """Add an option, from inside or outside the package. `target`: 'module:attr' or the object itself."""
        if name in self._options:
            raise ConfigError(f'{self.axis}: option "{name}" is registered already')
        self._options[name] = target

    def unregister(self, name: str) -> None:
        del self._options[name]

    def names(self) -> tuple[str, ...]:
        return tuple(self._options)

    def parts(self, name: str) -> tuple[str, ...]:
        """The options that `name` is made of: itself, or both of a pair."""
        return tuple(name.split(",", 1)) if self._pair else (name,)

    def get(self, name: str) -> Any:
        """The class or function behind `name`. Raises ConfigError for an unknown name, with the nearest known one, and
        for two that make no pair."""
        first, *second = self.parts(name)
        return (
            _imported(self._pair)(self._one(first), self._one(*second)) if second and self._pair else self._one(first)
        )

    def _one(self, name: str) -> Any:
        if name not in self._options:
            hint = did_you_mean(name, self.names())
            raise ConfigError(f'{self.axis}: no option "{name}".{hint} Options: {", ".join(self.names())}')
        target = self._options[name]
        if isinstance(target, str):
            target = self._options[name] = _imported(target)
        return target


def _imported(target: str) -> Any:
    module, _, attr = target.partition(":")
    return getattr(import_module(module), attr)
