"""How a server is run and watched: the options of `serve` that say so. `serve --help` imports it, so that what is slow
to import waits until it is needed."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm.errors import UserError
from minivllm.terminal import fail

if TYPE_CHECKING:
    from minivllm.serve.response_store import ResponseStore

LOG_FORMATS = ("text", "json")
UNKNOWN_FIELDS = ("ignore", "refuse")
CONTROL_TOKENS = ("tokens", "refuse", "text")  # serve/control_tokens.py
DAY = 86_400.0  # seconds
RECENT_STEPS = 1000  # that /debug/trace can show, if debug.recent_steps does not say


def add_options(group: argparse._ArgumentGroup) -> None:
    levels = ("debug", "info", "warning", "error")
    group.add_argument(
        "--log-level", choices=levels, default="info", metavar="LEVEL", help=f"{', '.join(levels)} (info)"
    )
    what = "text, or json: an object a line, one line a request"
    group.add_argument("--log-format", choices=LOG_FORMATS, default="text", metavar="FORMAT", help=f"{what} (text)")
    what = "a step or call that takes longer makes /health say 503, and twice the time ends the engine; 0: never"
    group.add_argument("--step-timeout", type=float, metavar="SECONDS", help=f"{what} (300)")
    what = "the page at /: a chat, and the engine as it runs"
    group.add_argument("--page", action=argparse.BooleanOptionalAction, default=True, help=f"{what} (on)")
    what = "fields that an endpoint does not have: taken, and named in the log and in x-minivllm-ignored, or a 400"
    group.add_argument(
        "--unknown-fields", choices=UNKNOWN_FIELDS, default="ignore", metavar="HOW", help=f"{what}: refuse (ignore)"
    )
    what = "the path that a proxy serves this server below, such as /llm; with it and without it, paths work"
    group.add_argument("--root-path", default="", metavar="/PREFIX", help=f"{what} (none)")
    what = "stream as if each request had asked for include_usage and continuous_usage_stats"
    group.add_argument("--enable-force-include-usage", action="store_true", help=f"{what} (off)")
    what = "tell in each answer how long it waited and took: metrics, of one sequence, at a stream's end with its usage"
    group.add_argument("--enable-per-request-metrics", action="store_true", help=f"{what} (off)")
    what = 'call tokens "token_id:5" in log-probabilities, unless a request says otherwise'
    group.add_argument("--return-tokens-as-token-ids", action="store_true", help=f"{what} (off)")
    what = "run the chat template that a request brings, in a sandbox; a costly one slows the server down"
    group.add_argument("--trust-request-chat-template", action="store_true", help=f"{what} (off)")
    what = "text of a control token in a message or tool: the token, a 400, or letters: tokens, refuse, text"
    group.add_argument(
        "--control-tokens-in-text",
        choices=CONTROL_TOKENS,
        default="tokens",
        metavar="HOW",
        help=f"{what} (tokens, as in vLLM)",
    )
    what = "let /v1/completions take prompts as vectors: prompt_embeds, a tensor in base64"
    group.add_argument("--enable-prompt-embeds", action="store_true", help=f"{what} (off)")
    what = "what stands before the names of /metrics: vllm, for dashboards and autoscalers that read vLLM's"
    group.add_argument("--metrics-prefix", default="minivllm", metavar="NAME", help=f"{what} (minivllm)")
    what = "GET /debug/trace: the last steps, for ui.perfetto.dev; /debug/process: what the process holds"
    group.add_argument("--debug-endpoints", action="store_true", help=f"{what} (off)")
    what = (
        "keep /v1/responses, so that they can be gone on from and read again, also after a restart; --no-store: nothing"
    )
    group.add_argument("--store", action=argparse.BooleanOptionalAction, default=True, help=f"{what} (on)")
    what = "where: one file, readable by this user alone, which several servers may share"
    group.add_argument(
        "--store-path", type=Path, metavar="FILE", help=f"{what} (~/.local/state/minivllm/responses.sqlite)"
    )
    what = "keep so much; what was used least recently goes first"
    group.add_argument("--store-max-bytes", type=int, metavar="N", help=f"{what} (1 GiB)")
    what = "keep a response so long after it was made, or gone on from"
    group.add_argument("--store-max-age", type=float, metavar="DAYS", help=f"{what} (30)")
    what = "send a span for each request to this OpenTelemetry collector, such as http://127.0.0.1:4318/v1/traces"
    group.add_argument("--otlp-traces-endpoint", metavar="URL", help=f"{what}; needs the extra otel (off)")


def engine_options(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """AsyncLLM's options, with what these ask of the engine."""
    own: dict[str, Any] = {"engine.log_format": args.log_format}
    if args.step_timeout is not None:
        if not 0 <= args.step_timeout < math.inf:
            fail(f"--step-timeout {args.step_timeout}: seconds, or 0 for no limit")
        own["engine.step_timeout"] = args.step_timeout
    if args.debug_endpoints:
        own["debug.recent_steps"] = RECENT_STEPS
    return {**options, "overrides": {**own, **options["overrides"]}}


