"""Random JSON Schemas, each on every backend, over the cores: an output fits its schema, or the request was refused."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import random
import secrets
import sys
import time
from collections import Counter

CHUNK = 100  # draws of a process at a time
STUCK = 60  # seconds after which one draw is a finding: the stack is printed, and the process ends


def main(num_draws: int, end: float) -> int:
    """end: by time.monotonic(). Returns how many findings there were, each of which is told."""
    base = secrets.randbits(40)
    chunks = [(base + at, min(CHUNK, num_draws - at), end) for at in range(0, num_draws, CHUNK)]
    counts: Counter[tuple[str, str]] = Counter()
    context = multiprocessing.get_context("spawn")
    with context.Pool(os.cpu_count()) as pool:
        for found, findings in pool.imap_unordered(_chunk, chunks):
            counts.update(found)
            for finding in findings:
                print(finding, file=sys.stderr, flush=True)
    for (backend, outcome), count in sorted(counts.items()):
        print(f"schemas {backend:12}{outcome:8}{count:>10,}")
    return sum(count for (_, outcome), count in counts.items() if outcome == "wrong")


def _chunk(chunk: tuple[int, int, float]) -> tuple[Counter[tuple[str, str]], list[str]]:
    import random_schemas

    first, num, end = chunk
    counts: Counter[tuple[str, str]] = Counter()
    findings = []
    for seed in range(first, first + num):
        if time.monotonic() > end:
            break
        schema = random_schemas.schema(random.Random(seed))
        for backend in random_schemas.BACKENDS:
            faulthandler.dump_traceback_later(STUCK, exit=True)
            try:
                drawn = random_schemas.draw(schema, backend, random.Random(seed))
            except Exception as error:
                drawn = random_schemas.Draw("wrong", f"{type(error).__name__}: {error}")
            finally:
                faulthandler.cancel_dump_traceback_later()
            counts[backend, drawn.outcome] += 1
            if drawn.outcome == "wrong":
                findings.append(f"schemas: {backend}, seed {seed}: {drawn.detail}\n    {json.dumps(schema)}")
    return counts, findings
