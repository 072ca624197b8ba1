"""The compiler of structured output of a configuration."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from minivllm import features
from minivllm.config import EngineConfig
from minivllm.engine.vocabulary import load_vocabulary
from minivllm.errors import ConfigError
from minivllm.structured.compiler import GrammarCompiler, is_installed, shared_compiler


def build_grammars(config: EngineConfig, tokenizer_dir: Path, vocab_size: int) -> GrammarCompiler:
    """The compiler of structured output; equal arguments give the same one while it lives. Loads nothing yet.

    Raises ConfigError for a backend that is asked for and not installed.
    """
    asked = config.structured.backend
    names = features.GRAMMARS.names() if asked == "auto" else (asked,)
    backends = [(name, backend) for name in names if is_installed(backend := features.GRAMMARS.get(name))]
    if not backends:
        raise ConfigError(f'structured.backend={asked} is not installed: pip install "minivllm[structured]"')
    load = partial(load_vocabulary, tokenizer_dir, vocab_size)
    key = (tuple(name for name, _ in backends), str(tokenizer_dir), vocab_size)
    return shared_compiler(key, lambda: GrammarCompiler(load, backends))
