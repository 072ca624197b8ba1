"""The site is built once, as `make site` builds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "site"))


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    pytest.importorskip("sphinx", reason='pip install -e ".[site]"')
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-n", "-W", "--keep-going", "-q", "-c", "site", "chapters", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return out
