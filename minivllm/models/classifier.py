"""A head that tells classes apart: what a config says of a model that transformers calls ...ForSequenceClassification.

Its logits are of one token: an encoder's first, a decoder's last. What they become, probabilities or what a regression
found, is the config's to say. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.models.spec import ClassifierSpec, Config, ConfigReader

ENDING = "ForSequenceClassification"
DEFAULT_LABELS = 2  # what transformers takes when a config does not say
BY_PROBLEM = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
BY_CLASS = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "identity"}  # of torch.nn


def labels_of(config: Config) -> tuple[str, ...]:
    """Raises ValueError, TypeError or AttributeError for what are no labels."""
    named: Any = config.get("id2label")
    if not named:
        return tuple(f"LABEL_{i}" for i in range(int(config.get("num_labels", DEFAULT_LABELS))))
    by_number = {int(number): str(label) for number, label in named.items()}
    if set(by_number) != set(range(len(by_number))):
        raise ValueError(f"id2label has the numbers {sorted(by_number)}")
    return tuple(by_number[i] for i in range(len(by_number)))


def read_classifier(reader: ConfigReader) -> ClassifierSpec:
    """Raises ModelError."""
    labels = labels_of(reader.config)
    if not labels:
        raise reader.fail("a classification head needs labels, and there are none")
    return ClassifierSpec(labels, _activation(reader, labels))


def _activation(reader: ConfigReader, labels: Sequence[str]) -> str:
    """That of the torch.nn class that sentence-transformers saved a CrossEncoder with; else by what the head was
    trained for; else that of one label, or of several of which one is true."""
    newer, older = reader.config.get("sentence_transformers") or {}, "sbert_ce_default_activation_function"
    saved, problem = newer.get("activation_fn") or reader.config.get(older), reader.config.get("problem_type")
    if saved:
        return _known(reader, "activation of a cross-encoder", str(saved).rpartition(".")[2], BY_CLASS)
    usual = "softmax" if len(labels) > 1 else "sigmoid"
    found = _known(reader, "problem_type", str(problem), BY_PROBLEM) if problem else usual
    return usual if found == "softmax" else found  # of one label a softmax would be 1


def _known(reader: ConfigReader, what: str, name: str, known: dict[str, str]) -> str:
    if name not in known:
        raise reader.fail(f'the {what} "{name}" is not supported, only {", ".join(known)}')
    return known[name]
