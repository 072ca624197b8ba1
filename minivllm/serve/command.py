"""The `serve` command: take the port, load the model, say what was chosen, serve until told to stop.

The port is taken first, since a minute of loading is a long wait for "address already in use". It accepts connections
only once the model is ready.
"""

from __future__ import annotations

import argparse
import errno
import logging
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from minivllm import logs, waiting
from minivllm.cli import (
    Parser,
    add_engine_options,
    engine_options,
    fail,
    interrupts_end_at_once,
    print_table,
)
from minivllm.config import DEFAULT_MODEL, EngineConfig
from minivllm.pooling.task import GENERATE
from minivllm.serve import access, operate
from minivllm.serve.tools import TOOL_PARSERS, choose

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from minivllm.engine.async_llm import AsyncLLM
    from minivllm.engine.async_pooler import AsyncPooler
    from minivllm.serve.rpc.server import GrpcServer
    from minivllm.serve.tools import Choice

logger = logging.getLogger("minivllm.serve")

CORE = {"process": "no step waits for HTTP or text", "inproc": "one process: a step waits for HTTP and text"}

EXAMPLES = """examples:
  python -m minivllm.serve                                        the default model, on http://127.0.0.1:8000
  python -m minivllm.serve --model ./my-llama --dtype bfloat16    a local Hugging Face folder
  python -m minivllm.serve --model minilm                         embeddings, scores and reranking
  python -m minivllm.serve --model dummy:tiny --port 9000         random weights, to try the server itself
  python -m minivllm.serve --set kv.prefix=none --trace run.jsonl an option of the feature table; record the run

then:
  curl http://127.0.0.1:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello!"}]}'
"""


def main(argv: Sequence[str], prog: str = "python -m minivllm serve") -> int:
    args = parser(prog).parse_args(argv)
    logs.setup(args.log_format, args.log_level)
    if args.api_servers < 1:
        fail(f"--api-servers {args.api_servers}: must be at least 1")
    options = operate.engine_options(args, lora_options(args, engine_options(args)))
    app_options, tls = access.app_options(args) | operate.app_options(args), access.tls_options(args)
    if args.grpc_port is not None:
        check_grpc(args)
    listener = bind(args.host, args.port)
    for warning in access.warnings(listener.getsockname()[0], app_options["api_keys"], bool(tls)):
        logger.warning(warning)
    if args.api_servers == 1:
        with listener:
            return serve(args, options, listener, app_options, tls)
    from minivllm.serve.front_ends import serve_together

    return serve_together(args, argv, prog, options, listener)


def parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description=f"Serve a model over OpenAI's HTTP protocol ({DEFAULT_MODEL} by default).")
    parser.epilog = EXAMPLES
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: every network (127.0.0.1)")
    group.add_argument("--port", default=8000, type=int, help="0: any free one (8000)")
    what = "server processes on the one port, for one engine in a process of its own; limits such as --rate-limit and"
    group.add_argument(
        "--api-servers", default=1, type=int, metavar="N", help=f"{what} --max-waiting are each server's own (1)"
    )
    what = "serve minivllm/serve/rpc/generate.proto over gRPC too; 0: any free one; needs the extra grpc"
    group.add_argument("--grpc-port", type=int, metavar="PORT", help=f"{what} (off)")
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="what requests call it (--model)")
    access.add_options(parser.add_argument_group("access"))
    operate.add_options(parser.add_argument_group("operation"))
    parsers = ("auto", *TOOL_PARSERS.names())
    group.add_argument(
        "--tool-call-parser",
        choices=parsers,
        default="auto",
        metavar="NAME",
        help=f"how the model writes tool calls: {', '.join(parsers)} (auto: as its chat template does)",
    )
    group.add_argument(
        "--lora", action="append", default=[], metavar="NAME=FOLDER", help="load a LoRA adapter; may be repeated"
    )
    group.add_argument(
        "--lora-dir",
        action="append",
        default=[],
        metavar="FOLDER",
        type=Path,
        help="let clients load and unload adapters of this folder: /v1/load_lora_adapter (off)",
    )
    add_engine_options(parser)
    return parser


