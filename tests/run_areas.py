"""Run what `make test` leaves out, area by area, and keep which files have passed which area: `make test-all`.

    make test-all                            every area; what these very files have passed is not run again
    make test-all AREA="kernels fire"        these, whatever they have passed
    make test-all AREA=changed SINCE=v1.0    those that look at a file that differs from a commit's
    make test-all AREA=fire ARGS="-k kill"   some of an area's tests: no verdict on the area, so nothing is kept

A verdict is on a tree, as Git counts it, of all files that are not ignored, committed or not. So a run that was
interrupted goes on where it was, and "all areas, on one tree" is something that can be looked up: build/areas.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from areas import ALL, SANITIZE, changed

ROOT = Path(__file__).parent.parent
RECORD = "build/areas.json"
MAX_MINUTES = 15  # of an area, on two quiet cores: one that takes longer is to be divided
NO_TESTS = 5  # what pytest exits with when nothing was selected


class NoGit(Exception):
    """Git is not here, or not for this folder, or does not know what was asked for: in its words."""


def git(*args: str, env: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, env=env, capture_output=True, text=True)
    except OSError as e:
        raise NoGit(f"git: {e}") from None
    if done.returncode:
        raise NoGit(f"git {' '.join(args)}: {done.stderr.strip()}")
    return done.stdout.strip()


def tree() -> str:
    """The id of the tree that a commit of all files as they lie would have. Nothing of the repository's is changed."""
    with tempfile.TemporaryDirectory() as folder:
        index, objects = Path(folder, "index"), Path(folder, "objects")
        objects.mkdir()
        shutil.copy(ROOT / git("rev-parse", "--git-path", "index"), index)  # what is unchanged is not read again
        there = (ROOT / git("rev-parse", "--git-path", "objects")).resolve()
        env = os.environ | {"GIT_INDEX_FILE": str(index), "GIT_OBJECT_DIRECTORY": str(objects)}
        env["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = str(there)
        git("add", "--all", env=env)
        return git("write-tree", env=env)


def differing(since: str) -> set[str]:
    """The files that differ from those of the last commit that this branch has in common with `since`."""
    base = git("merge-base", since, "HEAD")
    return {
        *git("diff", "--name-only", "--no-renames", base).splitlines(),
        *git("ls-files", "--others", "--exclude-standard").splitlines(),
    }


def passed() -> dict[str, dict]:
    """Of each area, the last tree that passed it, how long that took and when it was: build/areas.json."""
    path = ROOT / RECORD
    return json.loads(path.read_text()) if path.exists() else {}


def keep(area: str, tree: str, seconds: float) -> None:
    verdict = {"tree": tree, "seconds": round(seconds, 1), "when": time.strftime("%Y-%m-%d %H:%M:%S")}
    path = ROOT / RECORD
    path.parent.mkdir(exist_ok=True)
    fresh = path.with_suffix(".fresh")
    fresh.write_text(json.dumps(passed() | {area: verdict}, indent=1) + "\n")
    fresh.replace(path)  # an interrupt leaves the old one or the new one


def command(area: str, args: list[str]) -> list[str]:
    if area == SANITIZE:
        return ["make", "--no-print-directory", "sanitize", f"ARGS={' '.join(args)}"]
    spread = ("-n", "auto", "--dist", "loadfile", "--durations=20")
    return [sys.executable, "-m", "pytest", *spread, f"--area={area}", *args]


def run(area: str, args: list[str]) -> str:
    """The area's line of the summary, which begins with passed or failed. What has passed is kept at once."""
    before, began = tree(), time.monotonic()
    code = subprocess.call(command(area, args), cwd=ROOT)
    seconds = time.monotonic() - began
    minutes = f"{seconds / 60:.1f} min"
    if code and not (code == NO_TESTS and args):
        return f"failed in {minutes}"
    if args:
        return f"passed in {minutes}, as far as {shlex.join(args)} goes: not kept"
    if tree() != before:
        return f"passed in {minutes}, but a file was changed meanwhile: not kept"
    keep(area, before, seconds)
    return f"passed in {minutes}" + f", more than {MAX_MINUTES}: to be divided" * (seconds > MAX_MINUTES * 60)


def chosen(names: list[str], since: str) -> list[str]:
    """The areas that are to run; says why others are not."""
    if names == ["changed"]:
        why = changed(differing(since))
        print(*(f"{area}: {path} differs from {since}" for area, path in why.items()), sep="\n")
        names = list(why)
    elif names:
        return names
    else:
        names = list(ALL)
    verdicts, now = passed(), tree()
    same = [area for area in names if area in verdicts and verdicts[area]["tree"] == now]
    for area in same:
        print(f"{area}: these files passed it on {verdicts[area]['when']}")
    return [area for area in names if area not in same]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--since COMMIT] [AREA ...] [-- PYTEST'S ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"changed, or some of: {' '.join(ALL)}; none: all")
    parser.add_argument(
        "--since", default="main", metavar="COMMIT", help="for changed: differs from what (%(default)s)"
    )
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    options, args = parser.parse_args(argv[:end]), argv[end + 1 :]
    if unknown := set(options.areas) - {*ALL} - ({"changed"} if len(options.areas) == 1 else set()):
        parser.error(f"no area {' '.join(sorted(unknown))}: there are {' '.join(ALL)}, and changed by itself")
    lines = {}
    try:
        for area in chosen(options.areas, options.since):
            print(f"area {area}", flush=True)
            lines[area] = run(area, args)
    except NoGit as e:
        parser.error(str(e))
    except KeyboardInterrupt:
        print("\ninterrupted: `make test-all` goes on behind what has passed")
        return 130
    finally:
        print(*(f"{area:12} {line}" for area, line in lines.items()), sep="\n")
    return int(any(line.startswith("failed") for line in lines.values()))


if __name__ == "__main__":
    sys.exit(main())
