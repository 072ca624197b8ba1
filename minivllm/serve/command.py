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

import msgspec

from minivllm import child, logs, waiting
from minivllm.config import DEFAULT_MODEL, EngineConfig
from minivllm.engine.template_shapes import FORMATS
from minivllm.errors import ModelError
from minivllm.pooling.task import GENERATE
from minivllm.serve import access, hosts, operate, reasoning
from minivllm.serve.tools import TOOL_PARSERS, choose
from minivllm.terminal import (
    Parser,
    add_engine_options,
    engine_options,
    fail,
    interrupts_end_at_once,
    print_table,
)

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from minivllm.engine.async_llm import AsyncLLM
    from minivllm.engine.tokenizer import TextTokenizer
    from minivllm.serve.rpc.server import GrpcServer

    Row = tuple[str, str, str]  # of the table at the start: what, value, why

logger = logging.getLogger("minivllm.serve")

ORDER = {
    "fcfs": "first come, first served",
    "priority": "as requests say",
    "fair": "clients in turn: API keys, or addresses where there are none",
}
HOST, PORT = "127.0.0.1", 8000

CORE = {"process": "no step waits for HTTP or text", "inproc": "one process: a step waits for HTTP and text"}

EXAMPLES = """examples:
  minivllm serve                                         the default model, on http://127.0.0.1:8000
  minivllm serve ./my-llama --dtype bfloat16             a local Hugging Face folder, or a .gguf file
  minivllm serve minilm                                  embeddings, scores and reranking
  minivllm serve dummy:tiny --port 9000                  random weights, to try the server itself
  minivllm serve --set kv.prefix=none --trace run.jsonl  an option of the feature table; record the run

The same without the console command: python -m minivllm.serve --model minilm

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
    read_template(args.chat_template)
    operate.check_store(args)
    if args.grpc_port is not None:
        check_grpc(args)
    listener = take_address(args)
    bound = "" if listener.family == socket.AF_UNIX else listener.getsockname()[0]
    app_options["host_names"] = hosts.names(args.allowed_host, args.host, bound)
    if bound:
        for warning in access.warnings(bound, access.keys_of(args), bool(tls)):
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
    group.add_argument("--host", default=HOST, help="address to listen on; 0.0.0.0: every network (127.0.0.1)")
    group.add_argument("--port", default=PORT, type=int, help=f"0: any free one ({PORT})")
    what = "listen on a socket in the file system and on no port; who may connect is up to its folder and the umask"
    group.add_argument("--uds", type=Path, metavar="PATH", help=f"{what} (off)")
    what = "server processes on the one port, for one engine in a process of its own; they count together for limits"
    group.add_argument("--api-servers", default=1, type=int, metavar="N", help=f"{what} (1)")
    what = "serve minivllm/serve/rpc/generate.proto over gRPC too; 0: any free one; needs the extra grpc"
    group.add_argument("--grpc-port", type=int, metavar="PORT", help=f"{what} (off)")
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="what requests call it (--model)")
    access.add_options(parser.add_argument_group("access"))
    operate.add_options(parser.add_argument_group("operation"))
    what = "a Jinja template in the place of the model's own"
    group.add_argument("--chat-template", type=Path, metavar="FILE", help=f"{what} (the model's)")
    what = "how it gets a message's content: a string, or OpenAI's list of parts"
    group.add_argument(
        "--chat-template-content-format", choices=FORMATS, default="auto", help=f"{what} (auto: as it reads it)"
    )
    parsers = ("auto", *TOOL_PARSERS.names())
    group.add_argument(
        "--tool-call-parser",
        choices=parsers,
        default="auto",
        metavar="NAME",
        help=f"how the model writes tool calls: {', '.join(parsers)} (auto: as its chat template does)",
    )
    parsers = ("auto", "none", *reasoning.REASONING_PARSERS.names())
    group.add_argument(
        "--reasoning-parser",
        choices=parsers,
        default="auto",
        metavar="NAME",
        help=f"how the model writes what it thinks: {', '.join(parsers)} (auto: as its chat template does)",
    )
    group.add_argument(
        "--lora", action="append", default=[], metavar="NAME=FOLDER", help="load a LoRA adapter; may be repeated"
    )
    group.add_argument(
        "--lora-modules",
        action="extend",
        dest="lora",
        nargs="+",
        metavar="NAME=FOLDER",
        help="vLLM's: the same of several, also as JSON with name and path",
    )
    group.add_argument(
        "--lora-dir",
        action="append",
        default=[],
        metavar="FOLDER",
        type=Path,
        help="let clients load and unload adapters of this folder: /v1/load_lora_adapter (off)",
    )
    add_engine_options(parser, model_argument=True)
    return parser


def lora_options(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """The engine's options with what --lora and --lora-dir ask for. Exits if they cannot be followed."""
    adapters = {}
    for given in args.lora:
        name, folder = adapter_of(given)
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


