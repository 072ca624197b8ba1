"""What a message's fields are to a chat template: what it takes, not what the client happened to send.

A client sends a message's content as a string or as OpenAI's list of parts, and the arguments of a call as text. Of a
template's branches one prints the content and another goes through its parts; one writes the arguments as they are and
another writes each by itself. So a field is a value with two shapes. It has the one that the client sent, as in
transformers' `apply_chat_template`, until a template does with it what only the other one can do: a loop over a string
goes through its parts, parts that are printed are their text, and arguments that are looked up are an object.

A type that a template asks for settles the arguments: `is string` text, `is mapping` an object, whichever comes first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

ContentFormat = Literal["auto", "string", "openai"]
FORMATS: tuple[ContentFormat, ...] = ("auto", "string", "openai")
THINKING = ("reasoning_content", "thinking", "reasoning")  # what templates call a message's thinking


class Text(str):
    """A string, and `_other`, which takes over where a template goes through it or looks something up in it."""

    __slots__ = ("_other",)
    _other: Any

    @property
    def _items(self) -> Any:
        return self._other

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(self._items)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._items[key]
        return str.__getitem__(self, key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._items, name)


class Content(Text):
    """A message's content that was sent as a string; of it, a character or a slice that also is a part or some."""

    __slots__ = ()

    @classmethod
    def of(cls, text: str, other: Any) -> Content:
        made = cls(text)
        made._other = other
        return made

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str) or not isinstance(self._other, list):
            return super().__getitem__(key)
        if isinstance(key, slice):
            return Content.of(str.__getitem__(self, key), self._other[key])
        if not -len(self._other) <= key < len(self._other):
            return str.__getitem__(self, key)
        return Content.of(str.__getitem__(self, key) if len(self) else "", self._other[key])


class Arguments(Text):
    """A call's arguments as a model wrote them: JSON, which is read when a template needs more than the text."""

    __slots__ = ("_settled",)
    _settled: Literal["text", "object", ""]

    def __new__(cls, text: str) -> Arguments:
        made = super().__new__(cls, text)
        made._settled = ""
        return made

    def __bool__(self) -> bool:
        return bool(self._items) if self._settled == "object" else len(self) > 0

    @classmethod
    def as_object(cls, text: str) -> Arguments:
        """That are no string to a template that asks."""
        made = cls(text)
        made._settled = "object"
        return made

    @property
    def _items(self) -> Any:
        try:
            return self._other
        except AttributeError:
            self._other = read_arguments(str(self))
            return self._other

    def _is(self, kind: Literal["text", "object"]) -> bool:
        """Asked by a template."""
        if not self._settled:
            self._settled = kind if kind == "text" or isinstance(self._as_json(), Mapping) else "text"
        return self._settled == kind

    def _as_json(self) -> Any:
        if self._settled == "text":
            return str(self)
        try:
            return self._items
        except ValueError:
            return str(self)


class Parts(list):
    """A message's content that was sent as parts. A template that asks whether it is a string, and then does not go
    through all of its parts, takes strings alone (`without_lost`)."""

    def __init__(self, parts: Iterable[Any]):
        super().__init__(parts)
        self._denied, self._seen = False, set[int]()

    def _see(self, part: slice = slice(None)) -> list[Any]:
        """These parts; the template looks at them."""
        self._seen.update(range(len(self))[part])
        return list.__getitem__(self, part)

    def _is_lost(self) -> bool:
        return self._denied and len(self._seen) < len(self)

    def __str__(self) -> str:
        return joined(list.__iter__(self))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._see())

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return self._see(key)
        return (self._see(slice(key, key + 1 or None)) or [list.__getitem__(self, key)])[0]

    def __add__(self, other: Any) -> Any:
        return str(self) + other if isinstance(other, str) else self._see() + other

    def __radd__(self, other: Any) -> Any:
        return other + str(self)

    def __contains__(self, item: Any) -> bool:
        return item in str(self) if isinstance(item, str) else super().__contains__(item)

    def __eq__(self, other: object) -> bool:
        return str(self) == other if isinstance(other, str) else super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(str(self), name)


class Object(dict):
    """A call's arguments that were given as an object, from Python."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


class Null(str):
    """A content that is null, to a template that cannot do without one: no text, and none."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is None or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


# ------------------------------------------------------------------------------------------- what templates ask of them


def is_string(value: Any) -> bool:
    if isinstance(value, Parts):
        value._denied = True
    return value._is("text") if isinstance(value, Arguments) else isinstance(value, str)


