"""Do the tests notice when the code changes? mutmut makes small changes, one at a time, and says which no test noticed.

    make mutants                       every part of PARTS; an interrupted run goes on where it was
    make mutants PART="kv scheduler"   these
    make mutants PART=kv ARGS=--show   what nobody noticed, as diffs; ARGS="--show free": where the name has `free`
    make mutants PART=kv ARGS=--again  those alone once more, after a test was added: a look, not a verdict
    make mutants ARGS=--record         and keep the scores in tests/mutants.json, which the next run is compared with

A part is a package and its own tests: those of a layer above would notice late, and not say what is wrong. What no test
noticed is a missing test, or code that nobody needs, or a change that cannot be seen from outside.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from run_areas import git

ROOT = Path(__file__).parent.parent
WORK = ROOT / "build" / "mutants"
RECORD = ROOT / "tests" / "mutants.json"
DIGEST = "digest.txt"
NO_END = 15  # seconds after which a test counts as failed: each takes less than two
TOLERANCE = 0.5  # points that a score may lose: what is added to a package need not be above its average


class Part(NamedTuple):
    code: tuple[str, ...]  # what is changed: files, or folders with their slash
    tests: tuple[str, ...]  # who is to notice


PARTS = {
    "kv": Part(("minivllm/kv/",), ("tests/kv",)),
    "scheduler": Part(("minivllm/scheduler/",), ("tests/scheduler", "tests/spec_decode/test_scheduler.py")),
    "plan": Part(("minivllm/plan.py",), ("tests/test_plan.py",)),
    "sampling": Part(("minivllm/sampling/",), ("tests/sampling",)),
    "spec_decode": Part(("minivllm/spec_decode/",), ("tests/spec_decode",)),
    "structured": Part(
        ("minivllm/structured/",),
        ("tests/structured", "tests/serve/test_tools_held.py", "tests/engine/test_grammar_trials.py"),
    ),
}

# mutmut's words for a change that was noticed: a test failed, or there was no end of it, or the process died of it.
# "suspicious" is an exit status that mutmut has no word for: a signal's, such as the one of a heap written over.
NOTICED = {"killed", "timeout", "segfault", "suspicious"}
UNNOTICED = {"survived", "no tests"}

# `mutmut show` for many at once: a process for each would take minutes. Their names come on standard input.
SHOW = """
import sys
from mutmut.__main__ import show
for name in sys.stdin.read().split():
    show.callback(name)
    print()
"""


class NoVerdict(Exception):
    """A part has not been run, or has changes without a verdict."""


class Score(NamedTuple):
    mutants: int
    noticed: int

    @property
    def percent(self) -> float:
        return 100 * self.noticed / self.mutants


# ------------------------------------------------------------------------------------------------------ a part's folder


def files() -> list[str]:
    """What the package and its tests consist of, from the repository's root. Scores turn no verdict."""
    names = git("ls-files", "--cached", "--others", "--exclude-standard", "minivllm", "kernels", "tests").splitlines()
    return [name for name in names if ROOT / name != RECORD]


def digest(names: Sequence[str]) -> str:
    """Of what can turn a verdict."""
    seen = hashlib.sha256()
    for name in sorted(names):
        path = ROOT / name
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.exists() else b""
        seen.update(f"{name} {len(content)} ".encode() + content)
    return seen.hexdigest()


def copy(names: Sequence[str], to: Path) -> None:
    """Only what differs: mutmut takes a file that is newer for one that was changed."""
    for name in names:
        source, target = ROOT / name, to / name
        if source.is_symlink():
            if not target.is_symlink():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(os.readlink(source))
        elif not source.exists():
            target.unlink(missing_ok=True)
        elif not target.exists() or source.read_bytes() != target.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)


def settings(part: Part) -> str:
    """mutmut's, which it reads in pyproject.toml of where it runs. Lists of strings are the same in JSON and TOML."""
    code = [f"{path}*" if path.endswith("/") else path for path in part.code]
    return f"""
[tool.mutmut]
source_paths = ["minivllm"]
only_mutate = {json.dumps(code)}
also_copy = ["kernels", "minivllm/kernels"]
pytest_add_cli_args = ["-p", "no:cacheprovider", "-n", "0", "-m", "not model", "--timeout={NO_END}"]
pytest_add_cli_args_test_selection = {json.dumps(part.tests)}
# For what does not even end by NO_END. In seconds of the clock, so it is far off: a neighbour's load decides nothing.
timeout_constant = 30.0
timeout_multiplier = 4.0
use_git_change_detection = false
"""


