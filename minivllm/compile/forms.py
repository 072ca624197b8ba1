"""What pieces are compiled to: one form for each kind of device.

    library    a shared library (library.py): for CPUs
    artifact   Inductor's artifact, Python and Triton kernels in one file (artifact.py): for GPUs

A form is all that building, keeping and loading a piece has to know of its device.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from minivllm.compile.artifact import Artifact
from minivllm.compile.library import Library
from minivllm.compile.program import Piece

if TYPE_CHECKING:
    from minivllm.compile.split import PieceGraph


class Form(Protocol):
    name: str
    made: str  # what it makes, for people
    file: str  # that holds a piece, in its entry of the store

    def unsupported_reason(self, device: torch.device) -> str | None:
        """Why nothing can be built here, or None."""
        ...

    def build(self, piece: PieceGraph, fake_mode: object, folder: Path, num_threads: int) -> None:
        """Write folder/file. In a builder's process: it imports Inductor and changes its settings."""
        ...

    def load(self, path: Path) -> Piece:
        """path: a file that `build` wrote for this machine and nobody has changed since, because loading runs it."""
        ...


FORMS: dict[str, Form] = {form.name: form for form in (Library(), Artifact())}


def form_for(device: torch.device) -> Form:
    return FORMS["library" if device.type == "cpu" else "artifact"]
