"""The models, by the name that Hugging Face gives their architecture."""

from minivllm.models.encoder_spec import ENCODERS, EncoderSpec, encoder_named
from minivllm.models.spec import Config, ModelSpec, RopeSpec
from minivllm.registry import Registry

_LLAMA, _BERT = "minivllm.models.llama:LlamaModel", "minivllm.models.bert:BertModel"

MODELS: Registry = Registry(
    "architecture",
    {
        "LlamaForCausalLM": _LLAMA,
        "MistralForCausalLM": _LLAMA,
        "Qwen2ForCausalLM": _LLAMA,
        "Qwen3ForCausalLM": _LLAMA,
        "Qwen3MoeForCausalLM": _LLAMA,
        "MixtralForCausalLM": _LLAMA,
        "BertModel": _BERT,
        "BertForSequenceClassification": _BERT,
    },
)


def read_spec(config: Config, generation: Config | None = None, where: str = "config.json") -> ModelSpec | EncoderSpec:
    """Of a decoder or of an encoder, as config.json says. Raises ModelError."""
    if encoder_named(config):
        return EncoderSpec.from_hf(config, where)
    return ModelSpec.from_hf(config, generation, where)


__all__ = ["ENCODERS", "MODELS", "EncoderSpec", "ModelSpec", "RopeSpec", "read_spec"]
