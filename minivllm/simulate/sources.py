"""From what the user wrote to a model's config.json and a tokenizer: weights are neither needed nor looked for.

A name of models.py is enough, and a folder may hold config.json alone. Where it has no tokenizer, text is made of bytes
and made-up words, as a dummy model's (loading/dummy.py): a vocabulary of the model's size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.errors import ModelError
from minivllm.files import read_json
from minivllm.loading.cache import Cache
from minivllm.loading.dummy import SHAPES, TOKENIZER_VERSION, hf_config, write_tokenizer
from minivllm.loading.sources import ALIASES, DUMMY_PREFIX, find_tokenizer, looks_like_hub_id, resolve
from minivllm.registry import did_you_mean
from minivllm.simulate.models import MODELS


@dataclass(frozen=True, slots=True)
class Found:
    name: str  # what users call it
    config: Mapping[str, Any]  # of config.json
    where: str  # for errors
    tokenizer_dir: Path
    tokenizer: str  # where that comes from


def find_model(path: str, tokenizer: str | None = None) -> Found:
    """tokenizer: a folder or Hub id whose tokenizer replaces the model's own. Raises ModelError."""
    folder = Path(path).expanduser()
    if (shape := path.removeprefix(DUMMY_PREFIX)) != path and shape in SHAPES:
        return _found(path, hf_config(shape), path, tokenizer)
    if folder.is_dir():
        own = str(folder) if (folder / "tokenizer.json").is_file() else None
        return _found(folder.resolve().name, _read(folder), str(folder / "config.json"), tokenizer or own)
    if (name := path.lower()) in MODELS:
        return _found(path, MODELS[name], name, tokenizer)
    if not (path in ALIASES or path.startswith(DUMMY_PREFIX) or folder.exists() or looks_like_hub_id(path)):
        raise _unknown(path)
    files = resolve(path, tokenizer=tokenizer)
    assert files.folder is not None, "only a dummy has none"
    return Found(files.name, _read(files.folder), str(files.folder), files.tokenizer_dir, "the model's own")


def _unknown(path: str) -> ModelError:
    return ModelError(
        f'model "{path}": no such folder, and nobody whose sizes are known.{did_you_mean(path.lower(), list(MODELS))} '
        f"Give a folder with config.json, a Hub id (owner/name), or one of {', '.join(MODELS)}"
    )


def _found(name: str, config: Mapping[str, Any], where: str, tokenizer: str | None) -> Found:
    """tokenizer: where it is; None: nowhere."""
    if tokenizer is not None:
        return Found(name, config, where, find_tokenizer(tokenizer), tokenizer)
    size = (config.get("text_config") or config).get("vocab_size")
    if not isinstance(size, int):
        raise ModelError(f"{where}: no field vocab_size, a positive integer")
    made = Cache().entry(f"dummy-tokenizer-v{TOKENIZER_VERSION}-{size}", lambda aside: write_tokenizer(aside, size))
    return Found(name, config, where, made, "bytes and made-up words: the model has none")


def _read(folder: Path) -> Mapping[str, Any]:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: no config.json, which says what a simulated model costs")
    return read_json(folder / "config.json")
