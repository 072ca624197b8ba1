"""The composition root: the only package that reads registries.

Everything below receives built objects, so that "which part is it?" is answered here and nowhere else. No torch until a
worker is built.
"""

from minivllm.engine.build.engine import Engine, build, build_routing, build_worker
from minivllm.engine.build.grammars import build_grammars
from minivllm.engine.build.kv import build_kv
from minivllm.engine.build.scheduler import build_scheduler

__all__ = ["Engine", "build", "build_grammars", "build_kv", "build_routing", "build_scheduler", "build_worker"]
