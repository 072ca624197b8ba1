"""The models. One file each, with the network, its map of weights and the reader of its configs; and one row here.

A row is all that is known of a file before it is imported: the architectures that it is, as Hugging Face names them,
and as GGUF files do. By convention the file has `read_config(reader, architecture)` and, if it names GGUF
architectures, `GGUF` (minivllm/models/gguf.py). No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm import file_keys
from minivllm.models.classifier import ENDING, read_classifier
from minivllm.models.spec import Config, ConfigReader, EncoderSpec, ModelSpec, RopeSpec
from minivllm.registry import Registry

if TYPE_CHECKING:
    from minivllm.models.gguf import GGUFNames


class ModelFile(NamedTuple):
    module: str
    network: str  # its class, made of (spec, dtype, device)
    architectures: Mapping[str, str]  # {Hugging Face's name: its model_type}
    gguf: tuple[str, ...] = ()  # `general.architecture` of the GGUF files that it reads
    generates: bool = True  # False: it reads texts, as an encoder
    config: str = ""  # the module of its `read_config`, if it is to be read without torch

    def read_config(self, reader: ConfigReader, architecture: str) -> Any:
        return import_module(self.config or self.module).read_config(reader, architecture)

    def get(self, name: str) -> Any:
        return getattr(import_module(self.module), name)


MODEL_FILES = (
    ModelFile(
        "minivllm.models.llama",
        "LlamaModel",
        {
            "LlamaForCausalLM": "llama",
            "MistralForCausalLM": "mistral",
            "Qwen2ForCausalLM": "qwen2",
            "Qwen3ForCausalLM": "qwen3",
            "Qwen3MoeForCausalLM": "qwen3_moe",
            "MixtralForCausalLM": "mixtral",
        },
        gguf=("llama", "qwen2", "qwen3"),
        config="minivllm.models.llama_config",
    ),
    ModelFile(
        "minivllm.models.gemma3",
        "Gemma3Model",
        {"Gemma3ForCausalLM": "gemma3_text"},
        gguf=("gemma3",),
        config="minivllm.models.gemma3_config",
    ),
    ModelFile("minivllm.models.gpt2", "GPT2Model", {"GPT2LMHeadModel": "gpt2"}),
    ModelFile("minivllm.models.gpt_neox", "GPTNeoXModel", {"GPTNeoXForCausalLM": "gpt_neox"}),
    ModelFile("minivllm.models.phi", "PhiModel", {"PhiForCausalLM": "phi"}, gguf=("phi2",)),
    ModelFile(
        "minivllm.models.starcoder2",
        "Starcoder2Model",
        {"Starcoder2ForCausalLM": "starcoder2"},
        gguf=("starcoder2",),
    ),
    ModelFile("minivllm.models.opt", "OPTModel", {"OPTForCausalLM": "opt"}),
    ModelFile("minivllm.models.whisper", "WhisperModel", {"WhisperForConditionalGeneration": "whisper"}),
    ModelFile("minivllm.models.falcon", "FalconModel", {"FalconForCausalLM": "falcon"}),
    ModelFile("minivllm.models.bloom", "BloomModel", {"BloomForCausalLM": "bloom"}),
    ModelFile("minivllm.models.gptj", "GPTJModel", {"GPTJForCausalLM": "gptj"}),
    ModelFile(
        "minivllm.models.deepseek",
        "DeepseekModel",
        {"DeepseekV2ForCausalLM": "deepseek_v2", "DeepseekV3ForCausalLM": "deepseek_v3"},
        config="minivllm.models.deepseek_config",
    ),
    ModelFile("minivllm.models.granite", "GraniteModel", {"GraniteForCausalLM": "granite"}, gguf=("granite",)),
    ModelFile(
        "minivllm.models.granite_hybrid",
        "GraniteHybridModel",
        {"GraniteMoeHybridForCausalLM": "granitemoehybrid"},
        gguf=("granitehybrid",),
    ),
    ModelFile("minivllm.models.phi3", "Phi3Model", {"Phi3ForCausalLM": "phi3"}),
    ModelFile("minivllm.models.olmo2", "Olmo2Model", {"Olmo2ForCausalLM": "olmo2"}, gguf=("olmo2",)),
    ModelFile("minivllm.models.olmo", "OlmoModel", {"OlmoForCausalLM": "olmo"}),
    ModelFile("minivllm.models.gemma2", "Gemma2Model", {"Gemma2ForCausalLM": "gemma2"}, gguf=("gemma2",)),
    ModelFile(
        "minivllm.models.cohere",
        "CohereModel",
        {"CohereForCausalLM": "cohere", "Cohere2ForCausalLM": "cohere2"},
    ),
    ModelFile("minivllm.models.glm", "GlmModel", {"GlmForCausalLM": "glm"}),
    ModelFile("minivllm.models.glm", "Glm4Model", {"Glm4ForCausalLM": "glm4"}),
    ModelFile("minivllm.models.smollm3", "SmolLM3Model", {"SmolLM3ForCausalLM": "smollm3"}, gguf=("smollm3",)),
    ModelFile(
        "minivllm.models.qwen3_5",
        "Qwen35Model",
        {"Qwen3_5ForCausalLM": "qwen3_5_text", "Qwen3_5ForConditionalGeneration": "qwen3_5"},
        config="minivllm.models.qwen3_5_config",
    ),
    ModelFile("minivllm.models.qwen2_moe", "Qwen2MoeModel", {"Qwen2MoeForCausalLM": "qwen2_moe"}),
    ModelFile(
        "minivllm.models.bert",
        "BertModel",
        {"BertModel": "bert", "BertForSequenceClassification": "bert"},
        generates=False,
    ),
)

# Transformers' own code: for architectures that no file above is, or for one that is asked to run so.
ANY = ModelFile(
    "minivllm.models.transformers_any", "TransformersNetwork", {}, config="minivllm.models.transformers_any_config"
)

FILES = {name: file for file in MODEL_FILES for name in file.architectures}
ENCODERS = tuple(name for name, file in FILES.items() if not file.generates)
GGUF_FILES = {name: file for file in MODEL_FILES for name in file.gguf}
MODELS: Registry = Registry(
    "architecture",
    {name: f"{file.module}:{file.network}" for name, file in {**FILES, "transformers": ANY}.items()},
)


def read_spec(
    config: Config, generation: Config | None = None, where: str = "config.json", network: str = "auto"
) -> ModelSpec | EncoderSpec:
    """From the contents of config.json and generation_config.json; `where` names the former in errors; network: as
    model.network. Raises ModelError for what is not supported, or would be computed otherwise than it says."""
    reader = ConfigReader(config, generation or {}, where)
    try:
        architecture = _architecture(reader, network)
        file = ANY if network == "transformers" else FILES.get(architecture, ANY)
        spec = file.read_config(reader, architecture)
        spec = replace(spec, classifier=read_classifier(reader)) if _named(config).endswith(ENDING) else spec
        _check_keys(reader, file.architectures.get(architecture, ""))
        return spec
    except (TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as e:
        raise reader.fail(f"a field has a value of the wrong kind ({e})") from e


def _check_keys(reader: ConfigReader, kind: str) -> None:
    """Of both files, once the model's file has read them. kind: its model_type; nothing: transformers' code reads it,
    and config.json whole. Warns of what is not known; raises ModelError."""
    kind, generation = kind.removesuffix("_text") if kind == "qwen3_5_text" else kind, _beside(reader.where)
    if kind:
        text = dict.get(reader.config, "text_config") if "text_config" in reader.read else None
        given = {**(text if isinstance(text, dict) else {}), **reader.config}
        of = [file_keys.CONFIG_OF[kind]] if kind in file_keys.CONFIG_OF else []
        unknown = file_keys.check(reader.where, given, reader.read, *of, file_keys.CONFIG)
        file_keys.warn(reader.where, [*unknown, *_unknown_of_rope(reader.where, given.get("rope_parameters") or {})])
    read = {*file_keys.GENERATION_READ, *file_keys.GENERATION_READ_OF.get(kind, ())}
    of = [file_keys.GENERATION_OF[kind]] if kind in file_keys.GENERATION_OF else []
    file_keys.warn(generation, file_keys.check(generation, reader.generation, read, *of, file_keys.GENERATION))


def _unknown_of_rope(where: str, rope: Config) -> list[str]:
    """rope: of all layers, or by their kinds."""
    by_kind = [of for of in rope.values() if isinstance(of, dict)] or [rope]
    found = [file_keys.check(where, of, file_keys.ROPE_READ, file_keys.ROPE) for of in by_kind]
    return [f"rope_parameters.{key}" for of in found for key in of]


def _beside(where: str) -> str:
    return f"{where.removesuffix('config.json')}generation_config.json"


def read_gguf_names(architecture: str) -> GGUFNames:
    """Of `general.architecture`, one of GGUF_FILES."""
    return GGUF_FILES[architecture].get("GGUF")


def encoder_named(config: Config) -> str | None:
    """The architecture, if it is one of ENCODERS."""
    named = config.get("architectures") or _of_type(config, generates=False)
    return named[0] if isinstance(named, list) and named and named[0] in ENCODERS else None


def headless_named(config: Config) -> str | None:
    """The architecture of a decoder that was saved without its LM head: LlamaForCausalLM of a LlamaModel."""
    name = _named(config)
    whole = f"{name.removesuffix('Model')}ForCausalLM"
    return whole if name.endswith("Model") and whole in FILES else None


def classifier_named(config: Config) -> str | None:
    """The architecture of a decoder that was saved with a head for classes: Qwen2ForCausalLM of a
    Qwen2ForSequenceClassification. By its model_type, since names differ (Gemma3TextForSequenceClassification)."""
    return next(iter(_of_type(config, generates=True)), None) if _named(config).endswith(ENDING) else None


def _architecture(reader: ConfigReader, network: str) -> str:
    config = reader.config
    named = config.get("architectures") or _of_type(config)
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise reader.fail(f'field "architectures" must be a list of names, got {named!r}')
    if network != "own" and named and (network == "transformers" or named[0] not in FILES) and _is_known(named[0]):
        return named[0]
    if network != "transformers" and (
        found := encoder_named(config) or headless_named(config) or classifier_named(config)
    ):
        return found
    if not named or named[0] not in FILES:
        what = f'architecture "{named[0]}"' if named else f"model_type {config.get('model_type')!r}"
        raise reader.fail(f"{what} is not supported. Supported: {', '.join(FILES)}")
    if network == "transformers":
        raise reader.fail(f'transformers has no decoder "{named[0]}" that model.network=transformers could run')
    return named[0]


def _named(config: Config) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _is_known(architecture: str) -> bool:
    from minivllm.models.transformers_any_config import knows

    return knows(architecture)


def _of_type(config: Config, generates: bool | None = None) -> list[str]:
    """The architectures of the config's model_type."""
    files = [file for file in MODEL_FILES if generates in (None, file.generates)]
    return [name for file in files for name, kind in file.architectures.items() if kind == config.get("model_type")]


__all__ = ["ENCODERS", "MODELS", "EncoderSpec", "ModelSpec", "RopeSpec", "read_spec"]
