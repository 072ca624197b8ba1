"""`python -m minivllm.serve`."""

import sys

from minivllm.serve.command import main
from minivllm.terminal import run_command

if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:], prog="python -m minivllm.serve"))
