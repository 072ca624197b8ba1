"""Peers' own tests of their servers, against this one: what passes, and why what fails does.

    make peers-suites ARGS="llama.cpp"                                  an environment, the sources, the tests: an hour
    make peers-suites ARGS="vllm --only tests/entrypoints/anthropic"    some files
    make peers-suites ARGS="vllm --record"                              and keep the figures, in docs/clients.md too

The tests are in the source distributions of vllm and llama-cpp-python. Their servers are started by a stand-in
(vllm_server.py, llama_server.py) and their models are replaced (models.py). A test that fails and for which
reasons.json has no row is a defect of minivllm, until it is looked at. One that has no server started is of the peer's
own classes: vLLM's files of such are not run, and where it stands in another, it counts among the internals and never
as passed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from clients.peers_suites import llama_server, models
from clients.run import ROOT, write_between

from bench.peers.install import TORCH, pip
from minivllm.config import DEFAULT_MODEL

HERE = Path(__file__).parent
REASONS, RECORD = HERE / "reasons.json", HERE / "record.json"
BEGIN, END = "<!-- written by make peers-suites -->", "<!-- end of peers-suites -->"
KINDS = {
    "internals": "tests the peer's own parts",
    "model": "needs another model",
    "refused": "refused by name, or different on purpose",
}


@dataclass(frozen=True)
class Suite:
    name: str
    package: str  # whose source distribution has the tests
    folder: str  # in it, where pytest runs
    program: str  # that the tests start as their server
    stand_in: str  # the module that it calls
    plugin: str
    requirements: tuple[str, ...]
    files: tuple[str, ...]
    options: tuple[str, ...] = ()


ENTRYPOINTS = "tests/entrypoints"
VLLM = Suite(
    "vllm",
    "vllm==0.33.0",
    ".",
    "vllm",
    "clients.peers_suites.vllm_server",
    "vllm_plugin",
    (
        TORCH,
        "pytest<9.2",  # schemathesis sets a name of its tests that later ones do not have
        "pytest-asyncio",
        "pytest-timeout",
        "rapidfuzz",
        "schemathesis",
        "sentence-transformers",
        "tblib",
    ),
    tuple(
        f"{ENTRYPOINTS}/{path}"
        for path in (
            "openai/chat_completion",
            "openai/completion",
            "openai/models",
            "serve/tokenize",
            "openai/responses",
            "pooling/embed",
            "tool_parsers",
            "openai/test_chunked_prompt.py",
            "openai/test_openai_schema.py",
            "openai/test_return_token_ids.py",
            "openai/test_return_tokens_as_ids.py",
            "anthropic/test_messages.py",
            "serve",
            "pooling/basic/test_truncation.py",
            "pooling/scoring",
            "pooling/classify",
        )
    ),
    ("-o", "asyncio_mode=auto"),
)
LLAMA_CPP = Suite(
    "llama.cpp",
    "llama-cpp-python==0.3.36",
    "vendor/llama.cpp/tools/server/tests",
    "llama-server",
    "clients.peers_suites.llama_server",
    "llama_plugin",
    (
        "aiohttp",
        "filelock",
        "numpy",
        "openai",
        "prometheus-client",
        "pytest",
        "pytest-timeout",
        "requests",
        "wget",
    ),
    tuple(
        f"unit/test_{name}.py"
        for name in (
            "embedding",
            "rerank",
            "security",
            "completion",
            "chat_completion",
            "tokenize",
            "compat_anthropic",
            "compat_oai_responses",
            "infill",
            "metrics",
            "basic",
            "ignore_eos",
            "template",
            "tool_call",
        )
    ),
    ("-m", "not slow"),  # as llama.cpp's own CI: those are calls of models of gigabytes
)
SUITES = {suite.name: suite for suite in (VLLM, LLAMA_CPP)}


# ------------------------------------------------------------------------------------------------- what they run in


def sources(suite: Suite, into: Path) -> Path:
    """The unpacked source distribution. pip insists on its metadata, which these two compile for: it may fail there,
    and what it has unpacked is kept."""
    folder = into / "sources"
    if not folder.exists():
        aside = into / "download"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        how = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--no-clean", "-d", aside, suite.package]
        command = [sys.executable, "-m", "pip", "download", *how]
        subprocess.run(command, env=os.environ | {"TMPDIR": str(aside)}, capture_output=True)
        (found,) = aside.glob("pip-*/*/PKG-INFO")
        found.parent.rename(folder)
        shutil.rmtree(aside)
    return folder


def environment(suite: Suite, into: Path, source: Path) -> Path:
    """Its Python. vLLM's files are imported from the sources, so it needs what they do, and not its kernels."""
    venv = into / "environment"
    if not (venv / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True, capture_output=True)
        needed = source / "requirements" / "common.txt"
        lines = needed.read_text().splitlines() if needed.exists() else []
        wanted = [line for line in lines if not line.startswith("certifi")]  # whose newest is not everywhere
        (venv / "requirements.txt").write_text("\n".join([*wanted, *suite.requirements]) + "\n")
        pip(venv, "install", "-r", str(venv / "requirements.txt"))
        (venv / ".ready").touch()
    return venv / "bin" / "python"


def write_program(suite: Suite, into: Path) -> Path:
    """An executable that stands in for the peer's server."""
    path = into / "bin" / suite.program
    path.parent.mkdir(exist_ok=True)
    paths = shlex.quote(f"{ROOT}:{ROOT / 'tests'}")
    call = f"{shlex.quote(sys.executable)} -m {suite.stand_in}"
    path.write_text(f'#!/bin/sh\nexport PYTHONPATH={paths}\nexec {call} "$@"\n')
    path.chmod(0o755)
    return path


