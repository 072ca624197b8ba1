"""Text to tokens and back, and chat templates, from a Hugging Face folder; without transformers (0.1 s against 2 s).

Reads tokenizer.json (the `tokenizers` library does the work), tokenizer_config.json, special_tokens_map.json,
generation_config.json and config.json (which tokens end a sequence) and chat_template.jinja.

`token_bytes` is what makes streaming exact: in the two kinds of tokenizer that language models use (byte-level BPE, and
SentencePiece with byte fallback) each token is a fixed string of bytes, and the text is their concatenation.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from minivllm import file_keys
from minivllm.engine import tokenizer_costs
from minivllm.engine.chat_template import knows_tools, read_variables
from minivllm.engine.control_texts import MarkedText
from minivllm.engine.conversation import cut_at_mark, marked, plain_message, rendered
from minivllm.engine.template_shapes import ContentFormat
from minivllm.errors import BadRequest, ModelError
from minivllm.files import read_json, read_text
from minivllm.wanted import go_on

LONGEST_TOKEN = 256  # characters: no vocabulary has longer ones
LONG_TEXT = 20_000  # characters: what takes longer to encode than anybody else should wait for it
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PROBES = ("a", "A", "0", ".", "\u4e00")


class _Part(NamedTuple):
    """Of two texts in one sequence: a special token, or one of the two."""

    token_id: int
    text: int | None  # 0, 1; None: the special token
    is_second: bool  # of the second text, as the model is told


class Letters:
    """A tokenizer to which no text is a control token."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        with _no_panic():
            return self._tokenizer.encode(text, add_special_tokens=False).ids


