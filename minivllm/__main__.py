"""`python -m minivllm <command>`."""

from __future__ import annotations

import sys
from importlib import import_module

from minivllm.cli import fail, run_command
from minivllm.registry import did_you_mean

COMMANDS = {
    "serve": ("minivllm.serve.command", "an OpenAI-compatible server"),
    "chat": ("minivllm.cli_chat", "talk to a model in this terminal"),
    "batch": ("minivllm.cli_batch", "answer a file of requests offline, in OpenAI's batch format"),
    "features": ("minivllm.cli_features", "every option of the engine, its default and its meaning"),
    "trace": ("minivllm.cli_trace", "replay a recorded run, or export it to the Chrome trace format"),
    "chapter": ("minivllm.cli_chapter", "run a chapter of the book, or do its exercise"),
    "version": ("", "the version of minivllm"),
}


def usage() -> str:
    commands = "\n".join(f"  {name:10}{what}" for name, (_, what) in COMMANDS.items())
    return f"usage: python -m minivllm <command> [options]\n\n{commands}\n\nOptions: python -m minivllm serve --help"


def main(argv: list[str] | None = None) -> int | None:
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help", "help"):
        print(usage())
        return 0
    if command in ("version", "--version", "-V"):
        from minivllm import __version__

        print(f"minivllm {__version__}")
        return 0
    if command not in COMMANDS:
        fail(f"no command {command!r}.{did_you_mean(command, list(COMMANDS))}\n\n{usage()}", code=2)
    return import_module(COMMANDS[command][0]).main(rest)


if __name__ == "__main__":
    run_command(main)
