"""The `bench` command: `python -m bench` of the repository, from any folder."""

from __future__ import annotations

import runpy
from collections.abc import Sequence

from minivllm.cli.checkout import ROOT, absent


def main(argv: Sequence[str], prog: str = "python -m minivllm bench") -> int:
    runner = ROOT / "bench" / "__main__.py"
    if not runner.is_file() or not (ROOT / "pyproject.toml").is_file():  # site-packages may hold another `bench`
        absent("the benchmarks")
    return runpy.run_path(str(runner))["main"](argv, prog)
