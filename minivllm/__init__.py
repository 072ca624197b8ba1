"""minivllm: vLLM's two generations side by side, every idea a switch.

Names are imported on first use, so that `import minivllm` costs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "LLM": "minivllm.engine.llm",
    "AsyncLLM": "minivllm.engine.async_llm",
    "BeamSearchParams": "minivllm.request",
    "EngineConfig": "minivllm.config",
    "LoRARequest": "minivllm.lora.request",
    "SamplingParams": "minivllm.request",
    "StructuredParams": "minivllm.structured.params",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "EngineConfig",
    "LoRARequest",
    "SamplingParams",
    "StructuredParams",
    "__version__",
]

if TYPE_CHECKING:
    from minivllm.config import EngineConfig
    from minivllm.engine.async_llm import AsyncLLM
    from minivllm.engine.llm import LLM
    from minivllm.lora.request import LoRARequest
    from minivllm.request import BeamSearchParams, SamplingParams
    from minivllm.structured.params import StructuredParams


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'minivllm' has no attribute {name!r}")
