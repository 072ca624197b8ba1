"""The kernels in triton's interpreter. It is on or off for a whole process, so these tests have one of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILES = sorted(path.name for path in FOLDER.glob("interpret_*.py"))

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: minivllm[gpu]")


@pytest.mark.parametrize("name", FILES)
def test_kernels_equal_their_twins(name):
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(FOLDER / name)]
    done = subprocess.run(command, cwd=FOLDER.parent.parent, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
