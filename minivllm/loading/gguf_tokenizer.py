"""The tokenizer inside a GGUF file, as tokenizer.json and tokenizer_config.json.

GGUF stores vocabulary, merges or scores, token types, the ids of special tokens and the chat template; how text is cut
before merging is only named (`tokenizer.ggml.pre`), so the cuts are a table here. An unknown name is an error: a
tokenizer that cuts otherwise than the model's works, and quietly makes the model worse. Built with `tokenizers` alone.
(transformers' own GGUF reader does not know "smollm" and leaves runs of digits together.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from minivllm.errors import ModelError
from minivllm.loading.gguf_file import LIST, GGUFFile

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
MAX_PIECE = 1024  # characters of a SentencePiece token; models' have at most some dozens

_LETTERS_AND_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
LLAMA3 = _CONTRACTIONS + r"|\p{N}{1,3}" + _LETTERS_AND_REST
QWEN2 = _CONTRACTIONS + r"|\p{N}" + _LETTERS_AND_REST
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
TEKKEN = _CASED + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def gpt2_cut() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def digits_cut() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2_cut()])


def regex_cut(pattern: str) -> Callable[[], Any]:
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# tokenizer.ggml.pre -> how text is cut before merging
CUTS: dict[str, Callable[[], Any]] = {
    "gpt-2": gpt2_cut,
    "default": gpt2_cut,
    "smollm": digits_cut,
    "codeshell": digits_cut,
    "refact": digits_cut,
    "starcoder": digits_cut,
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe"), regex_cut(LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), regex_cut(QWEN2)),
    "tekken": regex_cut(TEKKEN),
}
_NFC = ("qwen2", "deepseek-r1-qwen", "megrez")
# A cut that is itself a token is taken whole, whether or not merges lead to it.
_WHOLE_TOKENS = ("llama3", "llama-v3", "llama-bpe", "tekken")


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
        _add_special(tokenizer, file)
        if adds_bos(file):
            _add_bos(tokenizer, file)
    except ModelError:
        raise
    except Exception as e:  # the library raises plain Exception for tokens and merges that do not fit each other
        raise ModelError(f"{file.path}: the tokenizer cannot be built ({e}). Fetch the file again") from None
    return tokenizer


def adds_bos(file: GGUFFile) -> bool:
    return file.value("tokenizer.ggml.add_bos_token", bool, file.value("tokenizer.ggml.model", str) == "llama")


def tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: special_token(file, key) for name, key in names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: token for name, token in special.items() if token is not None},
        "add_bos_token": adds_bos(file),
        "clean_up_tokenization_spaces": False,
        **({"chat_template": t} if (t := file.value("tokenizer.chat_template", str)) else {}),
    }


def special_token(file: GGUFFile, key: str) -> str | None:
    token_id, tokens = file.value(f"tokenizer.ggml.{key}_token_id", int), file.texts("tokenizer.ggml.tokens")
    return tokens[token_id] if token_id is not None and 0 <= token_id < len(tokens) else None


def _byte_level(file: GGUFFile) -> Tokenizer:
    pre = file.value("tokenizer.ggml.pre", str, "default")
    if pre not in CUTS:
        raise ModelError(
            f'{file.path}: the pre-tokenizer "{pre}" is not known. Use the Hugging Face folder of this model instead'
        )
    vocab = {token: i for i, token in enumerate(file.texts("tokenizer.ggml.tokens"))}
    merges = [tuple(merge.split(" ", 1)) for merge in file.texts("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_TOKENS))
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = CUTS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


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


def _add_special(tokenizer: Tokenizer, file: GGUFFile) -> None:
    tokens, types = file.texts("tokenizer.ggml.tokens"), file.value("tokenizer.ggml.token_type", LIST, ())
    control = [t for t, kind in zip(tokens, types, strict=False) if kind == CONTROL]
    plain = [t for t, kind in zip(tokens, types, strict=False) if kind == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in plain])


def _add_bos(tokenizer: Tokenizer, file: GGUFFile) -> None:
    if (bos := special_token(file, "bos")) is None:
        raise ModelError(f"{file.path}: add_bos_token is set and bos_token_id is not")
    ids = [(bos, tokenizer.token_to_id(bos))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=ids
    )
