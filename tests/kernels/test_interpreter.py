"""The kernels in triton's interpreter. It is on or off for a whole process, so these tests have processes of their own:
one a file, as many at a time as there are cores."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from minivllm.machine import num_cores

FOLDER = Path(__file__).parent
FILES = sorted(path.name for path in FOLDER.glob("interpret_*.py"))

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: minivllm[gpu]")


@pytest.fixture(scope="module")
def runs(request):
    """{file: future of its run}, of those that were selected."""
    ours = [item for item in request.session.items if item.path == Path(__file__)]
    pool = ThreadPoolExecutor(num_cores())
    yield {name: pool.submit(run, name) for name in (item.callspec.params["name"] for item in ours)}
    pool.shutdown(cancel_futures=True)


def run(name: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(FOLDER / name)]
    return subprocess.run(command, cwd=FOLDER.parent.parent, env=env, capture_output=True, text=True, timeout=290)


@pytest.mark.parametrize("name", FILES)
def test_kernels_equal_their_twins(name, runs):
    done = runs[name].result()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
