"""An engine core's process (minivllm/engine/process.py) with calls that do not return, and a building that does not."""

import re
import sys
import time
from pathlib import Path

from minivllm.engine import build, process
from minivllm.engine.build import Engine

real, build_in_earnest = Engine.calls.fget, build.build


def hangs_when_built(*args):
    """Once, if the folder of its messages says so."""
    mark = Path(sys.argv[1]) / "hang"
    if not mark.exists():
        return build_in_earnest(*args)
    mark.unlink()
    while True:
        time.sleep(0.01)


def hold():
    re.match("(a+)+b", "a" * 64)  # with Python's lock, for ages


def spin():
    while True:
        pass


if __name__ == "__main__":
    Engine.calls = property(lambda engine: {**real(engine), "hold": hold, "spin": spin})
    build.build = hangs_when_built
    sys.exit(process.main(sys.argv[1]))
