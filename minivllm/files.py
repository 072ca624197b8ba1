"""What the files of a model's folder say, read with errors that name the file and within bounds.

A folder may come from anywhere: what a file says is never taken for a path until `inside` has looked at it.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from minivllm.errors import ModelError

MAX_TEXT = 32 << 20  # bytes; the index of the largest checkpoints has 5 MB, and JSON becomes some ten times its size
MAX_DEPTH = 64  # lists and objects inside of one another; configurations have some ten


def read_text(path: Path) -> str:
    """Raises ModelError for what is no regular file, no text, or longer than MAX_TEXT."""
    try:
        with open(path, "rb", opener=_at_once) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise ModelError(f"{path}: not a regular file, and only such are read")
            if about.st_size > MAX_TEXT:
                raise ModelError(f"{path}: {about.st_size:,} bytes, and at most {MAX_TEXT:,} are read")
            return file.read(MAX_TEXT).decode("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ModelError(f"{path}: not readable as text ({e}). Fetch the file again") from None


def _at_once(path: str, flags: int) -> int:
    """A pipe is opened as well, though nothing writes to it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_json(path: Path, kind: type = dict) -> Any:
    """kind: dict or list. Raises ModelError for anything else, and for what is nested or long beyond reason."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ModelError(f"{path}: not readable as JSON ({e}). Fetch the file again") from None
    if not isinstance(value, kind):
        raise ModelError(f"{path}: expected a JSON {'object' if kind is dict else 'array'}. Fetch the file again")
    for field, of in value.items() if isinstance(value, dict) else enumerate(value):
        if not _is_flat(of):
            raise ModelError(f'{path}: field "{field}" is nested over {MAX_DEPTH} deep. Fetch the file again')
    return value


def _is_flat(value: Any) -> bool:
    """Level by level, since a recursion would end where this is needed."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [of.values() if isinstance(of, dict) else of for of in level if isinstance(of, dict | list)]
        if not (level := [one for of in inner for one in of if isinstance(one, dict | list)]):
            return True
    return False


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
