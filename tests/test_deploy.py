"""What the files of deploy/ name exists: they cannot be built here, so at least they must not go stale."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from minivllm.loading.cache import default_cache_dir
from minivllm.serve.command import parser

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
SERVICE = (ROOT / "deploy" / "minivllm.service").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def instructions(name: str) -> list[str]:
    """The arguments of every such instruction, with continued lines joined."""
    joined = DOCKERFILE.replace("\\\n", " ")
    return [line.removeprefix(name).strip() for line in joined.splitlines() if line.startswith(f"{name} ")]


def unit() -> dict[str, dict[str, str]]:
    read = configparser.ConfigParser(interpolation=None)
    read.optionxform = str
    read.read_string(SERVICE)
    return {section: dict(read[section]) for section in read.sections()}


def served(words: list[str]) -> object:
    """Arguments of `python -m minivllm.serve`, parsed as it parses them."""
    assert words[1:3] == ["-m", "minivllm.serve"]
    return parser("serve").parse_args(words[3:])


def test_all_that_is_copied_exists_and_is_not_ignored():
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    sources = [source for line in instructions("COPY") for source in line.split()[:-1]]
    assert ignored[0] == "*" and {line[1:] for line in ignored if line[0] == "!"} == set(sources)
    assert all((ROOT / source).exists() for source in sources)


def test_a_build_has_all_that_the_package_is_made_of():
    sources = {source for line in instructions("COPY") for source in line.split()[:-1]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {"pyproject.toml", "setup.py", "minivllm", "kernels", project["readme"], *project["license-files"]}
    assert sources == needed


def test_the_stages_build_on_each_other_and_the_default_one_is_for_cpus():
    stages = [line.split(" AS ") for line in instructions("FROM")]
    assert [name for _, name in stages] == ["base", "cuda", "cpu"] and [base for base, _ in stages[1:]] == ["base"] * 2
    extras = [extra for line in instructions("RUN") for extra in re.findall(r"\.\[([\w,]+)\]", line)]
    assert len(extras) == 2 and {name for extra in extras for name in extra.split(",")} <= EXTRAS.keys()
    assert DOCKERFILE.count("USER minivllm") == 2, "nothing runs as root"


def test_the_images_command_is_one_that_the_server_takes():
    (entry,) = instructions("ENTRYPOINT")
    args = served(json.loads(entry))
    assert args.host == "0.0.0.0" and [str(args.port)] == instructions("EXPOSE")
    (check,) = instructions("HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    assert f"http://127.0.0.1:{args.port}/health" in command[-1]
    compile(command[-1], "HEALTHCHECK", "exec")
    for comment in re.findall(r"^#\s+docker run .* minivllm(?::cuda)? (--.*)$", DOCKERFILE, re.MULTILINE):
        served([*json.loads(entry), *shlex.split(comment)])
    for path in re.findall(r"docker build -f (\S+)", DOCKERFILE):
        assert (ROOT / path).is_file()


def test_models_and_kernels_are_kept_in_the_volume(monkeypatch):
    (volume,) = instructions("VOLUME")
    (cache,) = re.findall(r"XDG_CACHE_HOME=(\S+)", DOCKERFILE)
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert default_cache_dir().is_relative_to(volume)


def test_the_services_command_is_one_that_the_server_takes(monkeypatch):
    service = unit()["Service"]
    args = served(shlex.split(service["ExecStart"]))
    assert args.log_format == "json" and args.host == "127.0.0.1"
    credential = service["LoadCredential"].partition(":")[0]
    assert str(args.api_key_file) == f"${{CREDENTIALS_DIRECTORY}}/{credential}"
    assert f"XDG_CACHE_HOME=/var/cache/{service['CacheDirectory']}" in service["Environment"]
    assert service["LoadCredential"].partition(":")[2] in SERVICE.partition("[Unit]")[0]


@pytest.mark.parametrize("path", ["deploy/Dockerfile", "deploy/minivllm.service", ".dockerignore"])
def test_the_readme_or_the_files_themselves_name_them(path):
    assert path in (ROOT / "README.md").read_text() + DOCKERFILE + SERVICE
