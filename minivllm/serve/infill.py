"""Filling in the middle: what stands before and behind, in the order and between the tokens that a model was trained
with (prefix, suffix, middle, as in StarCoder's and Qwen-Coder's papers).

Which tokens those are no tokenizer file says; these are the names that models give them.
"""

from __future__ import annotations

from typing import NamedTuple

from minivllm.engine.tokenizer import TextTokenizer
from minivllm.errors import BadRequest


class Marks(NamedTuple):
    prefix: str
    suffix: str
    middle: str


MARKS = (
    Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma, Granite 4
    Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite 3
    Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    Marks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
REPOSITORIES = ("<|repo_name|>", "<repo_name>", "<reponame>")
FILES = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
REPOSITORY_NAME, FILE_NAME = "myproject", "filename"  # as llama.cpp calls them
PADS = ("<|fim_pad|>", "<fim_pad>", "▁<EOT>", "<|endoftext|>")


class Infill(NamedTuple):
    """A model's tokens for it."""

    marks: Marks
    repository: str | None
    file: str | None
    ends: list[int]  # tokens after which the middle is over

    def prompt(self, prefix: str, suffix: str, begun: str = "", extra: tuple[tuple[str, str], ...] = ()) -> str:
        """begun: of the middle. extra: other files, each with its name and text."""
        told = f"{self.marks.prefix}{prefix}{self.marks.suffix}{suffix}{self.marks.middle}{begun}"
        if not (extra and self.file):
            return "".join(text for _, text in extra) + told
        repository = f"{self.repository}{REPOSITORY_NAME}\n" if self.repository else ""
        files = "".join(f"{self.file}{name}\n{text}\n" for name, text in extra)
        return f"{repository}{files}{self.file}{FILE_NAME}\n{told}"


def infill_of(tokenizer: TextTokenizer, field: str) -> Infill:
    """Raises BadRequest, naming the field, for a model that was not made for it."""
    marks = next((marks for marks in MARKS if all(token_of(tokenizer, mark) is not None for mark in marks)), None)
    if marks is None:
        why = "this model's tokenizer has no tokens for filling in the middle (such as <|fim_prefix|>)"
        raise BadRequest(f"{field}: {why}", field)
    repository, file = (
        next((name for name in names if token_of(tokenizer, name) is not None), None) for names in (REPOSITORIES, FILES)
    )
    ends = (token_of(tokenizer, name) for name in (*PADS, repository, file) if name)
    return Infill(marks, repository, file, [token for token in ends if token is not None])


def token_of(tokenizer: TextTokenizer, text: str) -> int | None:
    """None: it is not one token, so the model does not know it."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None
