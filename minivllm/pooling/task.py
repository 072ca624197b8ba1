"""What a model is served for: to generate text, to embed texts, to score pairs of them, or to tell their class. Decided
before anything is loaded, since to generate and to pool have workers of their own. No torch here."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from minivllm.config import Decision, EngineConfig
from minivllm.errors import ConfigError, ModelError
from minivllm.files import read_json
from minivllm.models import classifier_named, encoder_named, headless_named
from minivllm.models.classifier import labels_of

GENERATE, EMBED, SCORE, CLASSIFY = "generate", "embed", "score", "classify"
ALIASES = ("minilm", "all-minilm-l6-v2")  # of the loader's, those that embed


class Made(NamedTuple):
    """What a model can do, first what it does unless told otherwise, and how that is known."""

    tasks: tuple[str, ...]
    what: str


DECODER = Made((GENERATE, EMBED), "a decoder with an LM head")
BERT = Made((EMBED,), "a BertModel")


def choose_task(config: EngineConfig) -> Decision:
    """model.task, or what the model is made for. Raises ConfigError for a task that it cannot do.

    A model that cannot be found or read counts as one that generates: loading it says what is wrong.
    """
    asked, path = config.model.task, config.model.path
    made = _made(path)
    if asked == "auto":
        return Decision("model.task", made.tasks[0], made.what)
    if asked not in made.tasks:
        hint = "; a model with a classification head of one label scores, and under embed scores are cosines"
        hint = hint * (asked == SCORE)
        raise ConfigError(f"model.task={asked}, but {path} is {made.what}: it can {' or '.join(made.tasks)}{hint}")
    return Decision("model.task", asked, "as configured")


def _made(path: str) -> Made:
    if path in ALIASES:
        return BERT
    local = Path(path).expanduser()
    if local.is_dir():
        return _of_folder(local)
    if local.exists() or path.count("/") != 1 or path.startswith((".", "/", "~", "dummy:")) or path.endswith(".gguf"):
        return DECODER
    return _of_hub(path)


@functools.cache
def _of_hub(path: str) -> Made:
    """By two small files, asked for once a process."""
    from minivllm import waiting

    waiting.settle()  # before torch, which the loader imports
    from minivllm.loading import hub, sources

    if not sources.looks_like_hub_id(path):
        return DECODER
    return _of_folder(hub.download(path, ("config.json", "modules.json")))


def _of_folder(folder: Path) -> Made:
    try:
        config = read_json(folder / "config.json")
    except ModelError:
        return DECODER
    if encoder_named(config) == "BertModel":
        return BERT
    if encoder_named(config) or classifier_named(config):
        return _classifier(config)
    if headless_named(config):
        return Made((EMBED,), f"a {config['architectures'][0]}, without an LM head")
    if (folder / "modules.json").is_file():
        return Made((EMBED, GENERATE), "a decoder with sentence-transformers' modules.json")
    return DECODER


def _classifier(config: Mapping[str, Any]) -> Made:
    """One label is a score."""
    try:
        count = len(labels_of(config))
    except (TypeError, ValueError, AttributeError):  # loading it says what is wrong
        count = 0
    what = f"a {config['architectures'][0]} with {count} label{'s' * (count != 1)}"
    return Made((SCORE,) if count == 1 else (CLASSIFY,), what)
