"""The snippets of a page of docs/, to be run against a server of a test: what the page shows is what is tested."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "clients.md"


def snippets(heading: str) -> list[str]:
    """The Python of one section of the page, in its order."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def run(code: str, replaced: Mapping[str, str]) -> str:
    """What it prints. replaced: what the page names, and what it is called in the test."""
    for there, here in replaced.items():
        assert there in code, f"the page does not name {there}"
        code = code.replace(there, here)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout
