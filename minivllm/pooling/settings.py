"""How a model's hidden states become one vector: what sentence-transformers' files beside it say, or a default.

modules.json lists the steps (Transformer, Pooling, Normalize), the folder of the Pooling step names the rule, and
sentence_bert_config.json the longest text that the model was trained on. What the model was trained to find before a
text, by what the text is for, is in config_sentence_transformers.json. What is not supported, and would change the
vector, is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minivllm.errors import ModelError
from minivllm.files import inside, read_json
from minivllm.pooling.text import NO_PROMPTS, Prompts

# The rule's name in the Pooling step's config.json: the one switch that is on, or (newer) the value of "pooling_mode".
MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
    "lasttoken": "last",
}


@dataclass(frozen=True, slots=True)
class PoolerSettings:
    kind: str  # a name in minivllm.pooling.pool.POOLERS
    normalize: bool
    max_tokens: int | None  # the longest text; None: what the model's positions allow
    reason: str
    prompts: Prompts = NO_PROMPTS


def read_settings(folder: Path | None, is_encoder: bool, asked: str = "auto") -> PoolerSettings:
    """folder: the model's; None for random weights. asked: model.pooling. Raises ModelError."""
    found = _from_files(folder) if folder is not None and (folder / "modules.json").is_file() else None
    if found is None:
        kind = "mean" if is_encoder else "last"
        found = PoolerSettings(kind, True, None, f"no modules.json: {kind}, and unit length, as is usual for its kind")
    return found if asked == "auto" else replace(found, kind=asked, reason="as configured")


def _from_files(folder: Path) -> PoolerSettings:
    path = folder / "modules.json"
    modules = [module if isinstance(module, dict) else {} for module in read_json(path, list)]
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        steps = ", ".join(kinds)
        raise ModelError(f"{path}: only Transformer, Pooling and Normalize are supported, not {steps}")
    pooling = inside(folder, modules[1].get("path", ""), path) / "config.json"
    limits = inside(folder, modules[0].get("path", ""), path) / "sentence_bert_config.json"
    limit = read_json(limits) if limits.is_file() else {}
    if limit.get("do_lower_case"):
        raise ModelError(f"{limits}: do_lower_case=true is not supported (a tokenizer.json that lower-cases is)")
    rule = read_json(pooling)
    mode, prompts = _mode(pooling, rule), _read_prompts(folder / "config_sentence_transformers.json")
    if mode == "mean" and rule.get("include_prompt") is False and any(prompts.by_name.values()):
        raise ModelError(f"{pooling}: include_prompt=false, a mean without the prompt's tokens, is not supported")
    normalize, longest = "Normalize" in kinds, limit.get("max_seq_length")
    return PoolerSettings(mode, normalize, longest, "as modules.json says", prompts)


def _mode(path: Path, config: dict[str, Any]) -> str:
    named = config.get("pooling_mode")
    on = [named] if named else [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
    if len(on) != 1 or on[0] not in MODES:
        what = " + ".join(map(str, on)) or "no pooling"
        raise ModelError(f"{path}: {what} is not supported, only one of mean, cls and lasttoken")
    return MODES[on[0]]


def _read_prompts(path: Path) -> Prompts:
    if not path.is_file():
        return NO_PROMPTS
    config = read_json(path)
    by_name, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(by_name, dict) or not all(isinstance(prompt, str) for prompt in by_name.values()):
        raise ModelError(f'{path}: "prompts" must be texts by their names')
    if default is not None and default not in by_name:
        raise ModelError(f'{path}: default_prompt_name "{default}" is none of its prompts')
    return Prompts(by_name, default)
