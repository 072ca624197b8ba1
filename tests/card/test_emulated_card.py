"""Engines on an emulated CUDA device. Triton's interpreter is on or off for a whole process, so they have one of their
own."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import forked
import pytest

FILE = Path(__file__).parent / "on_a_card.py"

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: minivllm[gpu]")


@pytest.mark.timeout(1200)  # minutes, on a machine that is busy with other things
def test_engines_on_an_emulated_card():
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = forked.run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(FILE), env=env, timeout=1200)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
