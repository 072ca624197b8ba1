"""EncoderSpec: what a model of BERT's kind is besides its weights, read from config.json. The counterpart of ModelSpec.

No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minivllm.models.spec import Config, ConfigReader

# Architecture -> what its checkpoint writes before the names of the encoder's tensors.
ENCODERS = {"BertModel": "", "BertForSequenceClassification": "bert."}
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
DEFAULT_LABELS = 2  # what transformers takes when a config does not say


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    architecture: str  # name in the registry MODELS
    hidden_size: int
    num_layers: int
    num_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    num_token_types: int
    norm_eps: float
    activation: str
    num_labels: int  # of the classification head; 0: the model has none
    sigmoid: bool  # whether the head's logit becomes a probability (as sentence-transformers' CrossEncoder has it)
    dtype: str  # of the checkpoint

    @property
    def num_parameters(self) -> int:
        layer = 4 * self.hidden_size**2 + 2 * self.hidden_size * self.intermediate_size
        tables = self.vocab_size + self.max_position + self.num_token_types
        return self.num_layers * layer + tables * self.hidden_size  # norms and biases are below a thousandth

    @classmethod
    def from_hf(cls, config: Config, where: str = "config.json") -> EncoderSpec:
        """`where` names the file in errors. Raises ModelError for what would be computed otherwise than it says."""
        reader = ConfigReader(config, {}, where)
        try:
            return _read(reader)
        except (TypeError, ValueError, AttributeError) as e:
            raise reader.fail(f"a field has a value of the wrong kind ({e})") from e


def encoder_named(config: Config) -> str | None:
    """The architecture, if it is one of ENCODERS."""
    named = config.get("architectures") or (["BertModel"] if config.get("model_type") == "bert" else [])
    return named[0] if isinstance(named, list) and named and named[0] in ENCODERS else None


def _read(reader: ConfigReader) -> EncoderSpec:
    config, architecture = reader.config, encoder_named(reader.config)
    assert architecture is not None
    _refuse_unsupported(reader)
    hidden, heads = reader.need("hidden_size"), reader.need("num_attention_heads")
    if hidden % heads:
        raise reader.fail(f"{heads} heads do not divide the hidden size of {hidden}")
    return EncoderSpec(
        architecture=architecture,
        hidden_size=hidden,
        num_layers=reader.need("num_hidden_layers"),
        num_heads=heads,
        head_size=hidden // heads,
        intermediate_size=reader.need("intermediate_size"),
        vocab_size=reader.need("vocab_size"),
        max_position=reader.need("max_position_embeddings"),
        num_token_types=reader.optional("type_vocab_size", 2),
        norm_eps=float(config.get("layer_norm_eps", 1e-12)),
        activation=config.get("hidden_act", "gelu"),
        num_labels=_num_labels(config) if architecture != "BertModel" else 0,
        sigmoid=_sigmoid(reader),
        dtype=reader.dtype(),
    )


def _refuse_unsupported(reader: ConfigReader) -> None:
    config = reader.config
    position, activation = config.get("position_embedding_type", "absolute"), config.get("hidden_act", "gelu")
    if config.get("quantization_config"):
        raise reader.fail("the checkpoint is quantised, which is not supported for encoders; take the plain model")
    if position != "absolute":
        raise reader.fail(f'position_embedding_type "{position}" is not supported, only "absolute"')
    if activation not in ACTIVATIONS:
        raise reader.fail(f'hidden_act "{activation}" is not supported. Supported: {", ".join(ACTIVATIONS)}')
    if config.get("is_decoder"):
        raise reader.fail("is_decoder=true: BERT as a decoder is not supported")


def _num_labels(config: Config) -> int:
    labels: Any = config.get("id2label")
    return len(labels) if labels else int(config.get("num_labels", DEFAULT_LABELS))


def _sigmoid(reader: ConfigReader) -> bool:
    """The activation that a CrossEncoder was saved with, by its class name; Sigmoid where the config says nothing."""
    newer, older = reader.config.get("sentence_transformers") or {}, "sbert_ce_default_activation_function"
    name = str(newer.get("activation_fn") or reader.config.get(older) or "Sigmoid").rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise reader.fail(f'the activation "{name}" of a cross-encoder is not supported, only Sigmoid and Identity')
    return name == "Sigmoid"
