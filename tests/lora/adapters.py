"""Adapters in PEFT's format with random weights, for dummy:tiny unless told otherwise."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHAPES = {  # dummy:tiny -> (n_out, n_in)
    "self_attn.q_proj": (128, 64),
    "self_attn.k_proj": (64, 64),
    "self_attn.v_proj": (64, 64),
    "self_attn.o_proj": (64, 128),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}
NUM_LAYERS = 4


def write_adapter(
    folder: Path,
    seed: int,
    rank: int = 8,
    targets: Sequence[str] = ALL,
    strength: float = 1.0,
    shapes: dict[str, tuple[int, int]] = SHAPES,
    num_layers: int = NUM_LAYERS,
    **config,
) -> Path:
    """strength 1: the change is about as large as the weights (entries of 1/sqrt(n_in)) that it is added to."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(num_layers):
        for module, (n_out, n_in) in shapes.items():
            if module.rpartition(".")[2] in targets:
                name = f"base_model.model.model.layers.{layer}.{module}"
                tensors[f"{name}.lora_A.weight"] = torch.randn(rank, n_in, generator=generator) / math.sqrt(n_in)
                tensors[f"{name}.lora_B.weight"] = strength * torch.randn(n_out, rank, generator=generator)
                tensors[f"{name}.lora_B.weight"] /= 2 * math.sqrt(rank)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    return folder
