"""XGrammar for a process that compiles grammars and fills no masks. Its import brings torch and transformers, which
only masks and tokenizers need: 3 seconds of a processor and 263 MB, of which 0.4 seconds and 56 MB remain without them.

Their names are there while it is imported, and stand for nothing. What cannot be imported so, as a later version may
not, is imported in earnest.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

UNUSED = ("torch", "transformers")


class _Nothing:
    """Whatever is made, called or derived from while modules are imported."""

    def __init__(self, *args: Any, **options: Any) -> None: ...
    def __call__(self, *args: Any, **options: Any) -> _Nothing:
        return self


class _Unused(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (_Nothing,), {})  # a class: annotations and isinstance ask for one
        setattr(self, name, found)
        return found


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in UNUSED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Unused(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def import_xgrammar() -> None:
    """In a process of its own; one that has torch already loses nothing."""
    if "torch" in sys.modules:
        return
    before, finder = set(sys.modules), _Finder()
    with contextlib.suppress(Exception):
        sys.modules["torch"] = None  # its FFI does without, if there is none
        importlib.import_module("tvm_ffi")
    del sys.modules["torch"]
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module("xgrammar")
    except Exception:
        for name in set(sys.modules) - before:
            del sys.modules[name]
    finally:
        sys.meta_path.remove(finder)
