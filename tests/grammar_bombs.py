"""A backend with expressions that never end, or take all memory, as a library's defect would: for a child alone."""

from __future__ import annotations

import os

from minivllm.structured.dfa import DFABackend


class Bombs(DFABackend):
    def translate(self, params):
        if params.regex.startswith(("endless", "memory", "crash")):
            assert os.environ.get("BOMBS_PARENT") != str(os.getpid()), "read in the engine's process"
        if params.regex.startswith("endless"):
            while True:
                pass
        if params.regex == "memory":
            return bytes(1 << 45)
        if params.regex == "crash":
            os.abort()
        return super().translate(params)
