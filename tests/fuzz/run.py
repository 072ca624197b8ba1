"""The parsers of what strangers write, given what is nearly right, for as long as there is time; and before that random
schemas, of which an output fits or the request is refused (fuzz/schemas.py).

    make fuzz                                an hour: 50,000 schemas, then all parsers in turn
    make fuzz FUZZ_SECONDS=60 ARGS="regex"   one of the parsers, a minute
    make fuzz ARGS="schemas --draws 1000"    schemas alone

What it finds becomes a file of tests/fuzz/corpus, in its shortest form: commit it with the repair, and every run of the
tests reads it again.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import logging
import secrets
import sys
import time
from collections.abc import Sequence

from fuzz import schemas
from fuzz.limits import Memory
from fuzz.mutations import mutated
from fuzz.targets import CORPUS, TARGETS, Target
from fuzz.test_parsers import keeps_the_rule
from hypothesis import HealthCheck, given, seed, settings

ROUND = 500  # inputs of a parser before the next one has its turn
STUCK = 60  # seconds after which one input is a finding: the stack is printed, and the run ends


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="PARSER", help=f"of: schemas, {', '.join(TARGETS)} (all)")
    parser.add_argument("--draws", type=int, default=50_000, help="of schemas, each on every backend (50,000)")
    parser.add_argument("--seconds", type=float, default=3600, help="(3600)")
    args = parser.parse_args(argv)
    if unknown := set(args.targets) - {"schemas", *TARGETS}:
        parser.error(f"no such parser: {', '.join(unknown)}")
    logging.disable(logging.CRITICAL)
    end = time.monotonic() + args.seconds
    inputs, findings = dict.fromkeys([name for name in args.targets or TARGETS if name != "schemas"], 0), 0
    if not args.targets or "schemas" in args.targets:
        findings += schemas.main(args.draws, end)
    while inputs and time.monotonic() < end:
        for name in inputs:
            if time.monotonic() < end:
                inputs[name] += ROUND
                findings += not holds(TARGETS[name])
    for name, count in inputs.items():
        print(f"{name:20}{count:>10,} inputs")
    print(f"{findings} findings")
    return int(findings > 0)


def holds(target: Target) -> bool:
    """Whether a round of inputs keeps the rule. If not, the shortest that was found is kept, and told."""
    memory, last = Memory(), b""

    @seed(secrets.randbits(64))
    @settings(max_examples=ROUND, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(data=mutated(target))
    def run(data: bytes) -> None:
        nonlocal last
        last = data
        faulthandler.dump_traceback_later(STUCK, exit=True)
        try:
            keeps_the_rule(target, data)
            memory.check()
        finally:
            faulthandler.cancel_dump_traceback_later()

    try:
        run()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        path = CORPUS / target.name / f"found-{hashlib.sha256(last).hexdigest()[:12]}"
        path.write_bytes(last)
        print(f"{target.name}: {type(error).__name__}: {str(error)[:300]}\n    {path}", file=sys.stderr, flush=True)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
