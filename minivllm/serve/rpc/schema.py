"""The classes of generate.proto's messages, without generated code: from its compiled form, which any protobuf reads.

    cd minivllm/serve/rpc && python -m grpc_tools.protoc -I . --descriptor_set_out generate.desc generate.proto

(Code that protoc generates asks for a protobuf at least as new as itself.)
"""

from __future__ import annotations

import functools
from importlib.resources import files
from typing import Any

PACKAGE = "minivllm.v1"
SERVICE = f"{PACKAGE}.Generation"


@functools.cache
def message(name: str) -> Any:
    """The class of a message of the package, such as GenerateRequest."""
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


@functools.cache
def _pool() -> Any:
    """Of our own: a client in the same process may have generated code for the same messages."""
    from google.protobuf import descriptor_pb2, descriptor_pool

    compiled = descriptor_pb2.FileDescriptorSet.FromString((files(__package__) / "generate.desc").read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in compiled.file:
        pool.Add(file)
    return pool
