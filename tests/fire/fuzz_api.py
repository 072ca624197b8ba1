"""schemathesis reads /openapi.json and sends what it allows and what it forbids: no answer may be a 5xx, or one whose
status, content type or fields the document does not have.

    make fuzz-api                                minutes
    make fuzz-api ARGS="--max-examples 2000"     longer; another --seed sends other requests
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from fire.wire import served

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
ENDLESS = "/debug/live"  # a stream for as long as somebody listens


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-examples", type=int, default=300, help="of each endpoint (300)")
    parser.add_argument("--seed", type=int, default=1, help="(1)")
    args = parser.parse_args(argv)
    program = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"]
    options = ["--checks", CHECKS, "--max-examples", str(args.max_examples), "--seed", str(args.seed)]
    options += ["--phases", "fuzzing", "--exclude-path", ENDLESS, "--request-timeout", "60", "--no-color"]
    with served("--max-model-len", "256", "--debug-endpoints", "--max-num-seqs", "8") as server:
        code = subprocess.run([*program, "run", f"{server.url}/openapi.json", *options]).returncode
        assert server.serves()
    return code


if __name__ == "__main__":
    sys.exit(main())