def app_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords for create_app, beside `tracing`, which has threads. Exits if they cannot be followed."""
    from minivllm.serve.root_path import IS_PREFIX

    if args.otlp_traces_endpoint is not None:
        from minivllm.serve import telemetry

        telemetry.check(args.otlp_traces_endpoint)
    if args.root_path and not IS_PREFIX.fullmatch(args.root_path):
        fail(f"--root-path {args.root_path}: a path such as /llm, with no / at its end")
    return {
        "debug_endpoints": args.debug_endpoints,
        "with_page": args.page,
        "refuse_unknown": args.unknown_fields == "refuse",
        "root_path": args.root_path,
        "control_tokens": args.control_tokens_in_text,
        "trust_templates": args.trust_request_chat_template,
        "takes_embeds": args.enable_prompt_embeds,
        "force_usage": args.enable_force_include_usage,
        "tells_timings": args.enable_per_request_metrics,
        "tokens_as_ids": args.return_tokens_as_token_ids,
    }


def check_store(args: argparse.Namespace) -> None:
    """Before anything is loaded. Exits if what was asked for cannot be had."""
    store_limits(args)
    if args.store_path is not None:
        if not args.store:
            fail(f"--store-path {args.store_path}: --no-store keeps nothing")
        open_store(args).store.close()


def store_limits(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords for ResponseStore."""
    limits = {}
    if args.store_max_bytes is not None:
        if args.store_max_bytes < 1:
            fail(f"--store-max-bytes {args.store_max_bytes}: must be at least 1; --no-store keeps nothing")
        limits["max_bytes"] = args.store_max_bytes
    if args.store_max_age is not None:
        if not 0 < args.store_max_age < math.inf:
            fail(f"--store-max-age {args.store_max_age:g}: must be above 0, and finite; --no-store keeps nothing")
        limits["max_age"] = args.store_max_age * DAY
    return limits


class Kept(NamedTuple):
    store: ResponseStore | None
    where: str
    why: str


def open_store(args: argparse.Namespace) -> Kept:
    """The user's own folder may be missing or read-only, where nobody has asked to keep anything. Exits if a file that
    was named cannot be used."""
    if not args.store:
        return Kept(None, "nowhere", "--no-store")
    from minivllm.serve.response_store import ResponseStore, default_path

    try:
        store = ResponseStore(args.store_path or default_path(), time.time(), **store_limits(args))
    except UserError as error:
        if args.store_path is not None:
            fail(f"--store-path {error}")
        return Kept(None, "nowhere", f"{error}; --store-path names another file")
    room = f"{store.max_bytes:,} bytes and {store.max_age / DAY:g} days at most"
    return Kept(store, str(store.path), f"{room}; --no-store keeps nothing")