def run(suite: Suite, into: Path, model: str, only: list[str], timeout: int) -> list[dict]:
    """What came of each test."""
    source = sources(suite, into)
    python, program = environment(suite, into, source), write_program(suite, into)
    outcomes, kept = into / "outcomes.jsonl", into / "kept"
    outcomes.unlink(missing_ok=True)
    own = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{source / suite.folder}:{HERE}",
        "LLAMA_SERVER_BIN_PATH": str(program),
        "PEERS_KEPT": str(kept),
        "PEERS_OUTCOMES": str(outcomes),
        "HF_HUB_OFFLINE": "1",
        "VLLM_TARGET_DEVICE": "cpu",  # which vLLM's parser of options asks for
        **models.prepare(into, model),
    }
    how = ["-q", "-p", suite.plugin, "-p", "outcomes", "-p", "no:cacheprovider", "--timeout", str(timeout)]
    command = [python, "-m", "pytest", *how, "--continue-on-collection-errors", *suite.options, *(only or suite.files)]
    with open(into / "tests.log", "w") as log:
        subprocess.run(command, cwd=source / suite.folder, env=os.environ | own, stdout=log, stderr=log)
    llama_server.end_all(kept)
    return read(outcomes)


def read(outcomes: Path) -> list[dict]:
    """The last word on each test: one whose server cannot be ended has passed before that fails."""
    return list({row["test"]: row for row in map(json.loads, outcomes.read_text().splitlines())}.values())


# ---------------------------------------------------------------------------------------------------- what they say


class Reason(NamedTuple):
    tests: str  # a pattern
    kind: str  # one of KINDS
    why: str


def reasons_of(suite: str) -> list[Reason]:
    return [Reason(*row) for row in json.loads(REASONS.read_text())[suite]]


def reason_for(test: str, reasons: list[Reason]) -> Reason | None:
    """The first that fits. Brackets are a test's own, no pattern's."""
    return next((each for each in reasons if fnmatchcase(test, each.tests.replace("[", "[[]"))), None)


def is_internal(row: dict) -> bool:
    """No server was started for it."""
    return row["outcome"] != "skipped" and not row.get("asks", True)


def figures(suite: str, rows: list[dict]) -> dict[str, int]:
    """How many tests passed, failed for each kind of reason, and failed for none."""
    reasons, counts = reasons_of(suite), Counter(dict.fromkeys(("passed", "failed", "skipped", *KINDS), 0))
    for row in rows:
        reason = Reason(row["test"], "internals", "") if is_internal(row) else reason_for(row["test"], reasons)
        counts[reason.kind if reason and (row["outcome"] == "failed" or is_internal(row)) else row["outcome"]] += 1
    return dict(counts)


def unexplained(suite: str, rows: list[dict]) -> Iterator[str]:
    reasons = reasons_of(suite)
    for row in rows:
        if row["outcome"] == "failed" and not is_internal(row) and reason_for(row["test"], reasons) is None:
            yield f"{row['test']}: {row['why'].splitlines()[0] if row['why'] else ''}"


def table(record: dict[str, dict]) -> str:
    """As Markdown: a line a suite, then why tests fail."""
    lines = [
        "| suite | model | run | files | passed | failed | of the rest |" + "".join(f" {kind} |" for kind in KINDS)
    ]
    lines.append("| --- " * (7 + len(KINDS)) + "|")
    for told in record.values():
        found = told["figures"]
        rest = found["passed"] + found["failed"]
        cells = [told["package"], told["model"], told["date"], told["files"], found["passed"], found["failed"]]
        cells += [f"{100 * found['passed'] / rest:.1f} %", *(found[kind] for kind in KINDS)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def keep(suite: Suite, model: str, rows: list[dict]) -> None:
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    date, failed = datetime.date.today().isoformat(), list(unexplained(suite.name, rows))
    files = len({row["test"].partition("::")[0] for row in rows})
    told = {
        "package": suite.package,
        "model": model,
        "date": date,
        "files": files,
        "figures": figures(suite.name, rows),
    }
    record[suite.name] = told | {"failed": failed}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    write_between(BEGIN, table(record), END)


def main() -> int:
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("suite", choices=SUITES)
    args.add_argument("--into", type=Path, default=ROOT / ".clients" / "peers", help="a folder for it all")
    args.add_argument("--only", nargs="+", default=[], metavar="FILE", help="files or folders of tests (most)")
    args.add_argument("--model", default=DEFAULT_MODEL, help=f"that generates: dummy:tiny is faster ({DEFAULT_MODEL})")
    args.add_argument("--timeout", type=int, default=120, metavar="SECONDS", help="of one test (120)")
    args.add_argument("--outcomes", type=Path, metavar="FILE", help="run nothing: what an earlier run has written")
    args.add_argument("--record", action="store_true", help="write record.json and the table of docs/clients.md")
    args = args.parse_args()
    suite = SUITES[args.suite]
    into = args.into.absolute() / suite.name
    into.mkdir(parents=True, exist_ok=True)
    rows = read(args.outcomes) if args.outcomes else run(suite, into, args.model, args.only, args.timeout)
    print(*unexplained(suite.name, rows), figures(suite.name, rows), sep="\n")
    if args.record:
        keep(suite, args.model, rows)
    return int(any(unexplained(suite.name, rows)))


if __name__ == "__main__":
    raise SystemExit(main())
