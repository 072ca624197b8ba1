"""Tokenizers of the three kinds that the detokenizer tells apart, built in memory."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from minivllm.engine.tokenizer import TextTokenizer

TEXT = [
    "hello world, hello there",
    "the stop string ends",
    "Grüße an die Käseküche",
    "naïve 日本語 text",
    "😀🎉 done 👩‍👩‍👧",
]
EOS = "<|end|>"


@cache
def byte_level() -> TextTokenizer:
    """GPT-2's, Llama 3's, Qwen's and SmolLM2's kind: merges over bytes, so that any bytes can come out."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[EOS], show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return TextTokenizer(tokenizer, {"eos_token": EOS}, {}, ())


@cache
def byte_fallback() -> TextTokenizer:
    """Llama 2's, Mistral's and Gemma's kind: characters, words with a leading U+2581, and bytes for all else."""
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    chars = ["\u2581", *map(chr, range(0x21, 0x7F)), "é", "語"]
    merges = [("l", "l"), ("h", "e"), ("\u2581", "he"), ("\u2581he", "ll"), ("o", "p"), ("\u2581", "\u2581")]
    vocab = ["<unk>", "<s>", "</s>", *bytes_, *chars, *(a + b for a, b in merges)]
    ids = {token: i for i, token in enumerate(vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True}
    return TextTokenizer(tokenizer, config, {}, ())


@cache
def word_piece() -> TextTokenizer:
    """BERT's kind, whose decoder looks at neighbours: no table of bytes can do it."""
    words = ["[UNK]", "[SEP]", "hello", "world", "##ing", "##s", "stop", "sing", "日", "##本", ".", ","]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens([AddedToken("[SEP]", special=True)])
    return TextTokenizer(tokenizer, {"eos_token": "[SEP]"}, {}, ())


def save(tokenizer: TextTokenizer, folder: Path, **files: object) -> Path:
    """As a model folder: tokenizer.json and the named JSON files (tokenizer_config=..., generation_config=...)."""
    tokenizer._tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
