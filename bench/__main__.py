"""`python -m bench NAME [options]`: run a benchmark; without a name: the list of them and what each answers.

The question is the first line of a script's docstring. A script runs as `python bench/NAME.py` does, in this process's
place, and finds the engine of this repository whichever is installed.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from minivllm.registry import did_you_mean  # noqa: E402 (no dependency: bench gpu runs on bare machines)

# What is not a script of this folder by its own name. "a.b": run with -m, as one module of a package.
OTHERS = {
    "gpu": "gpu/run.py",
    "peers": "bench.peers",
    "peers.install": "bench.peers.install",
    "peers.report": "bench.peers.report",
}


def main(argv: Sequence[str], prog: str = "python -m bench") -> int:
    known = names()
    if not argv or argv[0] in ("-h", "--help"):
        print(usage(known, prog))
        return 0
    name, *rest = argv
    if name not in known:
        print(f"error: no benchmark {name!r}.{did_you_mean(name, list(known))} All of them: {prog}", file=sys.stderr)
        return 2
    sys.stdout.flush()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    os.execve(sys.executable, [sys.executable, *program(name), *rest], os.environ | {"PYTHONPATH": path})


def names() -> dict[str, Path]:
    """{name: the file that its first line is in}, in the order of the list."""
    own = {path.stem: path for path in sorted(HERE.glob("*.py")) if is_script(path)}
    return own | {name: source(target) for name, target in OTHERS.items()}


def is_script(path: Path) -> bool:
    return path != Path(__file__).resolve() and '\nif __name__ == "__main__":' in path.read_text()


def source(target: str) -> Path:
    if target.endswith(".py"):
        return HERE / target
    path = ROOT.joinpath(*target.split("."))
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def program(name: str) -> list[str]:
    """Python's arguments: a script by its path from here, as the record of a run should name it, or a module."""
    target = OTHERS.get(name, f"{name}.py")
    return [os.path.relpath(HERE / target)] if target.endswith(".py") else ["-m", target]


def question(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def usage(known: dict[str, Path], prog: str) -> str:
    width = max(map(len, known))
    lines = "\n".join(f"  {name:{width}}  {question(path)}" for name, path in known.items())
    return f"usage: {prog} NAME [options]\n\n{lines}\n\nOptions of one: {prog} NAME --help"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
