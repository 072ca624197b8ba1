"""What the commands share: a parser that suggests, the engine's flags, and how an error reaches the user.

Below serve/ and cli/, which hold the commands themselves. Nothing here imports torch: `--help`, `features` and a wrong
flag answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from minivllm import child
from minivllm.config import PRESETS, VLLM_NAMES, EngineConfig, from_vllm_names, parse_set
from minivllm.errors import UserError
from minivllm.features import FEATURES
from minivllm.registry import did_you_mean

FIELD_HELP = {  # of the fields that have no row in the feature table
    "model.path": "alias, local folder, .gguf file, dummy:<shape> or Hub id",
    "model.tokenizer": "folder or Hub id; by default the model's own",
    "model.task": "auto (what the model is made for), generate, embed or score",
    "model.pooling": "a text's vector under task embed: auto (as the model says), mean, last or cls",
    "model.network": "whose code it is: auto (a file of ours, else transformers'), own or transformers",
    "model.dtype": "auto, bfloat16, float16 or float32",
    "model.device": "auto, cpu or cuda",
    "model.max_model_len": "longest prompt + answer, in tokens",
    "model.seed": "of requests that bring no seed, and of dummy weights",
    "kv.block_size": "tokens a KV block",
    "kv.num_blocks": "size of the KV pool, in blocks",
    "kv.memory_fraction": "size of the KV pool, as a fraction of the memory that is free",
    "kv.prefault": "touch the whole KV pool at start-up, which takes longer; no step waits for the system's pages then",
    "kv.memory": "size of the KV pool, in bytes or with a unit: 2GiB",
    "kv.swap_memory": "host memory for the KV of preempted requests, if kv.preemption can swap",
    "kv.hash_seed": "fixes the key of the prefix hash; by default it is random",
    "speculative_config": 'JSON: {"method": "ngram", "num_speculative_tokens": 6}, or another method',
    "spec_decode.k": "tokens guessed at a time, at most",
    "spec_decode.model": "what guesses tokens: a model with the same vocabulary (draft), a folder (eagle, medusa)",
    "spec_decode.layers": "how many of the model's own layers guess tokens (method self_draft)",
    "spec_decode.ngram_min": "shortest run of tokens that the ngram method looks up",
    "spec_decode.ngram_max": "longest run of tokens that the ngram method looks up",
    "spec_decode.suffix_tokens": "tokens of earlier outputs that the suffix method remembers",
    "executor.num_threads": "threads of the CPU backend; by default the cores that this process may use",
    "executor.device": "what executor.kind=simulated takes the time of: h100, a100-80 ..., or a profile's file",
    "executor.answer_tokens": "mean length of a simulated answer that no max_tokens ends before",
    "executor.acceptance": "chance that a simulated guess is right",
    "engine.replicas": "engine cores side by side, each a process with its share of memory and cores",
    "engine.max_logprobs": "log-probabilities of a position that a request may ask for; -1: no limit",
    "engine.step_timeout": "seconds after which a step or call that still runs is told of; 0: never",
    "engine.log_format": "of a core in a process of its own: text, or json",
    "debug.recent_steps": "steps that the server's /debug/trace can show",
    "debug.check": "assert every invariant after each step",
    "lora.max_loras": "different LoRA adapters in a step at most",
    "lora.max_rank": "the highest rank of a LoRA adapter",
    "lora.max_cpu_loras": "LoRA adapters in host memory at most",
    "scheduler.max_num_seqs": "requests in a step at most",
    "scheduler.max_num_batched_tokens": "tokens in a step at most",
}


ALIASES = {  # other names beside that of VLLM_NAMES: our own, and vLLM's since 0.12
    "data_parallel_size": ("--replicas",),
    "guided_decoding_backend": ("--structured-outputs-config.backend",),
}


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=34, width=min(120, shutil.get_terminal_size((100, 24)).columns))


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, whose complaint about an unknown option names the nearest one. Options may be
    written with underscores, as to vLLM."""

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else args
        parsed, unknown = self.parse_known_args([self._dashed(each) for each in given], namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            if not name.startswith("-"):
                self.error(f"one argument too many: {name}")
            self.error(f"no option {name}.{did_you_mean(name, list(self._option_string_actions))}")
        return parsed

    def _dashed(self, given: str) -> str:
        name, equals, value = given.partition("=")
        dashed = name.replace("_", "-")
        return dashed + equals + value if dashed in self._option_string_actions else given

    def error(self, message: str) -> NoReturn:
        if wrong := re.match(r"argument command: invalid choice: '(.*?)' \(choose from (.*)\)", message):
            known = re.findall(r"\w+", wrong[2])
            message = f'no command "{wrong[1]}".{did_you_mean(wrong[1], known)} Commands: {", ".join(known)}'
        fail(f"{message}\nAll options: {self.prog} --help", code=2)


def fail(message: str, code: int = 1) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run a command to its exit code. An error that the user can mend is one message, without a traceback."""
    try:
        code = main()
    except UserError as error:
        fail(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # `... | head` has read enough
        sys.stderr.close()
        code = 0
    sys.exit(code or 0)


@contextlib.contextmanager
def interrupts_end_at_once() -> Iterator[None]:
    """For importing torch and loading a model: Ctrl-C ends the process here and now, with 130.

    A KeyboardInterrupt that happens to be raised in one of importlib's callbacks, or in an extension's, is printed
    there and forgotten, and the program would load on. Nothing is left half done: see loading/cache.py.
    """

    def end(number: int, frame: object) -> NoReturn:
        os.write(2, b"interrupted\n")
        child.remove_unclaimed()
        os._exit(130)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def add_subcommands(parser: Parser) -> Any:
    """Sub-parsers whose choice is `args.command`; a wrong one is answered with the nearest."""
    return parser.add_subparsers(dest="command", required=True, metavar="command", prog=parser.prog)


def add_engine_options(parser: argparse.ArgumentParser, model_argument: bool = False) -> None:
    """vLLM's flags, --preset, --set and --trace. `engine_options` reads them back.

    model_argument: the model may also be given as an argument, as in `vllm serve MODEL`.
    """
    parser.usage = "%(prog)s [options]"
    if model_argument:
        parser.usage = "%(prog)s [MODEL] [options]"
        parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
    group = parser.add_argument_group("engine", "vLLM's names for the commonest options; in parentheses the default")
    defaults, features = EngineConfig(), {feature.field: feature for feature in FEATURES}
    for name, dotted in VLLM_NAMES.items():
        default, feature = defaults.get(dotted), features.get(dotted)
        what = FIELD_HELP.get(name) or FIELD_HELP.get(dotted) or feature.what
        flags = (*ALIASES.get(name, ()), f"--{name.replace('_', '-')}")
        if isinstance(default, bool) or name == "enable_prefix_caching":
            action, shown = argparse.BooleanOptionalAction, "on" if default not in (False, "none") else "off"
            group.add_argument(*flags, dest=name, action=action, default=None, help=f"{what} ({shown})")
        else:
            choices = f" [{' | '.join(map(str, feature.options))}]" if feature and name not in FIELD_HELP else ""
            shown = "automatic" if default is None else default
            metavar = name.rpartition("_")[2].upper()
            group.add_argument(*flags, dest=name, default=None, metavar=metavar, help=f"{what}{choices} ({shown})")
    group = parser.add_argument_group("features", "every other option; `python -m minivllm features` lists them")
    presets = "; ".join(f"{name}: {preset.what}" for name, preset in PRESETS.items())
    group.add_argument(
        "--preset", default="v1", metavar="NAME", help=f"{presets}; ch06: as of the book's chapter 6 (v1)"
    )
    group.add_argument("--set", action="append", default=[], metavar="a.b=c", help="set one option; may be repeated")
    group.add_argument("--trace", metavar="FILE", help="record every step, as minivllm.trace/1 (JSON Lines)")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords for LLM or AsyncLLM. Raises ConfigError for a value that cannot be, before anything is loaded."""
    names = {name: value for name in VLLM_NAMES if (value := getattr(args, name)) is not None}
    model = getattr(args, "model_argument", None)
    if model is not None and names.setdefault("model", model) != model:
        fail(f"two models: {model}, and --model {names['model']}. Name one.", code=2)
    overrides: dict[str, Any] = parse_set(args.set)
    if args.trace is not None:
        overrides["debug.trace"] = args.trace
    EngineConfig.build(args.preset, {**from_vllm_names(names), **overrides})
    return {**names, "preset": args.preset, "overrides": overrides}


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table, if the terminal is wide enough; else the last column goes below the others. Into a file or a pipe:
    aligned text of full width."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [columns, *cells]) for i in range(len(columns))]
    if not sys.stdout.isatty():
        print("\n".join(_aligned([columns, *cells], widths)))
    elif sum(widths[:-1]) + 2 * len(widths) + 30 <= shutil.get_terminal_size().columns:
        _print_rich_table(title, columns, cells)
    else:
        heads = _aligned([row[:-1] for row in cells], widths)
        width = shutil.get_terminal_size().columns - 1
        for head, row in zip(heads, cells, strict=True):
            print(head)
            print(textwrap.fill(row[-1], width, initial_indent="    ", subsequent_indent="    "))


def _aligned(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]


def _print_rich_table(title: str, columns: Sequence[str], cells: list[list[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, no_wrap=i < len(columns) - 1)
    for row in cells:
        table.add_row(*row)
    Console(markup=False, highlight=False).print(table)
