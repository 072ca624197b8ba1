"""A tiny random Whisper of transformers, saved to a folder; recordings; and what it writes of them."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from models.pairs import make_random
from tokenizers import AddedToken, Tokenizer
from torch import Tensor
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from minivllm.loading.dummy import write_tokenizer

CONFIG = WhisperConfig(
    vocab_size=340,  # its tokenizer has 320, and Whisper's words behind them where they are wanted
    num_mel_bins=8,
    d_model=64,
    encoder_layers=2,
    encoder_attention_heads=2,
    encoder_ffn_dim=96,
    decoder_layers=3,
    decoder_attention_heads=4,
    decoder_ffn_dim=80,
    max_source_positions=50,  # a second
    max_target_positions=64,
    init_std=0.2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=320,
    suppress_tokens=None,
    begin_suppress_tokens=None,
)
START = CONFIG.decoder_start_token_id
extract = partial(WhisperFeatureExtractor(feature_size=8, chunk_length=1), sampling_rate=16_000, return_tensors="pt")


def save_whisper(folder: Path) -> Any:
    """transformers' model in fp32, every parameter random, saved with a tokenizer. What it hears has weight, and where
    it is."""
    torch.manual_seed(4)  # what it writes differs by what it hears and by its prompt
    oracle = make_random(WhisperForConditionalGeneration(CONFIG).eval())
    with torch.no_grad():
        oracle.model.decoder.embed_positions.weight *= 6
        for layer in oracle.model.decoder.layers:
            layer.encoder_attn.q_proj.weight *= 8
            layer.encoder_attn.out_proj.bias *= 0.1
    oracle.save_pretrained(folder)
    write_tokenizer(folder, 320)
    return oracle


WORDS = ("<|startoftranscript|>", "<|en|>", "<|de|>", "<|haw|>", "<|translate|>", "<|transcribe|>", "<|startofprev|>")
WORDS += ("<|notimestamps|>",)


def save_speaking(folder: Path, **generation: Any) -> dict[str, int]:
    """As save_whisper, with Whisper's words: {word: token}. generation: what generation_config.json says beside what it
    always does."""
    save_whisper(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in WORDS])
    tokenizer.save(str(folder / "tokenizer.json"))
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | generation))
    return {word: tokenizer.token_to_id(word) for word in WORDS}


def recording(seed: int, num_samples: int = 16_000) -> np.ndarray:
    """Ten tones one after the other, at 16,000 samples a second."""
    draw = np.random.default_rng(seed)
    pitches = np.repeat(draw.uniform(100, 7000, 10), num_samples // 10 + 1)[:num_samples]
    return (0.5 * np.sin(2 * np.pi * np.cumsum(pitches) / 16_000)).astype(np.float32)


def sound(samples: np.ndarray, rate: int = 16_000, format: str = "WAV", **how: Any) -> bytes:
    """A file of them."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=format, **how)
    return buffer.getvalue()


def oracle_logits(oracle: Any, samples: np.ndarray, token_ids: list[int]) -> Tensor:
    """[T, vocab]"""
    features = extract(samples)["input_features"].to(oracle.dtype)
    with torch.inference_mode():
        return oracle(input_features=features, decoder_input_ids=torch.tensor([token_ids])).logits[0].float()


def greedy_oracle(oracle: Any, samples: np.ndarray, prompt: list[int], num_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(oracle_logits(oracle, samples, ids)[-1].argmax()))
    return ids[len(prompt) :]
