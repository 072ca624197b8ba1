"""What kinds of fields a request has (protocol.py), and what a declaration says of each.

Plain fields have an effect; `differs(...)` says where it is not quite the reference's. About `accepted(...)` ones there
is nothing to do. `hint(...)` ones are taken and named as ignored. `refused(...)` ones would change the answer and are
not supported: any value but one that asks for nothing is a 400 which names the field.
"""

from __future__ import annotations

from typing import Any

from msgspec import Meta, Struct


def doc(text: str) -> Meta:
    return Meta(description=text)


def differs(how: str) -> Meta:
    """A field with an effect that is not quite the reference's."""
    return Meta(description=how, extra={"differs": how})


def accepted(why: str = "") -> Meta:
    return Meta(description=f"Accepted; carries no behaviour here. {why}".strip(), extra={"accepted": why})


def hint(why: str, *no_ops: Any) -> Meta:
    """A field that is taken, named as ignored, and not acted on. `no_ops`: the values beside null that ask for
    nothing."""
    return Meta(description=f"Ignored, and named so: {why}.", extra={"hint": why, "no_ops": (None, *no_ops)})


def refused(what: str, *no_ops: Any) -> Meta:
    """A field that is known and not supported. `no_ops`: the values beside null that ask for nothing."""
    return Meta(description=f"Not supported: {what}.", extra={"refused": what, "no_ops": (None, *no_ops)})


class RequestBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Anything that a client sends."""
