"""What the files of deploy/ name exists: they cannot be built here, so at least they must not go stale."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from minivllm.loading.cache import default_cache_dir
from minivllm.serve.command import parser
from minivllm.serve.response_store import default_path

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
SERVICE = (ROOT / "deploy" / "minivllm.service").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def instructions(name: str) -> list[str]:
    """The arguments of every such instruction, with continued lines joined."""
    joined = DOCKERFILE.replace("\\\n", " ")
    return [line.removeprefix(name).strip() for line in joined.splitlines() if line.startswith(f"{name} ")]


def comments() -> str:
    """The Dockerfile's, with continued lines joined."""
    return re.sub(r"\\\n#\s+", "", DOCKERFILE)


def unit() -> dict[str, dict[str, str]]:
    read = configparser.ConfigParser(interpolation=None, strict=False)  # SystemCallFilter twice: a list, and what goes
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
    needed.add("deploy/requirements.txt")
    assert sources == needed


def test_the_stages_build_on_each_other_and_the_default_one_is_for_cpus():
    stages = [line.split(" AS ") for line in instructions("FROM")]
    assert [name for _, name in stages] == ["base", "cuda", "cpu"] and [base for base, _ in stages[1:]] == ["base"] * 2
    extras = [extra for line in instructions("RUN") for extra in re.findall(r"\.\[([\w,]+)\]", line)]
    assert len(extras) == 3 and {name for extra in extras for name in extra.split(",")} <= EXTRAS.keys()
    assert DOCKERFILE.count("USER minivllm") == 2, "nothing runs as root"


def test_the_base_image_is_named_by_its_digest():
    images = [line.split(" AS ")[0] for line in instructions("FROM")]
    assert re.fullmatch(r"python:3\.12-slim@sha256:[0-9a-f]{64}", images[0]) and set(images[1:]) == {"base"}


def test_the_images_command_is_one_that_the_server_takes():
    (entry,) = instructions("ENTRYPOINT")
    args = served(json.loads(entry))
    assert args.host == "0.0.0.0" and [str(args.port)] == instructions("EXPOSE")
    (check,) = instructions("HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    assert f"http://127.0.0.1:{args.port}/health" in command[-1]
    compile(command[-1], "HEALTHCHECK", "exec")
    told = re.findall(r"^#\s+(?:docker run|\.\.\.) .* minivllm(?::cuda)? (--.*)$", comments(), re.MULTILINE)
    assert len(told) == 2
    for options in told:
        served([*json.loads(entry), *shlex.split(options)])
    for path in re.findall(r"docker build -f (\S+)", DOCKERFILE):
        assert (ROOT / path).is_file()


def test_a_container_has_no_right_that_it_does_not_need():
    (command,) = re.findall(r"docker run (.*) minivllm --", comments())
    words = shlex.split(command)
    for right in ("--read-only", "--cap-drop ALL", "--security-opt no-new-privileges", "--pids-limit", "--memory"):
        assert shlex.split(right)[0] in words and right in command
    assert "-p 127.0.0.1:8000:8000" in command, "a port of the host's loopback: Docker's own rules pass by a firewall's"
    (volume,) = instructions("VOLUME")
    assert f"minivllm-cache:{volume}" in words
    homes = re.findall(r"\b(?:HOME|XDG_CACHE_HOME|XDG_STATE_HOME)=(\S+)", DOCKERFILE)
    assert len(homes) == 3 and set(homes) == {volume}, "all else cannot be written to"


def test_models_and_kernels_are_kept_in_the_volume(monkeypatch):
    (volume,) = instructions("VOLUME")
    (cache,) = re.findall(r"XDG_CACHE_HOME=(\S+)", DOCKERFILE)
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert default_cache_dir().is_relative_to(volume)


def test_responses_are_kept_where_they_outlive_a_container_and_no_cache(monkeypatch):
    (volume,) = instructions("VOLUME")
    monkeypatch.setenv("XDG_STATE_HOME", re.findall(r"XDG_STATE_HOME=(\S+)", DOCKERFILE)[0])
    assert default_path().is_relative_to(volume)
    service = unit()["Service"]
    monkeypatch.setenv("XDG_STATE_HOME", re.findall(r"XDG_STATE_HOME=(\S+)", service["Environment"])[0])
    assert default_path().parent == Path("/var/lib") / service["StateDirectory"]


def test_the_services_command_is_one_that_the_server_takes(monkeypatch):
    service = unit()["Service"]
    args = served(shlex.split(service["ExecStart"]))
    assert args.log_format == "json" and args.host == "127.0.0.1"
    credential = service["LoadCredential"].partition(":")[0]
    assert str(args.api_key_file) == f"${{CREDENTIALS_DIRECTORY}}/{credential}"
    assert f"XDG_CACHE_HOME=/var/cache/{service['CacheDirectory']}" in service["Environment"]
    assert service["LoadCredential"].partition(":")[2] in SERVICE.partition("[Unit]")[0]


def test_the_service_is_bounded_and_has_no_right_that_it_does_not_need():
    service = unit()["Service"]
    assert {"MemoryMax", "LimitNOFILE", "TasksMax"} <= service.keys() and service["LimitCORE"] == "0"
    assert service["CapabilityBoundingSet"] == "" and service["NoNewPrivileges"] == "yes"
    assert service["ProtectSystem"] == "strict" and service["UMask"] == "0077"
    assert re.findall(r"^SystemCallFilter=(.*)$", SERVICE, re.MULTILINE) == ["@system-service", "~@privileged"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_reads_every_line_of_the_service_and_finds_little_exposed(tmp_path):
    """20: of a hundred, where an unchanged service has 96."""
    path = tmp_path / "minivllm.service"
    path.write_text(SERVICE.replace("/opt/minivllm/bin/python", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, timeout=250)
    told = [line for line in done.stderr.splitlines() if "minivllm" in line]
    assert not told, done.stderr
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    if "nknown option" in done.stderr or "unrecognized option" in done.stderr:
        pytest.skip("systemd before 250 cannot look at a file")
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize(
    "path", ["deploy/Dockerfile", "deploy/minivllm.service", "deploy/nginx.conf", "deploy/Caddyfile", ".dockerignore"]
)
def test_the_docs_or_the_files_themselves_name_them(path):
    assert path in (ROOT / "docs" / "operations.md").read_text() + DOCKERFILE + SERVICE


def test_what_tells_of_a_build_of_torch_for_cpus_names_a_section_that_is_there():
    told = (ROOT / "Makefile").read_text()
    (section, page) = re.search(r"see '([^']+)' in ([\w/.]+)", told).groups()
    assert f"# {section}\n" in (ROOT / page).read_text() and f"(see {page})" in DOCKERFILE
