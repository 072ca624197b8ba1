"""Typed errors. Each message says what is wrong and what to change.

`UserError` is the root of everything that the caller can mend: the server answers it with a 4xx, the command line
prints its message without a traceback. Anything else that escapes is a defect of ours.
"""

from __future__ import annotations

import errno


class MinivllmError(Exception):
    """Root of all errors raised on purpose."""


class UserError(MinivllmError):
    """The caller can mend this."""


class ConfigError(UserError):
    """A configuration that cannot be: unknown field or option, a wrong type, a declared conflict."""


class ModelError(UserError):
    """A model that cannot be loaded: missing, truncated, corrupt or unsupported. Names the file and what to do."""


class TraceError(UserError):
    """A trace that cannot be written, read or replayed."""


class BadRequest(UserError):
    """A request that cannot be served as it is. `param` names the offending parameter, as OpenAI's error bodies do."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class NeverFits(BadRequest):
    """A request that no amount of waiting can serve: longer than the model's context or than the whole KV pool."""


class AdapterError(BadRequest):
    """A LoRA adapter that cannot be loaded: files that are missing, damaged or unsupported, a name that is taken."""


class MissingAdapter(AdapterError):
    """A path that leads to no folder."""


class UnknownAdapter(BadRequest):
    """A request, or an unload, that names a LoRA adapter which is not loaded."""


class OutOfBlocks(MinivllmError):
    """The block pool was asked for more blocks than it has free. Callers ask first: reaching this is a defect."""


class EngineDead(MinivllmError):
    """The engine's step loop has ended; no request can be served."""


class ReplicaDead(EngineDead):
    """The replica that ran a request has ended; others go on, and can serve it anew."""


class OutOfMemory(MinivllmError):
    """What a request needed for a step could not be allocated. Others go on."""


def is_no_memory(error: BaseException) -> bool:
    """Python's, the system's, or torch's: of its error for a device the name is known here, of that for a CPU, a
    RuntimeError, the words."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