def lora_options(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """The engine's options with what --lora and --lora-dir ask for. Exits if they cannot be followed."""
    adapters = {}
    for given in args.lora:
        name, eq, folder = given.partition("=")
        if not (name and eq and folder):
            fail(f"--lora takes NAME=FOLDER, got {given}")
        if name in adapters or name in (args.served_model_name or [options.get("model", DEFAULT_MODEL)]):
            fail(f"--lora {given}: {name} is the name of another adapter, or of the model")
        adapters[name] = folder
    for folder in args.lora_dir:
        if not folder.is_dir():
            fail(f"--lora-dir {folder}: no such folder")
    if not adapters and not args.lora_dir:
        return options
    lora = {"lora.enabled": True, "lora.adapters": adapters}
    EngineConfig.build(options["preset"], {**options["overrides"], **lora})
    return {**options, "overrides": {**options["overrides"], **lora}}


def check_grpc(args: argparse.Namespace) -> None:
    """Before anything is loaded. Exits if gRPC is not installed, or its port cannot be had."""
    from minivllm.serve.rpc.available import check

    check()
    if args.grpc_port == 0 and args.api_servers > 1:
        fail(f"--grpc-port 0: with --api-servers {args.api_servers} name a port, since all of them serve on it")
    bind(args.host, args.grpc_port).close()


def bind(host: str, port: int) -> socket.socket:
    """A socket that owns the address and does not listen yet. Exits with what to do if it cannot be had."""
    if not 0 <= port <= 65535:
        fail(f"--port {port}: must be between 0 and 65535")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return listener
    except socket.gaierror as error:
        fail(f"--host {host}: {error.strerror}. Use 127.0.0.1 (this machine) or 0.0.0.0 (every network).")
    except PermissionError:
        fail(f"port {port} needs privileges. Take one above 1023: --port 8000")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            fail(f"cannot listen on {host}:{port}: {error.strerror}")
        fail_in_use(host, port)


def fail_in_use(host: str, port: int) -> NoReturn:
    fail(f"port {port} on {host} is in use. Stop what uses it, or take another: --port {free_port(host, port)}")


def free_port(host: str, after: int) -> int:
    for port in range(after + 1, min(after + 50, 65535)):
        with socket.socket() as probe:
            if probe.connect_ex((host, port)) != 0:
                return port
    return 0


def serve(
    args: argparse.Namespace,
    options: dict[str, Any],
    listener: socket.socket,
    app_options: dict[str, Any],
    tls: dict[str, Path],
) -> int:
    """options: AsyncLLM's; app_options: create_app's; tls: Server's."""
    begin = time.perf_counter()
    announce_loading(options)
    with interrupts_end_at_once():
        from minivllm.serve.pooling import start
        from minivllm.serve.server import Server

        engine = start(options)
    names = names_of(args, options)
    app, tools = application(args, engine, names, app_options)

    grpc = grpc_server(args, app, tls)

    def announce() -> None:
        report(engine, names, url_of(listener, bool(tls)), tools)
        announce_ready(begin, args, listener, bool(tls), grpc.port if grpc else None)

    try:
        return Server(app, announce, [grpc.running()] if grpc else [], **tls).run_on(listener)
    except OSError as error:  # another server has begun to listen meanwhile: until then, both may hold the address
        if error.errno != errno.EADDRINUSE:
            raise
        fail_in_use(*listener.getsockname()[:2])


def quiet_others() -> None:
    for noisy in ("uvicorn.error", "asyncio", "httpx"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))


def announce_loading(options: dict[str, Any]) -> None:
    quiet_others()
    print(f"Loading {options.get('model', DEFAULT_MODEL)} ...", flush=True)
    waiting.settle()  # before torch, which later imports may bring


def announce_ready(
    begin: float, args: argparse.Namespace, listener: socket.socket, tls: bool, grpc_port: int | None
) -> None:
    seconds, url = time.perf_counter() - begin, url_of(listener, tls)
    grpc = "" if grpc_port is None else f"gRPC: port {grpc_port}   "
    page = f"in a browser: {url}   " if args.page else ""
    print(f"\nReady in {seconds:.1f} s: {url}/v1   ({grpc}{page}Ctrl-C stops)", flush=True)


def refuse_for_pooling(args: argparse.Namespace, task: str) -> None:
    for flag, given, why in (
        ("--tool-call-parser", None if args.tool_call_parser == "auto" else args.tool_call_parser, "no tool is called"),
        ("--otlp-traces-endpoint", args.otlp_traces_endpoint, "requests have no spans"),
        ("--grpc-port", args.grpc_port, "generate.proto has nothing to ask for"),
    ):
        if given is not None:
            fail(f"{flag} {given}: under model.task={task} {why}")


def grpc_server(args: argparse.Namespace, app: Starlette, tls: dict[str, Path]) -> GrpcServer | None:
    if args.grpc_port is None:
        return None
    from minivllm.serve.rpc.server import GrpcServer

    return GrpcServer(app, args.host, args.grpc_port, args.api_servers > 1, **tls)


def names_of(args: argparse.Namespace, options: dict[str, Any]) -> list[str]:
    """What requests may call the model."""
    return args.served_model_name or [options.get("model", DEFAULT_MODEL)]


def url_of(listener: socket.socket, tls: bool) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def application(
    args: argparse.Namespace, engine: AsyncLLM | AsyncPooler, names: Sequence[str], app_options: dict[str, Any]
) -> tuple[Starlette, Choice]:
    """The application over an engine that is ready, and how it reads tool calls."""
    from minivllm.engine.metrics import Metrics
    from minivllm.serve.app import create_app
    from minivllm.serve.telemetry import start as start_tracing

    if engine.task != GENERATE:
        refuse_for_pooling(args, engine.task)
    tools, metrics = choose(args.tool_call_parser, engine.tokenizer), Metrics(names[0])
    own = {"tool_parser": tools.parser, "lora_dirs": args.lora_dir, "tracing": start_tracing(args.otlp_traces_endpoint)}
    return create_app(engine, metrics, names, **own, **app_options), tools


def report(engine: AsyncLLM | AsyncPooler, names: Sequence[str], url: str, tools: Choice) -> None:
    """One table: what is served, then each choice that was made for the user, with its reason."""
    if engine.task != GENERATE:
        from minivllm.serve.pooling import report as report_pooling

        return report_pooling(engine, names, url)
    info, config = engine.info, engine.config
    chosen = {decision.field: decision.reason for decision in engine.decisions}
    blocks = f"{info['num_blocks']:,} of {config.kv.block_size} tokens"
    rows = [
        ("URL", f"{url}/v1", "OpenAI-compatible; /metrics, /health and /openapi.json are beside it"),
        ("model", ", ".join(names), "" if names == [config.model.path] else config.model.path),
        ("engine core", config.engine.core, CORE[config.engine.core]),
        ("attention backend", info["attention"], chosen.pop("runner.attention", "as configured")),
        ("dtype", info["dtype"], chosen.pop("model.dtype", "as configured")),
        *(("adapter", adapter.name, f"rank {adapter.rank}, {adapter.path}") for adapter in engine.list_loras()),
        ("KV blocks", blocks, chosen.pop("kv.num_blocks", "as configured")),
        ("tool calls", tools.name, tools.reason),
    ]
    rows += [decision for decision in engine.decisions if decision.field in chosen]
    print_table("minivllm", ("what", "value", "why"), rows)
