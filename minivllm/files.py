"""What the files of a model's folder say, read with errors that name the file and within bounds.

A folder may come from anywhere: what a file says is never taken for a path until `inside` has looked at it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from minivllm.errors import ModelError

MAX_TEXT = 32 << 20  # bytes; the index of the largest checkpoints has 5 MB, and JSON becomes some ten times its size


def read_text(path: Path) -> str:
    """Raises ModelError for what is no text, or longer than MAX_TEXT."""
    try:
        if (size := path.stat().st_size) > MAX_TEXT:
            raise ModelError(f"{path}: {size:,} bytes, and at most {MAX_TEXT:,} are read")
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ModelError(f"{path}: not readable as text ({e}). Fetch the file again") from None


def read_json(path: Path, kind: type = dict) -> Any:
    """kind: dict or list. Raises ModelError for anything else, and for what is nested or long beyond reason."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ModelError(f"{path}: not readable as JSON ({e}). Fetch the file again") from None
    if not isinstance(value, kind):
        raise ModelError(f"{path}: expected a JSON {'object' if kind is dict else 'array'}. Fetch the file again")
    return value


def inside(folder: Path, name: Any, says: Path) -> Path:
    """The file or folder `name`, as the file `says` names it. Raises ModelError for what is outside of `folder`, by its
    name or by a link; only the hub's cache links elsewhere, from snapshots/REVISION to the `blobs` of that model."""
    if not isinstance(name, str) or "\0" in name:
        raise ModelError(f"{says}: {name!r} is no file's name. Fetch the file again")
    home = Path(os.path.realpath(folder))
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    leads_to = Path(os.path.realpath(folder / name))
    if os.path.isabs(name) or ".." in Path(name).parts or not any(map(leads_to.is_relative_to, homes)):
        raise ModelError(f'{says}: "{name[:100]}" leads out of the folder, and only what lies in it is opened')
    return folder / name
