"""How text is cut before merging: what the names of `tokenizer.ggml.pre` mean (llama.cpp, src/llama-vocab.cpp).

A cut is a list of patterns. Each cuts what those before it have left whole: what matches stands alone, and so does what
lies between two matches. The names are those that llama.cpp's converter gives (`get_vocab_base_pre` in
conversion/base.py) to models whose network is of a family that is read here; a network of Llama's shape can have any of
the tokenizers. Where llama.cpp only comes near a tokenizer.json's pattern, since its regexes know no letter case, the
pattern is the tokenizer.json's. Not here: names whose cut llama.cpp has as code (`kimi-k2`, `afmoe`), and vocabularies
that are not of bytes (`gemma4`, `sarvam-moe`, `whitespace`).
"""

from __future__ import annotations

from typing import NamedTuple


class Cut(NamedTuple):
    patterns: tuple[str, ...]
    is_whole: bool = False  # a piece that is itself a token is taken, whether or not merges lead to it
    adds_bos: bool = False  # where the file does not say
    is_nfc: bool = False  # text is normalised first; llama.cpp does not, the models' tokenizers do


def _class(ranges: str) -> str:
    """The inside of a character class. ranges: of code points, in hexadecimal."""
    return "".join("-".join(chr(int(end, 16)) for end in of.split("-")) for of in ranges.split())


_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CASED = rf"{_LEAD}{_UPPER}*{_LOWER}+%s|{_LEAD}{_UPPER}+{_LOWER}*%s"
_SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SOME_IDEOGRAPHS = _class("4E00-9FA5 0800-4E00 AC00-D7FF")
_CASED_LETTERS = _class(  # as the tokenizer of DeepSeek LLM lists them
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C "
    "38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B "
    "1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 "
    "1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 "
    "2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B "
    "2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 "
    "FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF "
    "1E900-1E943 "
)

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = _SHORT + _WORD + r"|\p{N}{1,3}" + _REST
QWEN2 = _SHORT + _WORD + r"|\p{N}" + _REST
QWEN35 = _SHORT + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = _CASED % ("", "") + r"|\p{N}" + _SLASHED
GPT4O = _CASED % (f"{_SHORT}?", f"{_SHORT}?") + r"|\p{N}{1,3}" + _SLASHED
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
SEED_CODER = _SHORT + _WORD + r"|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
MINICPM5 = _SHORT + _WORD + r"|\p{N}+" + _REST
JAIS2 = _SHORT + _WORD + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
JAIS2 += "".join(rf"|\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")) + r"|\s{1}"
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    rf"\s?[!-/:-~{_class('FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')}]+",
    r"\s+$",
    rf"[{_SOME_IDEOGRAPHS}]+",
    r"\p{N}+",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", rf"[{_SOME_IDEOGRAPHS}]+", r"\p{N}")
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    rf"[{_class('4E00-9FA5 3040-309F 30A0-30FF')}]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]")
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
SUPERBPE = (r"\p{N}+", r"(?=(\d{3})+(?!\d))")

_GPT2 = ("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "gigachat", "a.x-4.0", "mellum", "exaone4")
_DIGITS = ("starcoder", "smollm", "refact", "codeshell", "command-r", "exaone", "minerva-7b", "mellum2")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
_AS_LLAMA3 = ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")
_QWEN2 = ("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2")
_AS_QWEN2 = ("stablelm2", "hunyuan", "solar-open", "grok-2")
CUTS: dict[str, Cut] = {
    "default": Cut(DEFAULT),  # of a file that has no name, too
    **dict.fromkeys((*_GPT2, "granite-docling"), Cut((GPT2,))),
    **dict.fromkeys(_DIGITS, Cut((r"\p{N}", GPT2))),
    **dict.fromkeys(_LLAMA3, Cut((LLAMA3,), is_whole=True, adds_bos=True)),
    **dict.fromkeys(_AS_LLAMA3, Cut((LLAMA3,))),
    **dict.fromkeys(_QWEN2, Cut((QWEN2,), is_nfc=True)),
    **dict.fromkeys(_AS_QWEN2, Cut((QWEN2,))),
    "qwen35": Cut((QWEN35,), is_nfc=True),
    "tekken": Cut((TEKKEN,), is_whole=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), Cut((GPT4O,))),
    "deepseek-llm": Cut(DEEPSEEK_LLM),
    "deepseek-coder": Cut(DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), Cut(DEEPSEEK_V3)),
    "falcon": Cut(FALCON),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), Cut((BLOOM,))),
    "viking": Cut((BLOOM, r"\p{N}")),
    "superbpe": Cut(SUPERBPE),
    "seed-coder": Cut((SEED_CODER,)),
    "minicpm5": Cut((r"\p{N}{1,3}", MINICPM5), is_whole=True),
    "jais-2": Cut((JAIS2,)),
}
