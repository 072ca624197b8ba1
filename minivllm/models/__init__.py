"""The models, by the name that Hugging Face gives their architecture."""

from minivllm.models.spec import ModelSpec, RopeSpec
from minivllm.registry import Registry

_LLAMA = "minivllm.models.llama:LlamaModel"

MODELS: Registry = Registry(
    "architecture",
    {
        "LlamaForCausalLM": _LLAMA,
        "MistralForCausalLM": _LLAMA,
        "Qwen2ForCausalLM": _LLAMA,
        "Qwen3ForCausalLM": _LLAMA,
    },
)

__all__ = ["MODELS", "ModelSpec", "RopeSpec"]
