"""What a Whisper is to write of a recording, as the tokens that its answer begins with (Radford et al. 2022, figure 1).

    [<|startofprev|> what was said before] <|startoftranscript|> [<|language|> <|task|>] <|notimestamps|>

A model of English alone has neither languages nor tasks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from minivllm.engine.tokenizer import TextTokenizer
from minivllm.errors import BadRequest, ModelError
from minivllm.files import read_json

Task = Literal["transcribe", "translate"]
MULTILINGUAL = 51_865  # tokens, or more, that models of several languages have
LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
LONG_TOKEN = 16  # letters: all tokens of a text are no longer in the mean
START, BEFORE, NO_TIMES = "<|startoftranscript|>", "<|startofprev|>", "<|notimestamps|>"


class Speech:
    """The words of a model's vocabulary that say what to write."""

    def __init__(self, tokenizer: TextTokenizer, folder: Path, vocab_size: int):
        """folder: holds generation_config.json, or config.json where it does not: it says what no transcript has, and
        what none begins with. vocab_size: of the model, whose last tokens are times, which its tokenizer may lack.
        Raises ModelError."""
        self._tokenizer = tokenizer
        self._ids = tokenizer.added_ids
        files = [folder / name for name in ("generation_config.json", "config.json")]  # older folders have the latter
        file = next((file for file in files if file.is_file()), files[0])
        told = read_json(file) if file.is_file() else {}
        self.is_multilingual = bool(told.get("is_multilingual", vocab_size >= MULTILINGUAL))
        self.languages = {m[1]: id for name, id in self._ids.items() if (m := LANGUAGE.fullmatch(name))}
        self.unsaid = _token_ids(told, "suppress_tokens", vocab_size, file)
        self.unsaid_first = _token_ids(told, "begin_suppress_tokens", vocab_size, file)

    def start(self, before: str, most: int) -> list[int]:
        """The tokens before a language. before: text that the transcript goes on from, its last `most` tokens."""
        tail = before[-LONG_TOKEN * most :].strip()
        said = self._tokenizer.encode(f" {tail}", add_special_tokens=False)[-most:] if tail else []
        return [*([self._id(BEFORE), *said] if said else []), self._id(START)]

    def check(self, task: Task) -> None:
        """Raises BadRequest."""
        if task != "transcribe" and not self.is_multilingual:
            raise BadRequest("this model writes English alone, and translates nothing", "model")

    def rest(self, task: Task, language: int | None) -> list[int]:
        """Those behind it. language: its token; None: of a model of English alone."""
        if not self.is_multilingual:
            return [self._id(NO_TIMES)]
        assert language is not None, "a model of several languages is told one"
        return [language, self._id(f"<|{task}|>"), self._id(NO_TIMES)]

    def language(self, name: str) -> int | None:
        """Its token; None: the model knows English alone. name: as in ISO 639. Raises BadRequest."""
        name = name.strip().lower()
        if not self.is_multilingual:
            if name != "en":
                raise BadRequest(f'this model knows English alone, and not "{name[:20]}"', "language")
            return None
        if name not in self.languages:
            known = ", ".join(sorted(self.languages))
            raise BadRequest(f'language "{name[:20]}" is none that this model knows. Known: {known}', "language")
        return self.languages[name]

    def _id(self, name: str) -> int:
        if name not in self._ids:
            raise ModelError(f"the tokenizer has no {name}: it is not a Whisper's")
        return self._ids[name]


def _token_ids(told: Mapping[str, Any], field: str, vocab_size: int, file: Path) -> list[int]:
    """Those of a field that the model has: a list may hold -1 for none."""
    found = told.get(field) or []
    if not isinstance(found, list) or not all(isinstance(id, int) for id in found):
        raise ModelError(f'{file}: field "{field}" must be a list of token ids. Download the model again')
    return [id for id in found if 0 <= id < vocab_size]
