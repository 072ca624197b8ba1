"""Chat templates as their authors published them, out of a package that brings them; none is kept here.

llama.cpp collects them for its own tests, and llama-cpp-python's source distribution has llama.cpp in it (MIT)."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
FOLDER = Path(__file__).parents[2] / "build" / "templates"
AT_LEAST = 40


def published() -> dict[str, str]:
    """{name: source}. Raises CalledProcessError where the package cannot be had."""
    return {path.stem: path.read_text() for path in sorted(_folder().glob("*.jinja"))}


def _folder() -> Path:
    folder = FOLDER / VERSION
    if not (folder / "whole").exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            PACKAGE,
            "-d",
            str(FOLDER),
        ]
        subprocess.run([*command, f"{PACKAGE}=={VERSION}"], check=True)
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(next(FOLDER.glob(f"*{VERSION}.tar.gz"))) as archive:
            for member in archive:
                if "/models/templates/" in member.name and member.name.endswith(".jinja") and member.isfile():
                    (folder / Path(member.name).name).write_bytes(archive.extractfile(member).read())  # type: ignore
        (folder / "whole").touch()
    return folder
