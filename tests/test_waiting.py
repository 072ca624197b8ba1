"""Rule: threads do not hold cores that they do not use, and the user's own setting wins."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from minivllm import machine
from minivllm.runner.platform import choose_threads
from minivllm.waiting import SPIN_COUNT

CODE = """
import os, sys
{before}
from minivllm.waiting import settle
d = settle()
print(d.value, "|", d.reason, "|", os.environ.get("GOMP_SPINCOUNT"), "|", "torch" in sys.modules)
"""


def settled(before: str = "", **env: str) -> list[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    run = [sys.executable, "-c", CODE.format(before=before)]
    done = subprocess.run(run, env=clean | env, capture_output=True, text=True, check=True)
    return [part.strip() for part in done.stdout.split("|")]


def test_the_default_is_set_before_torch_is_there():
    value, _, spins, has_torch = settled()
    assert (value, spins, has_torch) == (f"GOMP_SPINCOUNT={SPIN_COUNT}", SPIN_COUNT, "False")


@pytest.mark.parametrize(("name", "value"), [("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "7")])
def test_what_the_user_set_stays(name, value):
    shown, reason, spins, _ = settled(**{name: value})
    assert shown == f"{name}={value}" and "environment" in reason
    assert spins == ("7" if name == "GOMP_SPINCOUNT" else "None")


def test_too_late_changes_nothing_and_says_so():
    _, reason, spins, _ = settled(before="import torch")
    assert "torch was loaded before" in reason and spins == "None"


SERVE = """
import minivllm.engine.async_llm as engine
from minivllm.waiting import settle
def stop(**options):
    print(settle().value)
    raise SystemExit
engine.AsyncLLM = stop
from minivllm.serve.command import main
main(["--model", "dummy:tiny", "--port", "0"])
"""
LLM = """
import sys, minivllm.engine.build.engine as build
build.waiting.settle, settle = lambda: print("torch" in sys.modules, settle().value), build.waiting.settle
from minivllm import LLM
LLM("dummy:tiny")
"""


@pytest.mark.parametrize("code", [SERVE, LLM], ids=["server", "offline"])
def test_it_is_settled_before_anything_imports_torch(code):
    """Whoever imports torch on the way there makes the default void."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True)
    assert f"GOMP_SPINCOUNT={SPIN_COUNT}" in done.stdout and "True" not in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "what is this"}, None),
        ({}, None),
    ],
)
def test_a_control_groups_limit_is_read(tmp_path, monkeypatch, files, quota):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.cpu_quota() == quota


@pytest.mark.parametrize(("quota", "threads"), [(None, 8), (16.0, 8), (2.5, 2), (0.5, 1)])
def test_threads_fit_the_cores_and_the_limit(monkeypatch, quota, threads):
    monkeypatch.setattr("minivllm.runner.platform.num_cores", lambda: 8)
    monkeypatch.setattr("minivllm.runner.platform.cpu_quota", lambda: quota)
    assert choose_threads(None)[0] == threads
    assert choose_threads(3) == (3, "as configured")
