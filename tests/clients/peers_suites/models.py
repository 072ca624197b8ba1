"""The models that peers' tests are given in place of their own: what stands on this machine, or random weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from minivllm.loading import resolve

EMBEDS = "minilm"


def prepare(folder: Path, model: str) -> dict[str, str]:
    """Environment variables that name the models' folders to vllm_server.py, llama_server.py and vllm_plugin.py."""
    return {
        "PEERS_GENERATES": model,
        "PEERS_TOKENIZER": str(resolve(model).tokenizer_dir),
        "PEERS_EMBEDDER": str(resolve(EMBEDS).folder),
        "PEERS_CROSS_ENCODER": str(write_head(folder / "cross-encoder", num_labels=1)),
        "PEERS_CLASSIFIER": str(write_head(folder / "classifier", id2label={0: "Default", 1: "Spoiled"})),
        "PEERS_ADAPTER": str(write_lora(folder / f"adapter-{model.replace(':', '-')}", model)),
    }


def write_head(folder: Path, **labels: Any) -> Path:
    """The embedder's layers below a head of random weights."""
    if not folder.exists():
        import torch
        from transformers import BertForSequenceClassification

        torch.manual_seed(0)
        files = resolve(EMBEDS)
        BertForSequenceClassification.from_pretrained(files.folder, **labels).save_pretrained(folder)
        for path in files.tokenizer_dir.glob("*tokenizer*"):
            shutil.copy(path, folder)
    return folder


def write_lora(folder: Path, model: str) -> Path:
    """A weak adapter of random weights for the model that generates."""
    from lora.adapters import write_adapter

    spec = resolve(model).spec
    shapes = {
        "self_attn.q_proj": (spec.num_heads * spec.head_size, spec.hidden_size),
        "self_attn.v_proj": (spec.num_kv_heads * spec.head_size, spec.hidden_size),
    }
    return write_adapter(folder, 0, 8, ("q_proj", "v_proj"), 0.1, shapes, spec.num_layers)
