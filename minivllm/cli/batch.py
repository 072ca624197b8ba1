"""The `batch` command: answer a file of requests offline, and go on after a kill (serve/batch.py)."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minivllm.config import DEFAULT_MODEL
from minivllm.serve import reasoning
from minivllm.serve.tools import TOOL_PARSERS, choose
from minivllm.terminal import Parser, add_engine_options, engine_options, fail, interrupts_end_at_once

EXAMPLES = """Each line of the input is a request in OpenAI's batch format:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 50}}

Run the same command again after an interruption: what the output has is not asked again. The exit code is 1 if any
line ended in an error.
"""


def main(argv: Sequence[str], prog: str = "python -m minivllm batch") -> int:
    args = parser(prog).parse_args(argv)
    options = engine_options(args)
    if args.concurrency is not None and args.concurrency < 1:
        fail(f"--concurrency {args.concurrency}: must be at least 1")
    from minivllm.serve import batch

    asked = batch.scan(args.input)
    with batch.opened(args.output) as output:
        batch.is_same_run(asked, output, args.output)
        num_left = len(asked) - len(output.done)
        if num_left:
            asyncio.run(answer_all(args, options, output, len(asked)))
        skipped = f", {len(asked) - num_left:,} of them before this run" if num_left < len(asked) else ""
        ended = f"{output.num_failed:,} of them with an error" if output.num_failed else "none with an error"
        print(f"{args.output}: lines answered: {len(output.done):,}{skipped}; {ended}", file=sys.stderr)
        return 1 if output.num_failed else 0


def parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="Answer a file of requests, in OpenAI's batch format, without a server.")
    parser.epilog = EXAMPLES
    parser.add_argument("input", type=Path, metavar="in.jsonl")
    parser.add_argument("output", type=Path, metavar="out.jsonl")
    group = parser.add_argument_group("batch")
    group.add_argument("--concurrency", type=int, metavar="N", help="requests at a time (twice --max-num-seqs)")
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="what requests call it (--model)")
    parsers = ("auto", *TOOL_PARSERS.names())
    group.add_argument("--tool-call-parser", choices=parsers, default="auto", metavar="NAME", help="as of serve (auto)")
    parsers = ("auto", "none", *reasoning.REASONING_PARSERS.names())
    group.add_argument("--reasoning-parser", choices=parsers, default="auto", metavar="NAME", help="as of serve (auto)")
    add_engine_options(parser)
    parser.usage = "%(prog)s in.jsonl out.jsonl [options]"
    return parser


async def answer_all(args: argparse.Namespace, options: dict[str, Any], output: Any, total: int) -> None:
    logging.basicConfig(format="%(levelname)s %(message)s")
    names = args.served_model_name or [options.get("model", DEFAULT_MODEL)]
    with interrupts_end_at_once():
        from tqdm import tqdm

        from minivllm.engine.async_llm import AsyncLLM
        from minivllm.engine.metrics import Metrics
        from minivllm.serve.batch import run
        from minivllm.serve.generation import Service

        engine = AsyncLLM(**options)
    service = Service(engine, Metrics(names[0]), names, choose(args.tool_call_parser, engine.tokenizer).parser)
    service.reasoning_parser = reasoning.choose(args.reasoning_parser, engine.tokenizer).parser
    concurrency = args.concurrency or 2 * engine.config.scheduler.max_num_seqs
    num_tokens = 0
    # disable=None: no bar in a log file
    with tqdm(total=total, initial=len(output.done), unit=" requests", disable=None) as bar:

        def tick(tokens: int) -> None:
            nonlocal num_tokens
            num_tokens += tokens
            bar.update()
            if seconds := bar.format_dict["elapsed"]:
                bar.set_postfix_str(f"{num_tokens / seconds:,.0f} tokens/s, {output.num_failed} errors", refresh=False)

        try:
            await run(args.input, output, service, min(concurrency, total), tick)
        finally:
            await engine.shutdown()
