"""What an engine that pools is asked to run. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from minivllm.errors import BadRequest


class Cut(NamedTuple):
    """What becomes of a text of too many tokens."""

    max_tokens: int | None = None  # special tokens among them; -1: as many as the model takes; None: it is refused
    side: str = "right"  # that is left out; "left": its start

    @property
    def at_start(self) -> bool:
        return self.side == "left"


class Prompts(NamedTuple):
    """What a model was trained to find before a text, by the name of what the text is for: "query"
    (sentence-transformers' config_sentence_transformers.json)."""

    by_name: Mapping[str, str]
    default: str | None = None  # the one for a text for which none is named

    def before(self, name: str | None) -> str:
        """Raises BadRequest for a name that there is none of."""
        if name is None:
            return self.by_name[self.default] if self.default is not None else ""
        if name not in self.by_name:
            known = ", ".join(self.by_name) or "none"
            raise BadRequest(f'this model has no prompt of the name "{name}". Prompts: {known}', "prompt_name")
        return self.by_name[name]


WHOLE, NO_PROMPTS = Cut(), Prompts({})


class Text(NamedTuple):
    """A text's tokens, or, for a cross-encoder, those of a pair in one sequence."""

    token_ids: Sequence[int]
    second: int | None = None  # where the second text of a pair begins; None: there is none
