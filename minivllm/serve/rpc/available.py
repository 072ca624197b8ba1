"""Whether gRPC is installed. Imports nothing heavy: it is asked before a model is loaded."""

from __future__ import annotations

from importlib.util import find_spec

from minivllm.errors import ConfigError


def check() -> None:
    """Raises ConfigError without the extra `grpc`."""
    if any(find_spec(name) is None for name in ("grpc", "grpc_health")):
        raise ConfigError('--grpc-port needs gRPC: pip install "minivllm[grpc]"')
