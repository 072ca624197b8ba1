"""The `chapter` command: run a chapter's script, or do its exercise. Chapters are in the repository, not in a wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from minivllm.cli.checkout import ROOT, absent, environment
from minivllm.features import FEATURES
from minivllm.terminal import Parser, fail

EXERCISE = ("exercise.py", "test_exercise.py")


def main(argv: Sequence[str], prog: str = "python -m minivllm chapter") -> int:
    parser = Parser(prog=prog, description="A chapter of the book: its script, or its exercise")
    parser.add_argument("number", nargs="?", type=int, help="of the chapter; without: the list of them")
    parser.add_argument("--smoke", action="store_true", help="smaller sizes: are the chapter's claims true here?")
    parser.add_argument("--record", action="store_true", help="keep the results that the book shows")
    parser.add_argument("--all", action="store_true", help="every chapter, one after the other")
    what = "copy the exercise to FOLDER (./chapter-NN) and run its tests; a file that is there already is kept"
    parser.add_argument("--exercise", nargs="?", const="", metavar="FOLDER", help=what)
    args = parser.parse_args(argv)
    found = chapters()
    if args.all:
        return run_all(list(found), [flag for flag in argv if flag != "--all"])
    if args.number is None:
        for number, folder in found.items():
            print(f"{number:>3}  {question(folder)}")
        return 0
    if args.number not in found:
        fail(f"no chapter {args.number}. There are: {', '.join(map(str, found))}", code=2)
    folder = found[args.number]
    if args.exercise is not None:
        return do_exercise(folder, Path(args.exercise or f"chapter-{args.number:02}"))
    fields = [feature.field for feature in FEATURES if feature.chapter == f"{args.number:02}"]
    print(f"{question(folder)} (its switch: {', '.join(fields) or 'none'})", file=sys.stderr)
    print(f"the engine as of this chapter: python -m minivllm serve --preset ch{args.number:02}", file=sys.stderr)
    flags = [flag for flag, wanted in (("--smoke", args.smoke), ("--record", args.record)) if wanted]
    return python(["-m", f"chapters.{folder.name}.run", *flags])


def run_all(numbers: list[int], flags: list[str]) -> int:
    """Each chapter in turn, with its time and what is left; ends at the first that fails."""
    for i, number in enumerate(numbers, 1):
        print(f"[{i}/{len(numbers)}] chapter {number}", file=sys.stderr)
        start = time.perf_counter()
        if status := main([str(number), *flags]):
            return status
        print(f"[{i}/{len(numbers)}] chapter {number}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return 0


def chapters() -> dict[int, Path]:
    """{number: folder}, in order. Exits where there are none: the package was installed without the repository."""
    found = {int(folder.name[2:4]): folder for folder in sorted((ROOT / "chapters").glob("ch[0-9][0-9]_*"))}
    if not found:
        absent("the chapters")
    return found


def question(folder: Path) -> str:
    """The first line in bold of a chapter's page."""
    lines = (folder / "index.md").read_text().splitlines()
    return next(line.strip("*") for line in lines if line.startswith("**"))


def do_exercise(folder: Path, work: Path) -> int:
    work.mkdir(parents=True, exist_ok=True)
    for name in EXERCISE:
        if name == "exercise.py" and (work / name).exists():
            print(f"keeping your {work / name}", file=sys.stderr)
        else:
            shutil.copy(folder / name, work / name)
    print(f"edit {work / 'exercise.py'}, then run this again", file=sys.stderr)
    tests = str((work / "test_exercise.py").resolve())
    quiet = ["--tb=short", "-p", "no:cacheprovider", "-p", "no:benchmark"]  # these two would leave folders here
    return python(["-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(work), *quiet, tests])


def python(args: list[str]) -> int:
    """Python in the reader's folder, with the repository to import from; its exit status."""
    return subprocess.run([sys.executable, *args], env=environment()).returncode
