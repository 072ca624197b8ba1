"""Who may talk to the server, and how much: the options of `serve` that say so. `serve --help` imports it, so that
what is slow to import waits until it is needed."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.errors import UserError
from minivllm.serve import hosts, rate_limit, request_limits
from minivllm.terminal import fail

if TYPE_CHECKING:
    from minivllm.serve.connections import ConnectionLimits
    from minivllm.serve.keys import KeyFile
    from minivllm.serve.proxies import TrustedProxies

MAX_BODY_BYTES = 16 * 2**20
MAX_WAITING = 1024
CLIENT_TIMEOUT = 60.0  # seconds
KEY_VARIABLE = "MINIVLLM_API_KEY"  # the one option that is read from the environment: ps shows a command line to all


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"require one of these keys; may be repeated; {KEY_VARIABLE} in the environment is one more, which ps "
        "does not show; with several, scheduler.policy is fair (none)",
    )
    what = "more keys, one a line, or as JSON with name and role; read again when it changes; # begins a comment"
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help=what)
    what = "with several keys: no prompt finds what another key's left in the prefix cache, nor tells by its speed"
    group.add_argument("--isolate-keys", action=argparse.BooleanOptionalAction, default=True, help=f"{what} (on)")
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin use the API from a browser; *: any; may be repeated (off)",
    )
    hosts.add_options(group)
    what = "believe the X-Forwarded-For and -Proto of this address, network, or unix (who connects to --uds)"
    group.add_argument(
        "--trusted-proxy", action="append", default=[], metavar="ADDRESS", help=f"{what}; may be repeated (none)"
    )
    what = "connections at most, as far as open files go; others wait to be taken"
    group.add_argument("--max-connections", type=int, metavar="N", help=f"{what} (8192)")
    what = "of them, those of one address; a trusted proxy may have all"
    group.add_argument("--max-connections-per-address", type=int, metavar="N", help=f"{what} (a quarter)")
    what = "answer 429 while so many requests wait for a place in the batch"
    group.add_argument("--max-waiting", type=int, default=MAX_WAITING, metavar="N", help=f"{what} ({MAX_WAITING})")
    request_limits.add_options(group)
    what = "POST requests of each API key, or of each address where there are no keys, such as 60/min"
    group.add_argument("--rate-limit", metavar="N/min", help=f"{what}; also /s and /h (off)")
    what = "so many of them may come at once"
    group.add_argument("--rate-burst", type=int, metavar="N", help=f"{what} (the N of --rate-limit)")
    what = "tokens of each, of prompts and answers, such as 100000/min; also /s and /h"
    group.add_argument("--token-limit", metavar="N/min", help=f"{what} (off)")
    what = "sequences of each at once, running or waiting: choices, prompts, texts"
    group.add_argument("--sequence-limit", type=int, metavar="N", help=f"{what} (off)")
    what = "refuse larger request bodies"
    group.add_argument("--max-body-bytes", type=int, default=MAX_BODY_BYTES, metavar="N", help=f"{what} (16 MiB)")
    what = "let a client go that takes longer to send a request, or leaves its answer unread for so long"
    group.add_argument(
        "--client-timeout", type=float, default=CLIENT_TIMEOUT, metavar="SECONDS", help=f"{what} ({CLIENT_TIMEOUT:g})"
    )
    what = "end a request that takes longer in all; it may ask for less in the header x-server-timeout"
    group.add_argument("--request-timeout", type=float, metavar="SECONDS", help=f"{what} (off)")
    group.add_argument(
        "--ssl-certfile", type=Path, metavar="FILE", help="serve HTTPS with this certificate chain (off)"
    )
    group.add_argument("--ssl-keyfile", type=Path, metavar="FILE", help="its private key, if in a file of its own")


def app_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords for create_app. Exits if they cannot be followed."""
    from minivllm.serve.deadline import Deadlines

    if not all(given_keys(args)):
        fail(f"--api-key, or {KEY_VARIABLE}, is empty")
    if args.max_waiting < 0:
        fail(f"--max-waiting {args.max_waiting}: must be at least 0")
    if args.max_body_bytes < 1:
        fail(f"--max-body-bytes {args.max_body_bytes}: must be at least 1")
    limit = parsed("--rate-limit", args.rate_limit, args.rate_burst)
    token_limit = parsed("--token-limit", args.token_limit)
    if args.sequence_limit is not None and args.sequence_limit < 1:
        fail(f"--sequence-limit {args.sequence_limit}: must be at least 1")
    if not 0 < args.client_timeout < math.inf:
        fail(f"--client-timeout {args.client_timeout:g}: must be above 0, and finite")
    if args.request_timeout is not None and not 0 < args.request_timeout < math.inf:
        fail(f"--request-timeout {args.request_timeout:g}: must be above 0, and finite")
    if args.rate_burst is not None and limit is None:
        fail("--rate-burst needs --rate-limit")
    proxies = proxies_of(args)
    for origin in args.cors_origin:
        scheme, separator, host = origin.partition("://")
        if origin != "*" and not (scheme in ("http", "https") and separator and host and "/" not in host):
            fail(f"--cors-origin {origin}: an origin is scheme://host[:port], such as https://example.org, or *")
    return {
        "request_limits": request_limits.chosen(args),
        "api_keys": given_keys(args),
        "key_file": key_file(args.api_key_file),
        "cors_origins": args.cors_origin,
        "proxies": proxies,
        "connection_limits": limits_of(args),
        "max_waiting": args.max_waiting,
        "rate_limit": limit,
        "token_limit": token_limit,
        "sequence_limit": args.sequence_limit,
        "isolate_keys": args.isolate_keys,
        "max_body_bytes": args.max_body_bytes,
        "client_timeout": args.client_timeout,
        "deadlines": Deadlines(args.request_timeout),
    }