def is_mapping(value: Any) -> bool:
    return value._is("object") if isinstance(value, Arguments) else isinstance(value, Mapping)


def is_none(value: Any) -> bool:
    return value is None or isinstance(value, Null)


def items_of(value: Any) -> Any:
    """What `items` is to go through."""
    return value._items if isinstance(value, Text) else value


def as_json(value: Any) -> Any:
    """With arguments as objects, however deep they lie: what is written as JSON holds them as such."""
    if isinstance(value, Arguments):
        return value._as_json()
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_json(item) for item in list.__iter__(value)]
    return [as_json(item) for item in value] if isinstance(value, tuple) else value


# ----------------------------------------------------------------------------------------------------------- messages


def joined(parts: Iterable[Mapping[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts)


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else joined(content)


def read_arguments(text: str) -> Any:
    """Raises ValueError."""
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        raise ValueError("the arguments of a tool call are not JSON") from None


def shaped(chat: Sequence[Mapping[str, Any]], form: ContentFormat) -> list[dict[str, Any]]:
    """Messages as a template is to get them first. chat: without fields that are null. Results of tools are strings, as
    vLLM has made them. form: what all contents are, unless it is "auto"."""
    messages = [_with_content(message, form) for message in chat]
    return [_with_arguments(message, Arguments) if message.get("tool_calls") else message for message in messages]


def reshaped(chat: Sequence[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The messages of `shaped` for a template that fails on them, with ever more in the other shape: contents that are
    null, arguments that are an object only, those that are none put into one, thinking by one name, contents that are
    strings."""
    changed = [dict(message) for message in chat]
    for change in (_with_null, _as_objects, _as_one_argument, _with_one_name, _as_string):
        before, changed = changed, list(map(change, changed))
        if any(new is not old for new, old in zip(changed, before, strict=True)):
            yield changed


def _with_null(message: dict[str, Any]) -> dict[str, Any]:
    return message if "content" in message else {**message, "content": Null()}


def _as_objects(message: dict[str, Any]) -> dict[str, Any]:
    return _with_arguments(message, Arguments.as_object) if message.get("tool_calls") else message


def _as_one_argument(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments that are no object, where an answer has ended within them, are the value of a single one."""
    calls = message.get("tool_calls") or ()
    if not any(_is_no_object(call["function"].get("arguments")) for call in calls):
        return message

    def made(text: str) -> Arguments:
        return Arguments.as_object(json.dumps({"arguments": text}) if _is_no_object(text) else text)

    return _with_arguments(message, made)


def _is_no_object(given: Any) -> bool:
    if not isinstance(given, str):
        return False
    try:
        return not isinstance(read_arguments(str(given)), Mapping)
    except ValueError:
        return True


def _with_one_name(message: dict[str, Any]) -> dict[str, Any]:
    if "reasoning_content" not in message:
        return message
    return {key: value for key, value in message.items() if key not in THINKING[1:]}


def _as_string(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return {**message, "content": str(content)} if isinstance(content, Parts) else message


def _with_content(message: Mapping[str, Any], form: ContentFormat) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list) and (form == "string" or message["role"] == "tool"):
        content = joined(content)
    if isinstance(content, list):
        return {**message, "content": Parts(content) if form == "auto" else content}
    if content is None or form == "string":
        return dict(message) if content is None else {**message, "content": content}
    parts = [{"type": "text", "text": content}]
    return {**message, "content": Content.of(content, parts) if form == "auto" else parts}


def _with_arguments(message: dict[str, Any], made: Callable[[str], Arguments]) -> dict[str, Any]:
    """A call whose function has arguments gets them as both."""
    calls = [{**call, "function": _function(call.get("function"), made)} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _function(function: Any, made: Callable[[str], Arguments]) -> Any:
    if not isinstance(function, Mapping) or "arguments" not in function:
        return function
    given = function["arguments"]
    arguments = made(str(given)) if isinstance(given, str) else Object(given) if isinstance(given, Mapping) else given
    return {**function, "arguments": arguments}


def without_lost(chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """The messages of `shaped` for the same template once more, after it has passed over the content of some: these
    have strings. None: it has passed over none."""
    if not any(map(_is_lost, chat)):
        return None
    return [{**message, "content": text_of(message)} if _is_lost(message) else dict(message) for message in chat]


def _is_lost(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, Parts) and content._is_lost()
