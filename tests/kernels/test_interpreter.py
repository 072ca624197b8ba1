"""The kernels in triton's interpreter. It is on or off for a whole process, so these tests have processes of their own:
one a file."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import forked
import pytest

FOLDER = Path(__file__).parent
FILES = sorted(path.name for path in FOLDER.glob("interpret_*.py"))

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: minivllm[gpu]")


@pytest.mark.timeout(1200)  # minutes, on a machine that is busy with other things
@pytest.mark.parametrize("name", FILES)
def test_kernels_equal_their_references(name):
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(FOLDER / name)]
    done = forked.run(*command, env=env, timeout=1200)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
