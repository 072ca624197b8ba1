"""Who may talk to the server, and how much: the options of `serve` that say so. `serve --help` imports it, so that
what is slow to import waits until it is needed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minivllm.cli import fail
from minivllm.serve import rate_limit

MAX_BODY_BYTES = 16 * 2**20
MAX_HEADER_BYTES = 32 * 2**10
MAX_WAITING = 1024
CLIENT_TIMEOUT = 60.0  # seconds


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="require one of these keys; may be repeated (none)",
    )
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="more keys, one a line; # begins a comment")
    what = "with several keys: no prompt finds what another key's left in the prefix cache, nor tells by its speed"
    group.add_argument("--isolate-keys", action=argparse.BooleanOptionalAction, default=True, help=f"{what} (on)")
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin use the API from a browser; *: any; may be repeated (off)",
    )
    what = "answer 429 while so many requests wait for a place in the batch"
    group.add_argument("--max-waiting", type=int, default=MAX_WAITING, metavar="N", help=f"{what} ({MAX_WAITING})")
    what = "POST requests of each API key, or of each address where there are no keys, such as 60/min"
    group.add_argument("--rate-limit", metavar="N/min", help=f"{what}; also /s and /h (off)")
    what = "so many of them may come at once"
    group.add_argument("--rate-burst", type=int, metavar="N", help=f"{what} (the N of --rate-limit)")
    what = "refuse larger request bodies"
    group.add_argument("--max-body-bytes", type=int, default=MAX_BODY_BYTES, metavar="N", help=f"{what} (16 MiB)")
    what = "let a client go that takes longer to send a request, or leaves its answer unread for so long"
    group.add_argument(
        "--client-timeout", type=float, default=CLIENT_TIMEOUT, metavar="SECONDS", help=f"{what} ({CLIENT_TIMEOUT:g})"
    )
    group.add_argument(
        "--ssl-certfile", type=Path, metavar="FILE", help="serve HTTPS with this certificate chain (off)"
    )
    group.add_argument("--ssl-keyfile", type=Path, metavar="FILE", help="its private key, if in a file of its own")


def app_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords for create_app. Exits if they cannot be followed."""
    if not all(args.api_key):
        fail("--api-key is empty")
    if args.max_waiting < 0:
        fail(f"--max-waiting {args.max_waiting}: must be at least 0")
    if args.max_body_bytes < 1:
        fail(f"--max-body-bytes {args.max_body_bytes}: must be at least 1")
    try:
        limit = rate_limit.parse(args.rate_limit, args.rate_burst) if args.rate_limit is not None else None
    except ValueError as error:
        fail(f"--rate-limit: {error}")
    if not 0 < args.client_timeout < math.inf:
        fail(f"--client-timeout {args.client_timeout:g}: must be above 0, and finite")
    if args.rate_burst is not None and limit is None:
        fail("--rate-burst needs --rate-limit")
    for origin in args.cors_origin:
        scheme, separator, host = origin.partition("://")
        if origin != "*" and not (scheme in ("http", "https") and separator and host and "/" not in host):
            fail(f"--cors-origin {origin}: an origin is scheme://host[:port], such as https://example.org, or *")
    return {
        "api_keys": [*args.api_key, *read_keys(args.api_key_file)],
        "cors_origins": args.cors_origin,
        "max_waiting": args.max_waiting,
        "rate_limit": limit,
        "isolate_keys": args.isolate_keys,
        "max_body_bytes": args.max_body_bytes,
        "client_timeout": args.client_timeout,
    }


def read_keys(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--api-key-file {path}: {getattr(error, 'strerror', None) or 'is no text'}")
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:  # no keys would mean that everybody may come in
        fail(f"--api-key-file {path} holds no key")
    return keys


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
    import ipaddress

    if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        return []
    if not keys:
        return [f"whoever can reach {host} over the network can use this server: set --api-key or --api-key-file"]
    return [] if tls else [f"keys and prompts cross the network to {host} unencrypted: set --ssl-certfile"]
