"""Rules: Whisper computes what transformers does (in an engine: tests/engine/test_audio.py); what would be computed
otherwise is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from models.pairs import BF16_TOLERANCE, FP32_TOLERANCE, error_of, random_tokens
from models.speech import CONFIG, extract, oracle_logits, recording, save_whisper
from parallel.threads import all_ranks, on_all
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

from minivllm import LLM
from minivllm.attention.base import kv_spec
from minivllm.attention.cross import CrossReference, slot_shape
from minivllm.attention.groups import make_backend
from minivllm.attention.reference import ReferenceAttention
from minivllm.compile.context import ForwardContext, forward_context
from minivllm.errors import ConfigError, ModelError
from minivllm.loading import load_model
from minivllm.models import read_spec
from minivllm.parallel.group import ONE_DEVICE, Ranks
from minivllm.parallel.placement import Placement
from minivllm.runner.dummies import DummyBatches

CPU = torch.device("cpu")
TOKENS = random_tokens(length=40)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[str, Any]:
    """(folder, transformers' model in fp32)."""
    folder = tmp_path_factory.mktemp("whisper")
    return str(folder), save_whisper(folder)


def logits_of(
    folder: str, samples: np.ndarray, dtype: torch.dtype = torch.float32, ranks: Ranks = ONE_DEVICE
) -> Tensor:
    """[T, vocab]: the logits after each of TOKENS."""
    model = load_model(folder, dtype, CPU, ranks=ranks).model
    layers, batch = model.attention_layers, DummyBatches(0, 64, 64).make(len(TOKENS))
    own = [layer for layer in layers if layer.cross is None]
    backend = make_backend(ReferenceAttention, layers, kv_spec(own, 64, dtype), 1, CPU, None, CrossReference)
    caches: list[Any] = [
        torch.zeros(backend.kv_shape(1), dtype=dtype)
        if layer.cross is None
        else {0: torch.zeros(slot_shape(layer), dtype=dtype)}
        for layer in layers
    ]
    with torch.inference_mode():
        for layer, kv in model.encode(extract(samples)["input_features"][0].to(dtype)):
            caches[layer][0] = kv
        with forward_context(ForwardContext(backend, backend.prepare(batch), caches, layers)):
            hidden = model(model.embed(torch.tensor(TOKENS)), torch.arange(len(TOKENS)))
            return model.logits(hidden)


def test_logits_in_fp32_equal_transformers(pair):
    folder, oracle = pair
    heard = []
    for seed in (0, 1):
        heard.append(oracle_logits(oracle, recording(seed), TOKENS))
        torch.testing.assert_close(logits_of(folder, recording(seed)), heard[-1], rtol=0, atol=FP32_TOLERANCE)
    assert (heard[0] - heard[1]).abs().max() > 1 and heard[0].abs().max() > 1  # it does hear


def test_logits_in_bf16_are_as_near_to_fp32_as_those_of_transformers(pair):
    folder, oracle = pair
    expected = oracle_logits(oracle, recording(0), TOKENS)
    coarse = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16)
    error = error_of(logits_of(folder, recording(0), torch.bfloat16), expected)
    assert error < BF16_TOLERANCE and error < 1.25 * error_of(oracle_logits(coarse, recording(0), TOKENS), expected)


def test_two_ranks_give_the_logits_of_one_device(pair):
    folder, oracle = pair
    for logits in on_all(all_ranks(Placement(tp=2)), lambda own: logits_of(folder, recording(0), ranks=own)):
        expected = oracle_logits(oracle, recording(0), TOKENS)
        torch.testing.assert_close(logits, expected, rtol=0, atol=FP32_TOLERANCE)


# ---------------------------------------------------------------- configs and conflicts

BASE = {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"}


def test_what_a_config_leaves_out_is_what_transformers_takes():
    assert read_spec(BASE) == read_spec(BASE | {k: v for k, v in WhisperConfig().to_dict().items() if v is not None})
    parameters = sum(p.numel() for p in WhisperForConditionalGeneration(WhisperConfig()).parameters())
    assert read_spec(BASE).num_parameters == pytest.approx(parameters, rel=0.002)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "silu"}, 'activation "silu" is not supported'),
        ({"scale_embedding": True}, "scale_embedding=true is not supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=false is not supported"),
        ({"max_source_positions": 1501}, "max_source_positions=1501 is no number of whole seconds"),
        ({"encoder_attention_heads": 5}, "5 heads of the encoder do not divide the hidden size of 384"),
        ({"decoder_attention_heads": 5}, "5 heads do not divide the hidden size of 384"),
        ({"num_mel_bins": 0}, '"num_mel_bins" must be a positive int'),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        read_spec(BASE | changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model.task": "embed"}, "a model with cross attention generates"),
        ({"executor.kind": "naive", "kv.prefix": "none"}, "executor.kind=naive runs decoders alone"),
        ({"executor.kind": "simulated"}, "the cost of an encoder"),
        ({"spec_decode.method": "self_draft", "spec_decode.layers": 1}, "read an encoder's output as well"),
        ({"lora.enabled": True}, "this model's encoder runs outside of steps"),
        ({"model.network": "transformers"}, "transformers has no decoder"),
    ],
)
def test_what_does_not_go_with_an_encoder_is_refused(options, message, pair):
    with pytest.raises((ConfigError, ModelError), match=message):
        LLM(pair[0], overrides={"engine.core": "inproc", **options})


def test_it_is_not_cut_into_stages(pair):
    with pytest.raises(ConfigError, match="not cut into pipeline stages"):
        load_model(pair[0], torch.float32, CPU, ranks=all_ranks(Placement(pp=2))[0])


def test_a_decoder_without_its_encoder_is_none_of_them(pair):
    with pytest.raises(ModelError, match="is_encoder_decoder=true: transformers' own code"):
        read_spec({**CONFIG.to_dict(), "architectures": ["WhisperForCausalLM"]})
