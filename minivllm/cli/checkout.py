"""The repository around this package, where there is one: chapters and benchmarks are in it, and not in a wheel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from minivllm.terminal import fail

ROOT = Path(__file__).parent.parent.parent


def absent(what: str) -> NoReturn:
    fail(f"{what} are in minivllm's repository, and this is an installed package: clone it and run there")


def environment() -> dict[str, str]:
    """For a Python that imports from the repository, wherever it is started."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path}
