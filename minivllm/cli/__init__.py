"""The commands: `minivllm <command>`, and the same as `python -m minivllm <command>`.

A command is a module with `main(argv, prog)`, imported when it is asked for: the list of them costs no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from minivllm.registry import did_you_mean
from minivllm.terminal import fail, run_command

COMMANDS = {
    "serve": ("minivllm.serve.command", "an OpenAI-compatible server"),
    "chat": ("minivllm.cli.chat", "talk to a model in this terminal"),
    "batch": ("minivllm.cli.batch", "answer a file of requests offline, in OpenAI's batch format"),
    "bench": ("minivllm.cli.bench", "measure something on this machine; without a name: what each benchmark answers"),
    "chapter": ("minivllm.cli.chapter", "run a chapter of the book, or do its exercise"),
    "simulate": ("minivllm.cli.simulate", "what a cluster of GPUs that you lack would do with a trace of requests"),
    "profile": ("minivllm.cli.profile", "measure this machine with a model, for simulated devices to be like it"),
    "plan": ("minivllm.cli.plan", "which devices and options serve a workload within objectives, and at what cost"),
    "features": ("minivllm.cli.features", "every option of the engine, its default and its meaning"),
    "trace": ("minivllm.cli.trace", "replay or export a recorded run; or say what a trace of requests asks"),
    "version": ("", "the version of minivllm"),
}


def program() -> str:
    """What was typed: the console command, or the module that is the same."""
    return "minivllm" if Path(sys.argv[0]).stem == "minivllm" else "python -m minivllm"


def usage(prog: str) -> str:
    commands = "\n".join(f"  {name:10}{what}" for name, (_, what) in COMMANDS.items())
    return f"usage: {prog} <command> [options]\n\n{commands}\n\nOptions of a command: {prog} serve --help"


def main(argv: list[str] | None = None) -> int | None:
    prog = program()
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help", "help"):
        print(usage(prog))
        return 0
    if command in ("version", "--version", "-V"):
        from minivllm import __version__

        print(f"minivllm {__version__}")
        return 0
    if command not in COMMANDS:
        fail(f"no command {command!r}.{did_you_mean(command, list(COMMANDS))}\n\n{usage(prog)}", code=2)
    return import_module(COMMANDS[command][0]).main(rest, f"{prog} {command}")


def run() -> NoReturn:
    """The console command (pyproject.toml, [project.scripts])."""
    run_command(main)