class LoraModule(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's JSON form of an adapter."""

    name: str
    path: str
    base_model_name: str | None = None  # there is one base model


def adapter_of(given: str) -> tuple[str, str]:
    """Its name and its folder. Exits if they are not given."""
    if not given.startswith("{"):
        name, _, folder = given.partition("=")
    else:
        try:
            module = msgspec.json.decode(given, type=LoraModule)
        except msgspec.DecodeError as error:
            fail(f"--lora-modules {given}: {error}")
        name, folder = module.name, module.path
    if not (name and folder):
        fail(f"--lora takes NAME=FOLDER, got {given}")
    return name, folder


def read_template(path: Path | None) -> str | None:
    """Exits for a file that is no template."""
    if path is None:
        return None
    from minivllm.engine.chat_template import check

    try:
        source = path.read_text("utf-8")
        check(source)
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--chat-template {path}: {getattr(error, 'strerror', None) or 'is no text'}")
    except ModelError as error:
        fail(f"--chat-template {path}: {error}")
    return source


def check_grpc(args: argparse.Namespace) -> None:
    """Before anything is loaded. Exits if gRPC is not installed, or its port cannot be had."""
    from minivllm.serve.rpc.available import check

    check()
    if args.grpc_port == 0 and args.api_servers > 1:
        fail(f"--grpc-port 0: with --api-servers {args.api_servers} name a port, since all of them serve on it")
    bind(args.host, args.grpc_port).close()


def take_address(args: argparse.Namespace) -> socket.socket:
    """A socket that owns what --uds, or --host and --port say, and does not listen yet. Exits if it cannot be had."""
    if args.uds is None:
        return bind(args.host, args.port)
    if (args.host, args.port) != (HOST, PORT):
        fail("--uds excludes --host and --port: the server listens on one of them")
    if args.api_servers > 1:
        fail(f"--uds: --api-servers {args.api_servers} cannot share a socket in the file system; they need a port")
    from minivllm.serve import unix_socket

    return unix_socket.bind(args.uds)


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
        from minivllm.engine.async_llm import AsyncLLM
        from minivllm.serve.pooling import for_serving
        from minivllm.serve.server import Server

        engine = AsyncLLM(**for_serving(options, access.keys_of(args)))
    names = names_of(args, options)
    app, parsers = application(args, engine, names, app_options)

    grpc = grpc_server(args, app, tls)

    def announce() -> None:
        child.freeze_heap()
        report(engine, names, url_of(listener, bool(tls)), parsers)
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
    page = f"in a browser: {url}   " if args.page and args.uds is None else ""
    print(f"\nReady in {seconds:.1f} s: {url}/v1   ({grpc}{page}Ctrl-C stops)", flush=True)


def refuse_for_pooling(args: argparse.Namespace, task: str) -> None:
    for flag, given, why in (
        ("--tool-call-parser", None if args.tool_call_parser == "auto" else args.tool_call_parser, "no tool is called"),
        ("--reasoning-parser", None if args.reasoning_parser == "auto" else args.reasoning_parser, "no model thinks"),
        ("--chat-template", args.chat_template, "no conversation becomes a prompt"),
        (
            "--chat-template-content-format",
            None if args.chat_template_content_format == "auto" else args.chat_template_content_format,
            "no conversation becomes a prompt",
        ),
        ("--otlp-traces-endpoint", args.otlp_traces_endpoint, "requests have no spans"),
        ("--grpc-port", args.grpc_port, "generate.proto has nothing to ask for"),
        ("--store-path", args.store_path, "there are no responses to keep"),
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
    """A socket in the file system as nginx writes it."""
    scheme = "https" if tls else "http"
    if listener.family == socket.AF_UNIX:
        return f"{scheme}://unix:{listener.getsockname()}:"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def use_template(tokenizer: TextTokenizer, args: argparse.Namespace) -> None:
    if (template := read_template(args.chat_template)) is not None:
        tokenizer.use_chat_template(template)
    tokenizer.use_content_format(args.chat_template_content_format)


def application(
    args: argparse.Namespace, engine: AsyncLLM, names: Sequence[str], app_options: dict[str, Any]
) -> tuple[Starlette, list[Row]]:
    """The application over an engine that is ready, and how it reads what the model writes."""
    from minivllm.engine.metrics import Metrics, cache_labels
    from minivllm.serve.app import create_app
    from minivllm.serve.telemetry import start as start_tracing

    if engine.task != GENERATE:
        refuse_for_pooling(args, engine.task)
    else:
        use_template(engine.tokenizer, args)
    tools = choose(args.tool_call_parser, engine.tokenizer)
    thoughts = reasoning.choose(args.reasoning_parser, engine.tokenizer)
    rows, metrics = (
        [("tool calls", *tools[1:]), ("reasoning", *thoughts[1:])],
        Metrics(names[0], prefix=args.metrics_prefix),
    )
    metrics.cache = cache_labels(engine.info, engine.config)
    own = {
        "tool_parser": tools.parser,
        "reasoning_parser": thoughts.parser,
        "lora_dirs": args.lora_dir,
        "tracing": start_tracing(args.otlp_traces_endpoint),
    }
    kept = operate.open_store(args) if engine.task == GENERATE else operate.Kept(None, "nowhere", "there are none")
    rows.append(("responses are kept", kept.where, kept.why))
    return create_app(engine, metrics, names, response_store=kept.store, **own, **app_options), rows


def report(engine: AsyncLLM, names: Sequence[str], url: str, parsers: list[Row]) -> None:
    """One table: what is served, then each choice that was made for the user, with its reason."""
    if engine.task != GENERATE:
        from minivllm.serve.pooling import report as report_pooling

        return report_pooling(engine, names, url)
    info, config = engine.info, engine.config
    chosen = {decision.field: decision.reason for decision in engine.decisions}
    blocks = f"{info['num_blocks']:,} of {info['block_size']} tokens"
    rows = [
        ("URL", f"{url}/v1", "OpenAI-compatible; /metrics, /health and /openapi.json are beside it"),
        ("model", ", ".join(names), "" if names == [config.model.path] else config.model.path),
        ("engine core", config.engine.core, CORE[config.engine.core]),
        ("attention backend", info["attention"], chosen.pop("runner.attention", "as configured")),
        ("dtype", info["dtype"], chosen.pop("model.dtype", "as configured")),
        *(("adapter", adapter.name, f"rank {adapter.rank}, {adapter.path}") for adapter in engine.list_loras()),
        ("KV blocks", blocks, chosen.pop("kv.num_blocks", "as configured")),
        *parsers,
        ("order of service", config.scheduler.policy, ORDER[config.scheduler.policy]),
    ]
    rows += [decision for decision in engine.decisions if decision.field in chosen]
    print_table("minivllm", ("what", "value", "why"), rows)
