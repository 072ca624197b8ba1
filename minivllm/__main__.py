"""`python -m minivllm <command>`."""

from minivllm.cli import main, run

__all__ = ["main", "run"]

if __name__ == "__main__":
    run()
