"""Ten faults that serving engines have had, put into this one by hand, one at a time: does the gate turn red?

    make faults                     each in a copy of these files (build/faults), with the tests named beside it
    make faults FAULT="dead-link"   one of them

mutmut (run_mutants.py) makes thousands of changes, none of which means anything; these are what its score stands for.
CONTRIBUTING.md shows the table. A fault that no longer fits its file fails in the gate (test_run_faults.py).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from run_areas import git
from run_mutants import copy

ROOT = Path(__file__).parent.parent
WORK = ROOT / "build" / "faults"
FAILED = 1  # what pytest exits with when tests ran and failed


class Fault(NamedTuple):
    what: str
    file: str
    right: str  # once in the file
    wrong: str
    tests: str  # of the gate: a file, or one test


FAULTS = {
    "freed-twice": Fault(
        "a request's blocks are freed twice",
        "minivllm/kv/manager.py",
        "table = self.tables.pop(req.id, None)",
        "table = self.tables.get(req.id)",
        "tests/kv/test_manager.py",
    ),
    "hit-too-long": Fault(
        "a prefix hit is one block too long: nothing is left to compute, so there are no logits",
        "minivllm/kv/manager.py",
        "num_blocks = (req.num_tokens - 1) // self.block_size",
        "num_blocks = req.num_tokens // self.block_size",
        "tests/kv/test_manager.py",
    ),
    "logprob-shifted": Fault(
        "a log-probability is the one of the next rank",
        "minivllm/sampling/logprobs.py",
        "likeliest = ids, top - norm, ranks",
        "likeliest = ids, top.roll(-1, 1) - norm, ranks",
        "tests/sampling/test_logprobs.py",
    ),
    "stop-not-cut": Fault(
        "a stop string ends the output and stays in it",
        "minivllm/engine/detokenizer.py",
        "return text if self._include_stop else text[: len(text) - len(stop)]",
        "return text",
        "tests/engine/test_detokenizer.py",
    ),
    "preempted-forgotten": Fault(
        "a preempted request is not queued again",
        "minivllm/scheduler/base.py",
        "        req.num_preemptions += 1\n        self.enqueue(req)\n",
        "        req.num_preemptions += 1\n",
        "tests/scheduler/test_phased.py",
    ),
    "wrong-scale": Fault(
        "a K-quant's scale loses its highest bit",
        "kernels/cpu/block_formats.h",
        "to.scales[g] = from[g] & 63;",
        "to.scales[g] = from[g] & 31;",
        "tests/quantization/test_block_matrix.py",
    ),
    "mask-late": Fault(
        "a grammar's mask is applied one row late",
        "minivllm/sampling/grammar_mask.py",
        "return np.array([i for i, _ in users], np.int64), masks",
        "return np.array([min(i + 1, len(rows) - 1) for i, _ in users], np.int64), masks",
        "tests/sampling/test_grammar_mask.py",
    ),
    "aborted-keeps-blocks": Fault(
        "a stream that its client left keeps its blocks",
        "minivllm/scheduler/base.py",
        "        self.in_flight.drop(req)\n        self.kv.free(req)\n        self.members.leave(req.id)\n        del",
        "        self.in_flight.drop(req)\n        self.members.leave(req.id)\n        del",
        "tests/scheduler/test_unified.py",
    ),
    "dead-link": Fault(
        "a page links to one that is not there",
        "README.md",
        "](docs/operations.md)",
        "](docs/operation.md)",
        "tests/test_readme.py::test_every_link_of_the_readme_leads_to_a_file",
    ),
    "unlisted-option": Fault(
        "an option can be configured that no list of features has, so that nothing tests it",
        "minivllm/config.py",
        'quantization: Literal["auto", "none", "int8", "int4"]',
        'quantization: Literal["auto", "none", "int8", "int4", "int3"]',
        "tests/test_config.py",
    ),
}


def run(tests: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", tests]
    return subprocess.call(command, cwd=WORK, stdout=subprocess.DEVNULL)


def turns_red(fault: Fault) -> bool:
    """Whether the tests fail with the fault, which they do not without it."""
    path = WORK / fault.file
    if run(fault.tests):
        raise SystemExit(f"{fault.tests} fails without a fault")
    right = path.read_text()
    assert right.count(fault.right) == 1, f"{fault.file} does not have this line once: {fault.right}"
    path.write_text(right.replace(fault.right, fault.wrong))
    try:
        return run(fault.tests) == FAILED
    finally:
        path.write_text(right)


def rows() -> list[str]:
    """CONTRIBUTING.md's table."""
    return [f"| {fault.what} | `{fault.file}` | `{fault.tests.partition('::')[0]}` |" for fault in FAULTS.values()]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"some of: {' '.join(FAULTS)}; none: all")
    names = parser.parse_args(argv).faults or list(FAULTS)
    if unknown := set(names) - {*FAULTS}:
        parser.error(f"no fault {' '.join(sorted(unknown))}: there are {' '.join(FAULTS)}")
    shutil.rmtree(WORK, ignore_errors=True)
    copy(git("ls-files", "--cached", "--others", "--exclude-standard").splitlines(), WORK)
    green = []
    for name in names:
        began = time.monotonic()
        red = turns_red(FAULTS[name])
        green += [] if red else [name]
        print(f"{name:22} {'red' if red else 'GREEN'} in {time.monotonic() - began:.0f} s", flush=True)
    return bool(green)


if __name__ == "__main__":
    sys.exit(main())
