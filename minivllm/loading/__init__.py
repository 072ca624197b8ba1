"""Finding models, fetching them, and loading their weights."""

from minivllm.loading.load import LoadedModel, load, load_model
from minivllm.loading.sources import ModelFiles, resolve

__all__ = ["LoadedModel", "ModelFiles", "load", "load_model", "resolve"]
