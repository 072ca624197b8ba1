"""What the server does with each field of a request, and which fields of the references its answers lack: tables made
of the protocol's Structs and of the references (references.py), so that they say what the code does."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from html import escape
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec
from docutils import nodes
from msgspec import Struct

from bookext import references
from bookext.base import OfCode, html
from bookext.charts import markup_table
from bookext.reference import literal, marked
from minivllm.serve.app import ENDPOINTS

HEAD = ("field", "here", "what", "of")
TAKEN = "taken"


class Does(NamedTuple):
    """A field's kind in a word, what there is to say of it, and values beside null that ask for nothing."""

    word: str
    what: str
    nothing: tuple[Any, ...] = ()


def does(field: msgspec.structs.FieldInfo) -> Does:
    metas = getattr(field.type, "__metadata__", ())
    for meta in metas:
        match meta.extra:
            case {"differs": how}:
                return Does("differs", how)
            case {"accepted": why}:
                return Does("no effect", why)
            case {"hint": why, "no_ops": (None, *values)}:
                return Does("ignored", sentence(why), tuple(values))
            case {"refused": what, "no_ops": (None, *values)}:
                return Does("refused", sentence(what), tuple(values))
    return Does(TAKEN, next((meta.description for meta in metas if meta.description), ""))


def sentence(reason: str) -> str:
    """Reasons are written to stand in the middle of a message."""
    return f"{reason[0].upper()}{reason[1:]}."


def in_order(struct: type[Struct]) -> list[msgspec.structs.FieldInfo]:
    """A Struct's own fields before those that it shares with others."""
    depth: dict[str, int] = {}
    for number, kind in enumerate(struct.__mro__):
        for name in kind.__dict__.get("__annotations__", ()):
            depth.setdefault(name, number)
    return sorted(msgspec.structs.fields(struct), key=lambda field: depth[field.name])


def table(struct: type[Struct]) -> str:
    known, config = references.requests(), struct.__struct_config__
    owners = known.fields.get(struct, {})
    rows = [] if config.tag is None else [(config.tag_field, TAKEN, codes([config.tag]))]
    for field in in_order(struct):
        others = known.variants.get((struct, field.encode_name), ())
        rows.append((field.encode_name, does(field).word, " ".join(said(field, others))))
    return markup_table(HEAD, [(literal(row[0]), *row[1:], ", ".join(sorted(owners.get(row[0], ())))) for row in rows])


def said(field: msgspec.structs.FieldInfo, others: Iterable[str]) -> Iterator[str]:
    """others: types of objects that a client may send in this place, and that are refused."""
    about = does(field)
    if about.what:
        yield marked(about.what)
    if about.nothing:
        yield f"{codes(map(json.dumps, about.nothing))} {'asks' if len(about.nothing) == 1 else 'ask'} for nothing."
    if choices := [choice for choice in references.choices(field.type) if choice is not None]:
        yield f"Values: {codes(choices)}."
    if structs := references.parts(field.type, references.is_struct):
        yield "See " + ", ".join(f'<a href="#{anchor(struct)}">{struct.__name__}</a>' for struct in structs) + "."
    if others:
        yield f"Refused: {codes(name for other in sorted(others) for name in other.split(', '))}."


def codes(texts: Iterable[str]) -> str:
    return ", ".join(f"<code>{escape(text, quote=False)}</code>" for text in texts)


def anchor(struct: type[Struct]) -> str:
    return f"of-{struct.__name__.lower()}"


class EndpointFields(OfCode):
    """`{endpoint-fields}`: a section for each request, and in it one for each object that it is the first to hold."""

    def build(self) -> list[nodes.Node]:
        sections: list[nodes.Node] = []
        told: set[type[Struct]] = set()
        for struct in dict.fromkeys(endpoint.takes for endpoint in ENDPOINTS if endpoint.takes):
            inner = [kind for kind in references.inside(struct) if kind is not struct and kind not in told]
            told.update(inner)
            paths = ", ".join(f"{e.method} {e.path}" for e in ENDPOINTS if e.takes is struct)
            sections.append(section(struct, paths))
            sections[-1] += [section(kind, kind.__name__) for kind in inner]
        return sections


def section(struct: type[Struct], title: str) -> nodes.section:
    name = anchor(struct)
    return nodes.section("", nodes.title("", title), html(table(struct)), ids=[name], names=[name])


class AbsentFields(OfCode):
    """`{absent-fields}`: what the answers of a reference have and ours never do, by the reason."""

    def build(self) -> list[nodes.Node]:
        by_reason: dict[str, list[str]] = {}
        for struct, name, why in references.absent():
            by_reason.setdefault(why, []).append(f"{struct.__name__}.{name}")
        rows = [(escape(why, quote=False), codes(names)) for why, names in by_reason.items()]
        return [html(markup_table(("why", "fields"), rows))]


class References(OfCode):
    """`{references}`: what the tables have been compared with."""

    def build(self) -> list[nodes.Node]:
        packages = " and ".join(f"{name} {version(name)}" for name in ("openai", "anthropic"))
        vllm = references.vllm()["version"]
        return [nodes.paragraph("", f"Compared with the Python packages {packages}, and with vLLM {vllm}.")]
