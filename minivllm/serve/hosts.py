"""What the server may be called: `serve --host` and `--allowed-host` (browsers.py says what for). `serve --help`
imports it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from minivllm.terminal import fail

NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?", re.IGNORECASE)


def add_options(group: argparse._ArgumentGroup) -> None:
    what = "answer to this name too, or to those below it: *.example.org; on 127.0.0.1 else only to localhost and"
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help=f"{what} addresses; elsewhere, given once, to no other names; *: to any; may be repeated (none)",
    )


def names(given: Sequence[str], host: str, bound: str) -> frozenset[str] | None:
    """For Browsers. given: --allowed-host; host: --host; bound: the numeric address that came of it, "" of a socket in
    the file system. None: any. Exits for what is no name."""
    for name in given:
        if name != "*" and not NAME.fullmatch(name):
            fail(f"--allowed-host {name}: a name with no scheme and no port, such as llm.example.org, or *")
    if "*" in given or not (given or is_loopback(bound)):
        return None
    return frozenset(name.lower().removesuffix(".") for name in (*given, host))


def is_loopback(bound: str) -> bool:
    import ipaddress

    return bool(bound) and ipaddress.ip_address(bound.partition("%")[0]).is_loopback