def parsed(option: str, text: str | None, burst: int | None = None) -> rate_limit.RateLimit | None:
    try:
        return None if text is None else rate_limit.parse(text, burst)
    except ValueError as error:
        fail(f"{option}: {error}")


def given_keys(args: argparse.Namespace) -> list[str]:
    variable = os.environ.get(KEY_VARIABLE)
    return [*args.api_key, *([] if variable is None else [variable])]


def proxies_of(args: argparse.Namespace) -> TrustedProxies:
    from minivllm.serve.proxies import UNIX, TrustedProxies

    for given in args.trusted_proxy:
        try:
            TrustedProxies([given])
        except ValueError:
            fail(f"--trusted-proxy {given}: an address, a network such as 10.0.0.0/8, or {UNIX} (see --uds)")
    return TrustedProxies(args.trusted_proxy)


def limits_of(args: argparse.Namespace) -> ConnectionLimits:
    from minivllm.serve.connections import MAX_CONNECTIONS, SHARE, ConnectionLimits

    for name in ("max_connections", "max_connections_per_address"):
        if (number := getattr(args, name)) is not None and number < 1:
            fail(f"--{name.replace('_', '-')} {number}: must be at least 1")
    in_all = args.max_connections or MAX_CONNECTIONS
    return ConnectionLimits(in_all, args.max_connections_per_address or max(1, in_all // SHARE))


def keys_of(args: argparse.Namespace) -> list[str]:
    """What tells the clients apart that have keys."""
    return [*given_keys(args), *read_keys(args.api_key_file)]


def read_keys(path: Path | None) -> list[str]:
    """Each line's name, or its key. Exits for a file that cannot be used."""
    from minivllm.serve.keys import read_lines

    try:
        return [] if path is None else [line.client for line in read_lines(path)]
    except UserError as error:
        fail(f"--api-key-file {error}")


def key_file(path: Path | None) -> KeyFile | None:
    from minivllm.serve.keys import KeyFile

    try:
        return None if path is None else KeyFile(path)
    except UserError as error:
        fail(f"--api-key-file {error}")


def tls_options(args: argparse.Namespace) -> dict[str, Path]:
    """Keywords for Server. Exits if certificate and key cannot be used, before the model is loaded."""
    if args.ssl_certfile is None:
        if args.ssl_keyfile is not None:
            fail("--ssl-keyfile needs --ssl-certfile")
        return {}
    for name in ("ssl_certfile", "ssl_keyfile"):
        if (path := getattr(args, name)) is not None and not path.is_file():
            fail(f"--{name.replace('_', '-')} {path}: no such file")
    import ssl

    try:
        # The empty password keeps OpenSSL from asking the terminal for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(args.ssl_certfile, args.ssl_keyfile, lambda: "")
    except (ssl.SSLError, OSError) as error:
        fail(f"--ssl-certfile {args.ssl_certfile}: not a usable certificate with its (unencrypted) key: {error}")
    return {name: path for name in ("ssl_certfile", "ssl_keyfile") if (path := getattr(args, name)) is not None}


def warnings(host: str, keys: Sequence[str], tls: bool) -> list[str]:
    """What an address that others can reach lacks. host: as bound, numeric."""
    if hosts.is_loopback(host):
        return []
    if not keys:
        return [f"whoever can reach {host} over the network can use this server: set --api-key or --api-key-file"]
    return [] if tls else [f"keys and prompts cross the network to {host} unencrypted: set --ssl-certfile"]
