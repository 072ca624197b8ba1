"""`python -m minivllm.serve`."""

import sys

from minivllm.cli import run_command
from minivllm.serve.command import main

if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:], prog="python -m minivllm.serve"))
