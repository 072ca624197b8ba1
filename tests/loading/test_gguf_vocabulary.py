"""Rules: text of a GGUF file's model is cut as its name of a pre-tokenizer says in llama.cpp, and an answer ends where
llama.cpp ends it. Both stand here a second time, in the words of llama.cpp's src/llama-vocab.cpp."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import loading.gguf_fixture as fixture
import pytest
import regex
from loading.gguf_fixture import ALPHABET, CONTROL, MERGES, NORMAL, USER_DEFINED, write_gguf

from minivllm.engine.tokenizer import TextTokenizer
from minivllm.errors import ModelError
from minivllm.loading import resolve
from minivllm.loading.gguf_convert import generation_config
from minivllm.loading.gguf_cuts import CUTS
from minivllm.loading.gguf_file import GGUFFile
from minivllm.loading.gguf_tokenizer import build_tokenizer, pre_tokenizer

SHORT = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = SHORT + WORD + r"|\p{N}{1,3}" + TAIL
QWEN2 = SHORT + WORD + r"|\p{N}" + TAIL
LEAD, UP, LOW = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = f"{LEAD}{UP}*{LOW}+%s|{LEAD}{UP}+{LOW}*%s"  # as tokenizer.json has it: llama.cpp's regexes know no letter case
SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O = CASED % (SHORT + "?", SHORT + "?") + r"|\p{N}{1,3}" + SLASHED
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
# {name: patterns} of models whose network is of a family that is read here from GGUF.
PATTERNS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (GPT2,),
    "phi-2": (GPT2,),  # Phi 2
    "mellum": (GPT2,),  # Llama
    "trillion": (GPT2,),
    "granite-docling": (GPT2,),
    "a.x-4.0": (GPT2,),  # Qwen 2
    "starcoder": (r"\p{N}", GPT2),  # StarCoder 2
    "smollm": (r"\p{N}", GPT2),
    "refact": (r"\p{N}", GPT2),  # Granite 3
    "minerva-7b": (r"\p{N}", GPT2),  # Mistral
    "llama-bpe": (LLAMA3,),
    "falcon3": (LLAMA3,),
    "pixtral": (LLAMA3,),
    "midm-2.0": (LLAMA3,),
    "smaug-bpe": (LLAMA3,),  # SmolLM 3
    "dbrx": (LLAMA3,),  # Granite 4, OLMo 2
    "qwen2": (QWEN2,),  # Qwen 2 and 3
    "deepseek-r1-qwen": (QWEN2,),
    "megrez": (QWEN2,),
    "f2llmv2": (QWEN2,),
    "tekken": (CASED % ("", "") + r"|\p{N}" + SLASHED,),  # Mistral
    "gpt-4o": (GPT4O,),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),  # OLMo 2
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "deepseek-llm": (
        r"[\r\n]",
        r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿͰ-ͳΑ-ΡΣ-ϵЀ-ҁԱ-ՖＡ-Ｚａ-ｚ]+",  # what TEXT has of them
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        "[一-龥ࠀ-一가-퟿]+",
        r"\p{N}+",
    ),
    "deepseek-v3": DEEPSEEK,
    "viking": (BLOOM, r"\p{N}"),
    "poro-chat": (BLOOM,),
    "seed-coder": (SHORT + WORD + r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",),
}
TEXT = [
    *"aBcDsStTlLdDmMxyz",
    *"0123456789",
    *"   \n\n\r\t",
    *"''.,!?/-=$+<^~|`#()。、",
    *"我想かカ가дДéÉ١½🙂",
    "'re",
    "'LL",
    "123",
]


def cut(text: str, patterns: tuple[str, ...]) -> list[str]:
    """Each pattern cuts the pieces that those before it have made (llama.cpp's unicode_regex_split)."""
    pieces = [text]
    for pattern in patterns:
        new: list[str] = []
        for piece in pieces:
            at = 0
            for match in regex.finditer(pattern, piece):
                new += [piece[at : match.start()], match[0]]
                at = match.end()
            new.append(piece[at:])
        pieces = [piece for piece in new if piece]
    return pieces


@pytest.mark.parametrize("name", PATTERNS)
def test_text_is_cut_as_the_pattern_of_its_name_says(name):
    rng = random.Random(name)
    ours = pre_tokenizer(CUTS[name])
    alphabet = dict(zip(pre_tokenizer_alphabet(), range(256), strict=True))
    for length in [*range(12)] * 20 + [200] * 5:
        text = "".join(rng.choices(TEXT, k=length))
        found = [bytes(alphabet[c] for c in piece).decode() for piece, _ in ours.pre_tokenize_str(text)]
        assert found == cut(text, PATTERNS[name]), repr(text)


def pre_tokenizer_alphabet() -> list[str]:
    """GPT-2's letter of each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = itertools.count(256)
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def tokenizer_of(path, pre: str, tokens: list[str], types: list[int] | None, **keys: Any) -> TextTokenizer:
    """Of a GGUF file that is read as the engine reads it."""
    return TextTokenizer.load(resolve(str(write(path, pre, tokens, types, **keys)), path / "cache").tokenizer_dir)


def write(path, pre: str, tokens: list[str], types: list[int] | None, *, model: str = "gpt2", **keys: Any) -> Path:
    """keys: of tokenizer.ggml."""

    def add_tokenizer(writer, pre):
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        if types is not None:
            writer.add_token_types(types)
        if model == "llama":
            writer.add_token_scores([-float(i) for i in range(len(tokens))])
        writer.add_token_merges(MERGES)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixture, "add_tokenizer", add_tokenizer)
        patch.setattr(fixture, "TOKENS", tokens)
        write_gguf(path / "m.gguf", pre=pre, extra={f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    return path / "m.gguf"


PLAIN = [*ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]
ENDS = ["<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"]
ENDS += ["<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"]
ENDS += ["<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["]
FILL_IN = ["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>"]
FILL_IN += ["<REPO>", "<reponame>", "<|file_sep|>"]
NO_ENDS = ["<|start_header_id|>", "<|im_start|>", "<|fim_middle|>", "<start_of_turn>", "<pad>", "<bos>", "[INST]"]


@pytest.mark.parametrize("kind", [CONTROL, NORMAL, USER_DEFINED, None], ids=["control", "normal", "user", "untyped"])
@pytest.mark.parametrize("text", ENDS + FILL_IN)
def test_a_token_of_a_known_text_ends_an_answer_whatever_the_files_one_end_is(tmp_path, text, kind):
    tokens = [*PLAIN, "<other>", text]
    types = None if kind is None else [NORMAL] * len(PLAIN) + [CONTROL, kind]
    tokenizer = tokenizer_of(tmp_path, "gpt-2", tokens, types, eos_token_id=len(PLAIN))
    assert tokenizer.eos_token_ids == (len(PLAIN), len(PLAIN) + 1)
    assert tokenizer.encode(f"hello{text}")[-1] == len(PLAIN) + 1
    assert tokenizer.decode([len(PLAIN) + 1]) == ""  # a control token now, if it was none


@pytest.mark.parametrize("text", NO_ENDS)
def test_another_control_token_ends_nothing(tmp_path, text):
    tokens = [*PLAIN, "<other>", text]
    path = write(tmp_path, "gpt-2", tokens, [NORMAL] * len(PLAIN) + [CONTROL] * 2, eos_token_id=len(PLAIN))
    assert generation_config(GGUFFile(path))["eos_token_id"] == len(PLAIN)


@pytest.mark.parametrize("key", ["eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_an_end_that_a_key_names_needs_no_known_text(tmp_path, key):
    tokens = [*PLAIN, "<other>", "<mine>"]
    keys: dict[str, Any] = {"eos_token_id": len(PLAIN), f"{key}_token_id": len(PLAIN) + 1}
    path = write(tmp_path, "gpt-2", tokens, None, **keys)
    assert generation_config(GGUFFile(path))["eos_token_id"] == [len(PLAIN), len(PLAIN) + 1]


def expected_ends(tokens: list[str], eos: int) -> set[str]:
    """As llama.cpp's comments and code say it, of a file with one key."""
    ends = {tokens[eos], *(text for text in tokens if text in ENDS + FILL_IN)}
    has_call = bool(ends & {"<|call|>", "<|calls|>"})
    if has_call and ends & {"<|return|>", "<|flush|>"}:
        ends.discard("<|end|>")
    if "<|tool_response>" in ends:
        ends.discard("</s>")
    return ends


def test_the_exceptions_hold_for_any_set_of_ends(tmp_path):
    rng = random.Random(0)
    for _ in range(60):
        texts = rng.sample(ENDS + FILL_IN + NO_ENDS, rng.randrange(1, 12))
        tokens, eos = [*PLAIN, "<other>", *texts], len(PLAIN)
        found = generation_config(GGUFFile(write(tmp_path, "gpt-2", tokens, None, eos_token_id=eos)))["eos_token_id"]
        assert {tokens[i] for i in (found if isinstance(found, list) else [found])} == expected_ends(tokens, eos)


def test_the_markup_of_harmony_is_text(tmp_path):
    tokens = [*PLAIN, "<|return|>", "<|call|>", "<|end|>", "<|channel|>", "<|message|>", "<|start|>"]
    tokenizer = tokenizer_of(tmp_path, "gpt-4o", tokens, None, eos_token_id=len(PLAIN))
    assert [tokenizer.decode([i]) for i in range(len(PLAIN), len(tokens))] == ["", "", *tokens[-4:]]


def test_ids_beyond_the_vocabulary_are_no_special_tokens(tmp_path):
    path = write(tmp_path, "gpt-2", [*PLAIN, "<|im_end|>"], None, eos_token_id=9999, bos_token_id=9999)
    assert generation_config(GGUFFile(path)) == {"bos_token_id": None, "eos_token_id": len(PLAIN)}


def test_a_sentencepiece_vocabulary_has_its_usual_ids_where_the_file_has_none(tmp_path):
    path = write(tmp_path, "default", ["<unk>", "<s>", "<over>", "a"], None, model="llama")
    assert generation_config(GGUFFile(path)) == {"bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("said", [None, True, False])
def test_a_text_begins_with_bos_if_the_file_says_so_or_its_pre_tokenizer_does(tmp_path, name, said):
    implied = name in (
        "llama3",
        "llama-v3",
        "llama-bpe",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
        "tekken",
    )
    keys: dict[str, Any] = {"bos_token_id": len(PLAIN)} | ({} if said is None else {"add_bos_token": said})
    tokenizer = build_tokenizer(GGUFFile(write(tmp_path, name, [*PLAIN, "<s>"], None, **keys)))
    adds = implied if said is None else said
    assert tokenizer.encode("hello").ids == [*[len(PLAIN)] * adds, PLAIN.index("hello")]


def test_a_text_ends_with_eos_if_the_file_says_so(tmp_path):
    keys: dict[str, Any] = {
        "bos_token_id": len(PLAIN),
        "eos_token_id": len(PLAIN) + 1,
        "add_bos_token": True,
        "add_eos_token": True,
    }
    tokenizer = tokenizer_of(tmp_path, "gpt-2", [*PLAIN, "<s>", "</s>"], None, **keys)
    assert tokenizer.encode("hello") == [len(PLAIN), PLAIN.index("hello"), len(PLAIN) + 1]
    with pytest.raises(ModelError, match="add_eos_token is set and eos_token_id is not"):
        build_tokenizer(GGUFFile(write(tmp_path, "gpt-2", PLAIN, None, add_eos_token=True)))


WHOLE = ["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken", "minicpm5"]


@pytest.mark.parametrize("name", CUTS)
def test_a_piece_that_is_a_token_is_taken_whole_as_the_name_says(tmp_path, name):
    tokens = [*PLAIN, "xyz"]  # no merge leads there
    ids = build_tokenizer(GGUFFile(write(tmp_path, name, tokens, None, add_bos_token=False))).encode("xyz").ids
    assert ids == ([len(PLAIN)] if name in WHOLE else [PLAIN.index(c) for c in "xyz"])