def prepare(name: str, again: bool) -> Path:
    """The part's folder, with the files as they are now, and with the verdicts on the same files, if there are any."""
    folder, names = WORK / name, files()
    now, before = digest(names), folder / DIGEST
    if not again and before.exists() and before.read_text() != now:
        shutil.rmtree(folder)
    copy(names, folder)
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + settings(PARTS[name]))
    before.write_text("some verdicts are of other files" if again else now)
    return folder


# -------------------------------------------------------------------------------------------------------------- mutmut


def mutmut(folder: Path, *args: str, quiet: bool = False) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # there is a process a core
    command = [Path(sys.executable).with_name("mutmut"), *args]
    done = subprocess.run(command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE if quiet else None)
    if done.returncode:
        raise SystemExit(f"mutmut {args[0]} ended with {done.returncode} in {folder}")
    return done.stdout or ""


def verdicts(folder: Path) -> dict[str, str]:
    """{a change's name: what became of it, in mutmut's words}"""
    if not (folder / "mutants").exists():
        raise NoVerdict(f"{folder.name} has not been run: make mutants PART={folder.name}")
    lines = mutmut(folder, "results", "--all", "true", quiet=True).splitlines()
    return dict(line.strip().rsplit(": ", 1) for line in lines if ": " in line)


def show(folder: Path, names: Sequence[str]) -> None:
    subprocess.run([sys.executable, "-c", SHOW], cwd=folder, input="\n".join(names), text=True, check=True)


def score(found: dict[str, str]) -> Score:
    if other := {*found.values()} - NOTICED - UNNOTICED:
        num = sum(word in other for word in found.values())
        raise NoVerdict(f"{num} of {len(found)} changes are {', '.join(sorted(other))}: run the part again, it goes on")
    return Score(len(found), sum(word in NOTICED for word in found.values()))


def unnoticed(found: dict[str, str], text: str = "") -> list[str]:
    return [name for name, word in found.items() if word in UNNOTICED and text in name]


# -------------------------------------------------------------------------------------------------------------- record


class Recorded(NamedTuple):
    score: Score
    when: str


def recorded() -> dict[str, Recorded]:
    """The last score that was kept of each part."""
    kept = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return {part: Recorded(Score(last["mutants"], last["noticed"]), last["when"]) for part, last in kept.items()}


def table(scores: dict[str, Score], record: dict[str, Recorded]) -> str:
    lines = [f"{'part':12} {'changes':>8} {'noticed':>8} {'score':>8}   last"]
    for part, now in scores.items():
        last = f"{record[part].score.percent:.1f} % on {record[part].when}" if part in record else "-"
        lines.append(f"{part:12} {now.mutants:8} {now.noticed:8} {now.percent:6.1f} %   {last}")
    return "\n".join(lines)


def lower(scores: dict[str, Score], record: dict[str, Recorded]) -> list[str]:
    """The parts whose tests notice less than they did."""
    known = scores.keys() & record.keys()
    return [part for part in scores if part in known and scores[part].percent < record[part].score.percent - TOLERANCE]


def keep(part: str, now: Score) -> None:
    kept = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    kept[part] = now._asdict() | {"when": time.strftime("%Y-%m-%d"), "tool": f"mutmut {version('mutmut')}"}
    RECORD.write_text(json.dumps(kept, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of: {' '.join(PARTS)}; none: all")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--again", action="store_true", help="run what nobody noticed once more")
    way.add_argument("--show", nargs="?", const="", metavar="TEXT", help="print what nobody noticed, and run nothing")
    way.add_argument("--record", action="store_true", help=f"keep the scores: {RECORD.relative_to(ROOT)}")
    parser.add_argument("--max-children", default="2", metavar="N", help="processes side by side (%(default)s)")
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - {*PARTS}:
        parser.error(f"no part {' '.join(sorted(unknown))}: there are {' '.join(PARTS)}")
    parts, record, scores = options.parts or [*PARTS], recorded(), {}
    try:
        if options.show is not None:
            for part in parts:
                show(WORK / part, unnoticed(verdicts(WORK / part), options.show))
            return 0
        for part in parts:
            scores[part] = run(part, options.again, options.max_children)
            if options.record:
                keep(part, scores[part])
    except NoVerdict as e:
        print(e)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on where it was")
        return 130
    print(table(scores, record))
    less = [] if options.record else lower(scores, record)
    for part in less:
        print(f"{part}: less is noticed than before; make mutants PART={part} ARGS=--show")
    return bool(less)


def run(part: str, again: bool, max_children: str) -> Score:
    folder = prepare(part, again)
    names = unnoticed(verdicts(folder)) if again else []
    print(f"part {part}: {folder.relative_to(ROOT)}", flush=True)
    mutmut(folder, "run", "--max-children", max_children, *names)
    return score(verdicts(folder))


if __name__ == "__main__":
    sys.exit(main())
