"""Is the control plane as quick as it was? The micro-benchmarks beside the committed record (`make microbench`).

    python -m benchmarks.compare RUN.json             a table; exit code 1 if a ratio has grown
    python -m benchmarks.compare RUN.json --record    keep this run as the record, with the machine's name

Times of two machines cannot be compared, so nothing fails by them: they are shown. What fails are ratios of two cases
of one run, which a machine leaves much as they are: each case to the yardstick (a loop of the interpreter's) against
the same ratio in the record, and one case to another, larger one (GROWTH) against what its work has grown by.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import RESULTS, record

RECORD = RESULTS / "microbench.json"
YARDSTICK = "test_yardstick"
# A case may take so many times what it took in the record, seen from the yardstick: processors differ by as much in how
# they do at hashing, at numpy's small arrays and at plain bytecode. Twice is more than they do, and a lost fast path.
MOST = 2.0
# (smaller case, larger case, how many times the smaller one the larger one may take): four times the requests are four
# times the work, and a quarter more, since what no longer fits in a cache is slower.
GROWTH = [
    ("test_schedule_and_update[64]", "test_schedule_and_update[256]", 5.0),
    *((f"test_input_batch[64-{name}]", f"test_input_batch[256-{name}]", 5.0) for name in ("rebuild", "persistent")),
    *((f"test_msgpack[{way}-{what}-64]", f"test_msgpack[{way}-{what}-256]", 5.0)
      for way in ("encode", "decode") for what in ("plan", "report")),
    ("test_block_hash[xxhash_cbor]", "test_block_hash[sha256_cbor]", 2.5),
    ("test_input_batch[256-rebuild]", "test_input_batch[256-persistent]", 1.0),  # what the persistent batch is for
]  # fmt: skip


class Row(NamedTuple):
    what: str
    ratio: float  # in this run
    most: float

    @property
    def has_grown(self) -> bool:
        return self.ratio > self.most


def fastest(run: dict[str, Any]) -> dict[str, float]:
    """Microseconds of each case's fastest round, as pytest-benchmark writes it: what else a machine does only adds."""
    return {case["name"]: 1e6 * case["stats"]["min"] for case in run["benchmarks"]}


def compare(now: dict[str, float], then: dict[str, float]) -> list[Row]:
    """Raises KeyError for a case that this run lacks."""
    rows = [
        Row(f"{name} / yardstick", now[name] / now[YARDSTICK], MOST * then[name] / then[YARDSTICK])
        for name in then
        if name != YARDSTICK
    ]
    return rows + [Row(f"{large} / {small}", now[large] / now[small], most) for small, large, most in GROWTH]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="what --benchmark-json has written")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name} instead")
    args = parser.parse_args(argv)
    now = fastest(json.loads(args.run.read_text()))
    if args.record:
        kept = record("microbench", {}, {"fastest_us": {name: round(us, 2) for name, us in now.items()}})
        kept["command"] = "make microbench ARGS=--record"
        RECORD.write_text(json.dumps(kept, indent=1) + "\n")
        return 0
    kept = json.loads(RECORD.read_text())
    then = kept["results"]["fastest_us"]
    print(f"microseconds of the fastest round: here, and in the record ({kept['machine']['cpu']}, {kept['commit']})")
    for name, us in now.items():
        print(f"  {name:45} {us:9.1f} {then.get(name, float('nan')):9.1f}")
    print("ratios within a run: here, and the most that they may be")
    rows = compare(now, then)
    for row in rows:
        print(f"  {row.what:70} {row.ratio:7.2f} {row.most:7.2f}{'  HAS GROWN' * row.has_grown}")
    return int(any(row.has_grown for row in rows))


if __name__ == "__main__":
    sys.exit(main())