class TextTokenizer:
    def __init__(
        self, tokenizer: Any, config: Mapping[str, Any], templates: Mapping[str, str], eos_token_ids: Iterable
    ):
        """tokenizer: tokenizers.Tokenizer. config: tokenizer_config.json. templates: {name: Jinja source}."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.config = dict(config)
        self._templates = dict(templates)
        self._content_format: ContentFormat = "auto"
        self.special_tokens = {name: text for name in _SPECIAL if (text := _content(config.get(name)))}
        self.bos_token_id = self._id(self.special_tokens.get("bos_token"))
        eos = self._id(self.special_tokens.get("eos_token"))
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(t for t in (eos, *eos_token_ids) if t is not None))
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._bos_change = self._find_bos_change(config.get("add_bos_token"))
        self._to_bytes, self.strips_first_space = _byte_rule(tokenizer)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}  # one object for each token, however many answers name it

    @classmethod
    def load(cls, folder: Path | str) -> TextTokenizer:
        """Raises ModelError for a folder whose tokenizer is missing or unreadable."""
        from tokenizers import Tokenizer

        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"{path} is missing. A tokenizer in another format (tokenizer.model, vocab.json) must be converted: "
                "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        try:
            with _no_panic():
                tokenizer = Tokenizer.from_file(str(path))
        except Exception as e:  # which itself is raised for whatever is wrong with the file
            raise ModelError(f"{path} cannot be read ({e}): download the model again") from None
        _check_costs(tokenizer, path)
        config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
        _check(config, _Config, folder / "tokenizer_config.json")
        _check_keys(tokenizer, config, folder / "tokenizer_config.json")
        return cls(tokenizer, config, _read_templates(folder, config), _read_eos(folder))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """A rendered chat template holds its special tokens already: encode it with add_special_tokens=False."""
        if isinstance(text, MarkedText):
            return text.controls.encode(text, self._encode(text, False))
        ids = self._encode(text, add_special_tokens).ids
        if add_special_tokens and self._bos_change:
            return [self.bos_token_id, *ids] if self._bos_change > 0 else ids[1:]
        return ids

    def _encode(self, text: str | tuple[str, str], add_special_tokens: bool) -> Any:
        """tokenizers.Encoding. While a batch is encoded other threads run, and while a single text is they do not."""
        go_on()
        size = len(text) if isinstance(text, str) else sum(map(len, text))
        given = (text,) if isinstance(text, str) else text
        with _no_panic():
            if size > LONG_TEXT:
                return self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]
            return self._tokenizer.encode(*given, add_special_tokens=add_special_tokens)

    @property
    def control_ids(self) -> dict[str, int]:
        """Special tokens, by their texts."""
        return {text: id for text, id in self.added_ids.items() if text and id in self.special_ids}

    def letters(self) -> Letters:
        """Of the same vocabulary, for pieces of a text; takes a moment to make. Raises ModelError for a tokenizer that
        encodes a piece in another way by itself than behind others."""
        if any(part.get("prepend_scheme") == "first" for part in _steps(self._tokenizer)):
            why = "its tokenizer writes a blank before the first piece of a text alone"
            raise ModelError(f"control tokens cannot be text with this model, since {why}: refuse them instead")
        made = type(self._tokenizer).from_str(self._tokenizer.to_str())
        made.encode_special_tokens = True
        return Letters(made)

    def bare(self, text: str) -> list[int]:
        """As one of two texts, which have their special tokens together."""
        return self._encode(text, False).ids

    def joined(
        self, first: Sequence[int], second: Sequence[int], max_tokens: int | None = None, at_start: bool = False
    ) -> tuple[list[int], int]:
        """Two bare texts in one sequence, as a cross-encoder reads them: (token ids, where the second one begins).
        Where there are more than max_tokens, what is left out is of the longer one, and of both once they are equally
        long. Raises BadRequest as encode_cut does."""
        num_special = sum(part.text is None for part in self._layout)
        kept = [first, second]
        if max_tokens is not None and len(first) + len(second) + num_special > max_tokens:
            room = _room(max_tokens, num_special, "two texts", 2)
            lengths = shares(len(first), len(second), room)
            kept = [own[len(own) - n :] if at_start else own[:n] for own, n in zip(kept, lengths, strict=True)]
        ids: list[int] = []
        second_at = None
        for part in self._layout:
            if part.is_second and second_at is None:
                second_at = len(ids)
            ids += [part.token_id] if part.text is None else kept[part.text]
        return ids, len(ids) if second_at is None else second_at

    @functools.cached_property
    def _layout(self) -> list[_Part]:
        """Of two texts in one sequence, found by two short ones. Raises BadRequest."""
        probe = next((text for text in _PROBES if self.bare(text)), None)
        if probe is None:
            raise BadRequest("this model's tokenizer makes no tokens of letters: it cannot score pairs", "model")
        pair, found = self._encode((probe, probe), True), list[_Part]()
        for token, text, kind in zip(pair.ids, pair.sequence_ids, pair.type_ids, strict=True):
            if text is None or not found or found[-1].text != text:
                found.append(_Part(token, text, kind == 1))
        return found

    def encode_cut(self, text: str, max_tokens: int, at_start: bool = False) -> list[int]:
        """As encode, with the text's end, or its start, left out where there are more tokens. The special tokens stay,
        so raises BadRequest where max_tokens leaves room for no others."""
        ids = self.encode(text)
        if len(ids) <= max_tokens:
            return ids
        bare = self.encode(text, add_special_tokens=False)
        num_special = len(ids) - len(bare)
        room = _room(max_tokens, num_special, "a text", 1)
        before = next((i for i in range(num_special) if ids[i : i + len(bare)] == bare), num_special)
        return ids[:before] + (bare[-room:] if at_start else bare[:room]) + ids[before + len(bare) :]

    def beginning(self, text: str, max_tokens: int) -> str:
        """As much of a text as its first tokens stand for, special tokens aside."""
        text = text[: LONGEST_TOKEN * max_tokens]
        offsets = self._encode(text, False).offsets
        return text if len(offsets) <= max_tokens else text[: offsets[max_tokens - 1][1]]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        with _no_panic():
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @property
    def added_ids(self) -> dict[str, int]:
        """Tokens that stand beside the vocabulary, special ones among them, and their ids."""
        return {token.content: id for id, token in self._tokenizer.get_added_tokens_decoder().items()}

    @property
    def has_bytes(self) -> bool:
        """Whether each token stands for fixed bytes. If not, token_bytes is a guess: decode in context."""
        return self._to_bytes is not None

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text; b"" for an id that the vocabulary lacks."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._find_bytes(token_id)
        return data

    def token_text(self, token_id: int) -> str:
        """A token by itself; bytes that are no whole character show as U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.token_bytes(token_id).decode("utf-8", "replace")
        return text

    def token_str(self, token_id: int) -> str | None:
        """As the vocabulary writes it, such as "Ġthe": transformers' convert_ids_to_tokens. None: it lacks the id."""
        return self._tokenizer.id_to_token(token_id)

    def bad_words_token_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is tokenised at the start of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(), " " + word.lstrip()):
                if ids := tuple(self.encode(text, add_special_tokens=False)):
                    found[ids] = None
        return tuple(found)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        run: Callable[..., str] = rendered,
        **switches: Any,
    ) -> str:
        """The prompt of a conversation. Raises BadRequest for messages that the template refuses.

        tools: as in OpenAI's requests. For a template that knows none they are told in words (engine/tool_prompt.py).
        continue_final_message: the prompt ends inside the last message, which the model goes on writing.
        template: in the place of the model's own. Raises ModelError if it is none.
        variables: the template's own switches (enable_thinking ...), also as arguments by name, as in transformers.
        run: what renders.
        """
        if not messages:
            raise BadRequest("messages must not be empty", "messages")
        if continue_final_message and add_generation_prompt:
            raise BadRequest(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        template = self._pick_template(tools) if template is None else template
        chat = [plain_message(i, message) for i, message in enumerate(messages)]
        if continue_final_message:
            chat[-1] = marked(chat[-1])
        own = {"documents": None, "add_generation_prompt": add_generation_prompt}
        values = {**self.special_tokens, **own, **switches, **(variables or {})}
        text = run(template, chat, list(tools) if tools else None, values, self._content_format)
        return cut_at_mark(text) if continue_final_message else text

    def use_chat_template(self, source: str) -> None:
        """In the place of all that the model has."""
        self._templates = {"default": source}

    def use_content_format(self, name: ContentFormat) -> None:
        """How templates get a message's content; auto: as each of their branches reads it."""
        self._content_format = name

    @property
    def chat_template(self) -> str | None:
        """The source of the template of conversations without tools; None if the model has none."""
        return self._templates.get("default", next(iter(self._templates.values()), None))

    @property
    def template_variables(self) -> frozenset[str]:
        """What that template reads, beside what it is always given."""
        return frozenset() if self.chat_template is None else read_variables(self.chat_template)

    @property
    def tool_template(self) -> str | None:
        """The source of the template that renders tools; None if there is none that knows them."""
        template = self._templates.get("tool_use", self._templates.get("default"))
        return template if template is not None and knows_tools(template) else None

    def _pick_template(self, tools: Any) -> str:
        if not self._templates:
            raise BadRequest(
                "this model has no chat template: send a plain prompt to /v1/completions (LLM.generate) instead",
                "messages",
            )
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise BadRequest(f"this model's chat templates ({', '.join(self._templates)}) have no default", "messages")
        return self._templates[name]

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    def _find_bos_change(self, add_bos: bool | None) -> int:
        """+1: add_bos_token asks for a BOS that tokenizer.json does not add; -1: it forbids one that it adds."""
        if add_bos is None or self.bos_token_id is None:
            return 0
        adds = self._tokenizer.encode("", add_special_tokens=True).ids[:1] == [self.bos_token_id]
        return int(add_bos) - int(adds)

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._to_bytes is None:
            return self.decode([token_id], skip_special_tokens=False).encode()
        return self._to_bytes(token)


@contextmanager
def _no_panic() -> Iterator[None]:
    """Raises BadRequest where Rust panics, which is no Exception in Python: a server would answer nothing."""
    try:
        yield
    except BaseException as e:
        if isinstance(e, Exception) or type(e).__name__ != "PanicException":
            raise
        raise BadRequest(f"this model's tokenizer fails on this text: {e}") from None


# What is left of a text


def _room(max_tokens: int, num_special: int, for_what: str, least: int) -> int:
    """Tokens beside the special ones. Raises BadRequest."""
    if max_tokens < num_special + least:
        raise BadRequest(f"{max_tokens} tokens have no room for {for_what}: {num_special} are special tokens")
    return max_tokens - num_special


def shares(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts of so many are kept: the longer one gives way until both are equally long, and
    then both do ("longest_first", as cross-encoders are trained)."""
    short, long = sorted((first, second))
    short = min(short, room // 2)
    long = min(long, room - short)
    return (short, long) if first <= second else (long, short)


# Tokens as bytes


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, other bytes for characters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _byte_level(token: str) -> bytes:
    table = _byte_of_char()
    try:
        return bytes([table[char] for char in token])
    except KeyError:  # an added token, written plainly
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("\u2581", " ").encode()


def _byte_rule(tokenizer: Any) -> tuple[Any, bool]:
    """(token string -> bytes, or None if the decoder is of another kind; whether a text's first space is dropped)."""
    spec = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {"type": None}
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level, False
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        replaces = (steps[0]["pattern"], steps[0]["content"]) == ({"String": "\u2581"}, " ")
        strips = [(s["content"], s["start"], s["stop"]) for s in steps[3:]]
        if replaces and strips in ([], [(" ", 1, 0)]):
            return _byte_fallback, bool(strips)
    return None, False


# Files


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


class _Token(Struct):
    content: str


class _Template(Struct):
    name: str
    template: str


class _Named(Struct):
    chat_template: str | list[_Template] | dict[str, str] | None = None


class _Config(_Named):
    """What is read of tokenizer_config.json and special_tokens_map.json: the special tokens, and this."""

    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    unk_token: str | _Token | None = None
    sep_token: str | _Token | None = None
    pad_token: str | _Token | None = None
    cls_token: str | _Token | None = None
    mask_token: str | _Token | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None


class _Ends(Struct):
    eos_token_id: int | list[int] | None = None


def _check(value: dict[str, Any], kind: type, path: Path) -> dict[str, Any]:
    """`value` itself. Raises ModelError where a field is not of the kind."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        raise ModelError(f"{path}: {e}. Download the model again") from None
    return value


def _check_costs(tokenizer: Any, path: Path) -> None:
    """Raises ModelError for a file of which a few letters could take all time or memory."""
    try:
        tokenizer_costs.check(_steps(tokenizer))
    except tokenizer_costs.CostError as e:
        raise ModelError(f"{path} {e}: no text is safe with it") from None


def _steps(tokenizer: Any) -> Iterator[dict[str, Any]]:
    parts = tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder
    return _parts_with_type({"in": [_state(part) for part in parts]})


def _check_keys(tokenizer: Any, config: Mapping[str, Any], path: Path) -> None:
    """Warns of keys that are not known. Raises ModelError for one that tokenizer.json does not agree with."""
    if config.get("add_eos_token") and not _adds_eos(tokenizer, _content(config.get("eos_token"))):
        raise ModelError(f"{path}: add_eos_token=True is not supported, since tokenizer.json adds no end")
    parts = list(_parts_with_type({"type": "", "in": [_state(tokenizer.normalizer), _state(tokenizer.pre_tokenizer)]}))
    for key, (kind, field) in file_keys.TOKENIZER_SAYS.items():
        own = [part[field] for part in parts if part["type"] == kind and field in part]
        if config.get(key) is not None and any(value != config[key] for value in own):
            raise ModelError(f"{path}: {key}={config[key]!r} is not supported: tokenizer.json has {field}={own[0]!r}")
    read = {*file_keys.TOKENIZER_READ, *file_keys.TOKENIZER_SAYS, "add_eos_token"}
    file_keys.warn(str(path), file_keys.check(str(path), config, read, file_keys.TOKENIZER))


def _adds_eos(tokenizer: Any, eos: str | None) -> bool:
    return eos is not None and tokenizer.encode("", add_special_tokens=True).ids[-1:] == [tokenizer.token_to_id(eos)]


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _parts_with_type(value: Any) -> Iterator[dict[str, Any]]:
    """Steps of a normalizer or a pre-tokenizer, those inside of others too."""
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _parts_with_type(one)
    if isinstance(value, dict) and "type" in value:
        yield value


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """{name: source}; the file chat_template.jinja goes before the configuration's field."""
    path = folder / "chat_template.json"
    field = config.get("chat_template") or _check(_read_json(path), _Named, path).get("chat_template") or {}
    if isinstance(field, str):
        field = {"default": field}
    elif isinstance(field, list):
        field = {entry["name"]: entry["template"] for entry in field}
    path = folder / "chat_template.jinja"
    return field | {"default": read_text(path)} if path.is_file() else field


def _read_eos(folder: Path) -> list[int]:
    """generation_config.json names all tokens that end a sequence; config.json is the older place."""
    for name in ("generation_config.json", "config.json"):
        eos = _check(_read_json(folder / name), _Ends, folder / name).get("eos_token_id")
        if eos is not None:
            return list(eos) if isinstance(eos, list) else [eos]
    return []


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token
