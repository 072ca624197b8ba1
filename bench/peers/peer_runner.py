"""What every run_<engine>.py shares: answering jobs, one JSON line each, until standard input ends.

Runs in the environments of others, so it imports the standard library alone. Lines in:

    {"do": "load", "started": wall-clock seconds, "model": path, "threads": n, "max_len": tokens, "options": {...}}
    {"do": "generate", "prompts": [[id, ...], ...], "num_tokens": [n, ...]}
    {"do": "score", "texts": [[id, ...], ...], "starts": [where the part that counts begins, ...]}

Lines out, one for each: {"parts": {"interpreter": s, "import": s, "load": s, "compile": s, "first token": s},
"settings": {...}, "unable": {workload kind: reason}}, {"seconds": s, "tokens": [[id, ...], ...]},
{"likeliest": [id, ...], "logprobs": [of the text's own token, ...]} (all texts' positions in a row), or
{"error": reason}.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any, Protocol

BEGIN = time.time()
FIRST_PROMPT = [11, 42, 7, 19, 23, 5, 31, 64]

Tokens = list[list[int]]


class Engine(Protocol):
    """Made after its library is imported: __init__(job) loads the model."""

    compile_seconds: float  # of those that __init__ took, the ones spent compiling
    settings: dict[str, Any]  # what was chosen, for the record
    unable: dict[str, str]  # kind of workload -> why this engine is not asked for it ("batch": more than one request)

    @staticmethod
    def imports() -> None:
        """Import the library."""

    def generate(self, prompts: Tokens, num_tokens: list[int]) -> Tokens:
        """Greedy; exactly num_tokens[i] ids for prompts[i], whatever they are (ignore_eos)."""

    def score(self, texts: Tokens, starts: list[int]) -> tuple[list[int], list[float]]:
        """Of the positions from starts[i] of each texts[i] on: the likeliest token behind what precedes, and the
        log-probability of the one that is there. Not asked of every engine."""


def serve(engine_class: type[Engine]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not be taken for an answer
    engine = None
    for line in sys.stdin:
        job = json.loads(line)
        try:
            if job["do"] == "load":
                engine, answer = load(engine_class, job)
            elif job["do"] == "score":
                likeliest, logprobs = engine.score(job["texts"], job["starts"])
                answer = {"likeliest": likeliest, "logprobs": logprobs}
            else:
                begin = time.perf_counter()
                tokens = engine.generate(job["prompts"], job["num_tokens"])
                answer = {"seconds": time.perf_counter() - begin, "tokens": tokens}
        except Exception as e:
            traceback.print_exc()
            answer = {"error": f"{type(e).__name__}: {e}"[:500]}
        print(json.dumps(answer), file=answers)


def load(engine_class: type[Engine], job: dict[str, Any]) -> tuple[Engine, dict[str, Any]]:
    """Load, and say what took how long from the moment that the process was asked for."""
    parts = {"interpreter": BEGIN - job["started"]}
    begin = time.perf_counter()
    engine_class.imports()
    imported = time.perf_counter()
    engine = engine_class(job)
    loaded = time.perf_counter()
    (tokens,) = engine.generate([FIRST_PROMPT], [1])
    if len(tokens) != 1:
        raise ValueError(f"one token was asked for, {len(tokens)} came")
    parts["import"] = imported - begin
    parts["load"] = loaded - imported - engine.compile_seconds
    parts["compile"] = engine.compile_seconds
    parts["first token"] = time.perf_counter() - loaded
    return engine, {"parts": parts, "settings": engine.settings, "unable": engine.unable}
