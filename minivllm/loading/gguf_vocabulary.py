"""The vocabulary of a GGUF file as llama.cpp takes it (`llama_vocab::impl::load` in src/llama-vocab.cpp, of November
2026): the ids of special tokens, which tokens are control tokens, and which of them end an answer.

A file names one end of a text, and models end their turns by others. So llama.cpp finds ends by their texts as well,
and makes control tokens of them whatever type the file gives them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from minivllm.loading.gguf_file import LIST, GGUFFile

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type

# Of a sentencepiece vocabulary whose file does not say. (Of byte-level ones llama.cpp takes Falcon's 11 for the end,
# which is a comma elsewhere: here such a file has no end but those found by text.)
DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}}
ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "</s>",
        "<eos>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    )
)
# Of a middle that is to be filled in: {key: texts}, looked for where the file has no id of the key. Of several texts
# that a vocabulary has llama.cpp takes one, by the order of a hash table; here all count.
FILL_IN = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>")
    + ("<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>")
    + ("<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>")
    + ("<|code_middle|>", "<|middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
OLDER_KEYS = {"fim_pre": ("prefix",), "fim_suf": ("suffix",), "fim_mid": ("middle",)}
FILL_IN_ENDS = ("fim_pad", "fim_rep", "fim_sep")
WRITTEN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # gpt-oss's markup: part of the text
# (a text, it is no end where all of these are, its type there): of Harmony's and Solar's markup, and of Gemma 4
NO_ENDS = (
    *(
        ("<|end|>", {end, call}, USER_DEFINED)
        for end in ("<|return|>", "<|flush|>")
        for call in ("<|call|>", "<|calls|>")
    ),
    ("</s>", {"<|tool_response>"}, NORMAL),
)


class Vocabulary(NamedTuple):
    tokens: Sequence[str]
    types: Sequence[int]  # of each token, once llama.cpp has changed them
    ends: tuple[int, ...]  # the file's own end first


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """Raises ModelError."""
    tokens = file.texts("tokenizer.ggml.tokens")
    given = list(file.value("tokenizer.ggml.token_type", LIST, ()))[: len(tokens)]
    types, ids = given + [NORMAL] * (len(tokens) - len(given)), {text: i for i, text in enumerate(tokens)}
    named = [id for key in ("eos", "eot", "eom") if (id := special_id(file, key)) is not None]
    by_text = [ids[text] for text in ENDS if text in ids]
    fill_in, marked = _fill_in(file, ids)
    ends = dict.fromkeys([*named, *sorted(by_text), *fill_in])
    for id in (*by_text, *marked):
        types[id] = CONTROL
    for text in WRITTEN:
        if text in ids:
            types[ids[text]] = USER_DEFINED
    present = {tokens[id] for id in ends}
    for text, others, kind in NO_ENDS:
        if {text, *others} <= present:
            ends.pop(ids[text], None)
            types[ids[text]] = kind
    return Vocabulary(tokens, types, tuple(ends))


def _fill_in(file: GGUFFile, ids: Mapping[str, int]) -> tuple[list[int], list[int]]:
    """(those that end an answer, those found by their texts)."""
    ends, found = [], []
    for key, texts in FILL_IN.items():
        keys = (key, *OLDER_KEYS.get(key, ()))
        named = [id for key in keys if (id := special_id(file, key)) is not None]
        by_text = [] if named else [ids[text] for text in texts if text in ids]
        found += by_text
        ends += [*named, *by_text] if key in FILL_IN_ENDS else []
    return ends, found


def special_id(file: GGUFFile, key: str) -> int | None:
    """The token that the file names, or its kind of vocabulary has; None: neither, or one that is not there."""
    kind = file.value("tokenizer.ggml.model", str)
    for id in (file.value(f"tokenizer.ggml.{key}_token_id", int), DEFAULT_IDS.get(kind, {}).get(key)):
        if id is not None and 0 <= id < len(file.texts("tokenizer.ggml.tokens")):
            return id
    return None


def special_token(file: GGUFFile, key: str) -> str | None:
    id = special_id(file, key)
    return None if id is None else file.texts("tokenizer.ggml.tokens")[id]
