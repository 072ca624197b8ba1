"""Naming an adapter: in a call, and the files of its folder."""

from __future__ import annotations

import msgspec

from minivllm.errors import BadRequest

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter, to be loaded at its first use. Fields and their order are vLLM's.

    lora_int_id, at least 1, stands for the adapter's content: a name that comes with another id or another path than
    it was loaded with is refused, since it can only mean other weights.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if not self.lora_name:
            raise BadRequest("lora_name must not be empty", "lora_name")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise BadRequest(f"lora_int_id must be an integer of at least 1, got {self.lora_int_id!r}", "lora_int_id")
