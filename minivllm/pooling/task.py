"""What a model is served for: to generate text, to embed texts, or to score pairs of them. Decided before anything is
loaded, since each is a different engine. No torch here."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from minivllm.config import Decision, EngineConfig
from minivllm.errors import ConfigError
from minivllm.models.encoder_spec import encoder_named

GENERATE, EMBED, SCORE = "generate", "embed", "score"
ALIASES = ("minilm", "all-minilm-l6-v2")  # of the loader's, those that embed


def choose_task(config: EngineConfig) -> Decision:
    """model.task, or what the model's architecture is made for. Raises ConfigError for a task that it is not made for.

    A model that cannot be found or read counts as one that generates: loading it says what is wrong.
    """
    asked, path = config.model.task, config.model.path
    encoder = _encoder(path)
    if encoder is None:
        if asked == SCORE:
            raise ConfigError(
                f"model.task=score needs a model with a classification head; {path} is none. Under model.task=embed "
                "scores are cosine similarities"
            )
        reason = "as configured" if asked != "auto" else "a decoder with a language model's head"
        return Decision("model.task", GENERATE if asked == "auto" else asked, reason)
    made_for = EMBED if encoder == "BertModel" else SCORE
    if asked not in ("auto", made_for):
        raise ConfigError(f"model.task={asked}, but {path} is a {encoder}, which can only {made_for}")
    return Decision("model.task", made_for, f"a {encoder}")


def refuse_pooling(config: EngineConfig) -> None:
    """For an engine that generates. Raises ConfigError if the configuration asks for one that pools."""
    task = choose_task(config).value
    if task != GENERATE:
        raise ConfigError(
            f"{config.model.path} runs under model.task={task}: LLM(...).embed() and .score() in Python, or "
            "`python -m minivllm.serve`; it generates no text"
        )
    if config.model.pooling != "auto":
        raise ConfigError(f"model.pooling={config.model.pooling} needs model.task=embed")


def _encoder(path: str) -> str | None:
    """The architecture, if the model is an encoder."""
    if path in ALIASES:
        return "BertModel"
    local = Path(path).expanduser()
    if local.is_dir():
        return _read(local / "config.json")
    if local.exists() or path.count("/") != 1 or path.startswith((".", "/", "~", "dummy:")) or path.endswith(".gguf"):
        return None
    return _of_hub(path)


@functools.cache
def _of_hub(path: str) -> str | None:
    """Its config.json alone, asked for once a process."""
    from minivllm import waiting

    waiting.settle()  # before torch, which the loader imports
    from minivllm.loading import hub, sources

    if not sources.looks_like_hub_id(path):
        return None
    return _read(hub.download(path, ("config.json",)) / "config.json")


def _read(path: Path) -> str | None:
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return encoder_named(config) if isinstance(config, dict) else None
