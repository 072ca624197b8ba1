"""How a server is run and watched: the options of `serve` that say so. `serve --help` imports it, so that what is slow
to import waits until it is needed."""

from __future__ import annotations

import argparse
import math
from typing import Any

from minivllm.cli import fail

LOG_FORMATS = ("text", "json")
RECENT_STEPS = 1000  # that /debug/trace can show, if debug.recent_steps does not say


def add_options(group: argparse._ArgumentGroup) -> None:
    levels = ("debug", "info", "warning", "error")
    group.add_argument(
        "--log-level", choices=levels, default="info", metavar="LEVEL", help=f"{', '.join(levels)} (info)"
    )
    what = "text, or json: an object a line, one line a request"
    group.add_argument("--log-format", choices=LOG_FORMATS, default="text", metavar="FORMAT", help=f"{what} (text)")
    what = "a step that takes longer is logged, counted and makes /health say 503; 0: never"
    group.add_argument("--step-timeout", type=float, metavar="SECONDS", help=f"{what} (300)")
    what = "the page at /: a chat, and the engine as it runs"
    group.add_argument("--page", action=argparse.BooleanOptionalAction, default=True, help=f"{what} (on)")
    what = "GET /debug/trace: the last steps, for ui.perfetto.dev; /debug/process: what the process holds"
    group.add_argument("--debug-endpoints", action="store_true", help=f"{what} (off)")
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
    if args.otlp_traces_endpoint is not None:
        from minivllm.serve import telemetry

        telemetry.check(args.otlp_traces_endpoint)
    return {"debug_endpoints": args.debug_endpoints, "with_page": args.page}
