"""The tokenizer inside a GGUF file, as tokenizer.json and tokenizer_config.json.

GGUF stores vocabulary, merges or scores, token types, the ids of special tokens and the chat template; how text is cut
before merging is only named (`tokenizer.ggml.pre`), so the cuts are a table (gguf_cuts.py). An unknown name is an
error: a tokenizer that cuts otherwise than the model's works, and quietly makes the model worse. Built with
`tokenizers` alone. (transformers' own GGUF reader cuts as GPT-2 whatever the name is, and leaves runs of digits whole.)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from minivllm.errors import ModelError
from minivllm.loading.gguf_cuts import CUTS, Cut
from minivllm.loading.gguf_file import LIST, GGUFFile
from minivllm.loading.gguf_vocabulary import (
    CONTROL,
    USER_DEFINED,
    Vocabulary,
    read_vocabulary,
    special_id,
    special_token,
)

TEMPLATE = "tokenizer.chat_template."  # before a template's name
MAX_PIECE = 1024  # characters of a SentencePiece token; models' have at most some dozens


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    build_tokenizer(file).save(str(folder / "tokenizer.json"))
    config = json.dumps(tokenizer_config(file), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(config + "\n", "utf-8")


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """Raises ModelError."""
    kind = file.value("tokenizer.ggml.model", str)
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders or not file.texts("tokenizer.ggml.tokens"):
        raise ModelError(f'{file.path}: tokenizer "{kind}" is not supported. Supported: {", ".join(builders)}')
    try:
        tokenizer = builders[kind](file)
        _add_special(tokenizer, read_vocabulary(file))
        _add_ends(tokenizer, file)
    except ModelError:
        raise
    except Exception as e:  # the library raises plain Exception for tokens and merges that do not fit each other
        raise ModelError(f"{file.path}: the tokenizer cannot be built ({e}). Fetch the file again") from None
    return tokenizer


def adds_bos(file: GGUFFile) -> bool:
    by_kind = file.value("tokenizer.ggml.model", str) == "llama" or _cut(file).adds_bos
    return file.value("tokenizer.ggml.add_bos_token", bool, by_kind and special_id(file, "bos") is not None)


def adds_eos(file: GGUFFile) -> bool:
    return file.value("tokenizer.ggml.add_eos_token", bool, False)


def tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: special_token(file, key) for name, key in names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: token for name, token in special.items() if token is not None},
        "add_bos_token": adds_bos(file),
        "clean_up_tokenization_spaces": False,
        **({"chat_template": t} if (t := _templates(file)) else {}),
    }


def _templates(file: GGUFFile) -> str | list[dict[str, str]] | None:
    """One, or several by their names."""
    default = file.value("tokenizer.chat_template", str)
    named = {key.removeprefix(TEMPLATE): file.value(key, str) for key in file.metadata if key.startswith(TEMPLATE)}
    found = {name: text for name, text in {"default": default, **named}.items() if text}
    return default if not named else [{"name": name, "template": text} for name, text in found.items()]


def _cut(file: GGUFFile) -> Cut:
    """Raises ModelError."""
    if (name := file.value("tokenizer.ggml.pre", str, "default")) not in CUTS:
        raise ModelError(
            f'{file.path}: the pre-tokenizer "{name}" is not known. Use the Hugging Face folder of this model instead'
        )
    return CUTS[name]


def _byte_level(file: GGUFFile) -> Tokenizer:
    cut = _cut(file)
    vocab = {token: i for i, token in enumerate(file.texts("tokenizer.ggml.tokens"))}
    merges = [tuple(merge.split(" ", 1)) for merge in file.texts("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=cut.is_whole))
    if cut.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer(cut)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def pre_tokenizer(cut: Cut) -> Any:
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in cut.patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(file: GGUFFile) -> Tokenizer:
    """Sentencepiece BPE with byte fallback, spaces written as U+2581."""
    tokens = file.texts("tokenizer.ggml.tokens")
    prefix = file.value("tokenizer.ggml.add_space_prefix", bool, True)
    unknown = special_token(file, "unknown") or "<unk>"
    if (longest := max(map(len, tokens))) > MAX_PIECE:
        raise ModelError(f"{file.path}: a token of {longest:,} characters, and at most {MAX_PIECE:,} can be merged")
    merges = merges_from_scores(tokens, file.value("tokenizer.ggml.scores", LIST) or [0.0] * len(tokens))
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer


def merges_from_scores(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Sentencepiece keeps no list of merges: it joins the neighbours whose union has the best score. The same order as
    a list: every way to make a token from two others, best token first."""
    known = {token: i for i, token in enumerate(tokens)}
    order = sorted(range(len(tokens)), key=lambda i: -scores[i])
    merges = []
    for i in order:
        token = tokens[i]
        splits = [(token[:k], token[k:]) for k in range(1, len(token))]
        found = [pair for pair in splits if pair[0] in known and pair[1] in known]
        merges += sorted(found, key=lambda pair: (known[pair[0]], known[pair[1]]))
    return merges


def _add_special(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    def of(kind: int) -> list[AddedToken]:
        texts = [text for text, own in zip(vocabulary.tokens, vocabulary.types, strict=True) if own == kind]
        return [AddedToken(text, normalized=False, special=kind == CONTROL) for text in texts]

    tokenizer.add_special_tokens(of(CONTROL))
    tokenizer.add_tokens(of(USER_DEFINED))


def _add_ends(tokenizer: Tokenizer, file: GGUFFile) -> None:
    """What every text begins and ends with."""
    ids = {}
    for key in [key for key, adds in (("bos", adds_bos(file)), ("eos", adds_eos(file))) if adds]:
        if (text := special_token(file, key)) is None:
            raise ModelError(f"{file.path}: add_{key}_token is set and {key}_token_id is not")
        ids[key] = text
    if ids:
        single, other = (f"{ids.get('bos', '')} {text} {ids.get('eos', '')}".strip() for text in ("$A", "$B"))
        special = [(text, tokenizer.token_to_id(text)) for text in dict.fromkeys(ids.values())]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=f"{single} {other}", special_tokens=special
        )
