"""Finding models, fetching them, and loading their weights. What loads them is imported on first use: finding a model
needs no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minivllm.loading.sources import ModelFiles, resolve

if TYPE_CHECKING:
    from minivllm.loading.load import LoadedModel, load, load_model, read_checkpoint

_LOADS = ("LoadedModel", "load", "load_model", "read_checkpoint")

__all__ = ["LoadedModel", "ModelFiles", "load", "load_model", "read_checkpoint", "resolve"]


def __getattr__(name: str) -> Any:
    if name not in _LOADS:
        raise AttributeError(f"module 'minivllm.loading' has no attribute {name!r}")
    module = import_module("minivllm.loading.load")
    # All at once: its import has just bound the module itself to `load`.
    globals().update({loads: getattr(module, loads) for loads in _LOADS})
    return globals()[name]
