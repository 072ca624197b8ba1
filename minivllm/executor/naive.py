"""NaiveExecutor: transformers in this process and this thread. The worker is all that differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minivllm.executor.uni import UniExecutor


class NaiveExecutor(UniExecutor):
    def __init__(self, make_worker: Callable[..., Any]):
        from minivllm.runner.naive_worker import NaiveWorker

        super().__init__(lambda: make_worker(NaiveWorker))
