"""Python processes of our own that end with their parent, however that ends.

The lifeline is the child's standard input: the parent writes the task to it and then keeps it open, so its end, which
also a kill of the parent brings, means that nobody is there to work for.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any


def start(module: str, *args: str, **options: Any) -> subprocess.Popen:
    """`python -m module args` with a pipe as standard input; it can import what this process can. options: Popen's."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen([sys.executable, "-m", module, *args], stdin=subprocess.PIPE, env=env, **options)


def end_with_parent() -> None:
    """In the child, once it has read all that it was sent."""
    threading.Thread(target=_wait_for_the_end, name="minivllm-lifeline", daemon=True).start()


def _wait_for_the_end() -> None:
    while os.read(0, 1):  # not through sys.stdin: an interpreter that ends would wait for its lock
        pass
    os._exit(1)
