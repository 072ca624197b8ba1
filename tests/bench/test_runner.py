"""`python -m bench`: each benchmark answers a question, can be found by its name, and says what it takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import __main__ as runner
from minivllm.cli import bench as command

ROOT = Path(__file__).parent.parent.parent
NAMES = runner.names()

# All of them in one interpreter, which imports torch once; each finds the folder's modules as if it ran alone.
HELP_OF_ALL = """
import contextlib, io, json, runpy, sys
from pathlib import Path
from bench import __main__ as runner
own, path, said = set(sys.modules), sys.path[:], {}
for name in runner.names():
    target = runner.program(name)
    for module in set(sys.modules) - own:
        if str(getattr(sys.modules[module], "__file__", "")).startswith(str(runner.HERE)):
            del sys.modules[module]
    out, code = io.StringIO(), "did not exit"
    with contextlib.redirect_stdout(out):
        try:
            if target[0] == "-m":
                sys.argv, sys.path[:] = [target[1], "--help"], path
                runpy.run_module(target[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv, sys.path[:] = [target[0], "--help"], [str(Path(target[0]).resolve().parent), *path]
                runpy.run_path(target[0], run_name="__main__")
        except SystemExit as exit:
            code = exit.code
    said[name] = (code, out.getvalue())
json.dump(said, sys.stdout)
"""


def python(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=250)


@pytest.fixture(scope="module")
def help_of() -> dict[str, tuple[int, str]]:
    done = python("-c", HELP_OF_ALL)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_each_says_in_its_first_line_which_question_it_answers(name):
    question = runner.question(NAMES[name])
    assert re.fullmatch(r"[A-Z].*\?", question) and question.count("?") == 1


@pytest.mark.parametrize("name", NAMES)
def test_each_shows_its_options(name, help_of):
    code, text = help_of[name]
    assert code == 0 and text.startswith("usage: ") and "--help" in text
    assert runner.question(NAMES[name]) in text or name == "peers"  # whose options are bench/peers/compare.py's


def test_every_program_of_the_folder_has_a_name():
    """But for those that another one starts: peers' and rivals' runners, in the environments of others."""
    programs = {path for path in (ROOT / "bench").rglob("*.py") if '\nif __name__ == "__main__":' in path.read_text()}
    started = {path for path in programs if path.name.startswith("run_") or path.name == "rival.py"}
    own = {ROOT / "bench" / "__main__.py", ROOT / "bench" / "peers" / "compare.py"}  # the latter is `peers`
    assert programs - started - own == set(NAMES.values()) - {ROOT / "bench" / "peers" / "__main__.py"}


def test_the_list_names_each_with_its_question_wherever_it_is_asked_for(tmp_path, capsys):
    listed = python("-m", "bench").stdout
    assert all(
        re.search(rf"^  {name} +{re.escape(runner.question(path))}$", listed, re.M) for name, path in NAMES.items()
    )
    assert command.main([], "minivllm bench") == 0
    assert capsys.readouterr().out == listed.replace("python -m bench", "minivllm bench")
    assert python("-m", "minivllm", "bench", cwd=tmp_path).stdout == listed.replace("-m bench", "-m minivllm bench")


def test_arguments_and_exit_codes_are_the_scripts_own_from_any_folder(tmp_path):
    args = ("-m", "minivllm", "bench", "prefix", "--num-reqs")
    done = python(*args, cwd=tmp_path)
    assert done.returncode == 2 and "prefix.py: error: " in done.stderr


def test_a_script_imports_the_engine_of_its_own_repository(monkeypatch):
    """An environment may have another checkout installed: PYTHONPATH comes before it."""
    ran = []
    monkeypatch.setattr(
        os, "execve", lambda path, args, env: ran.append((args, env["PYTHONPATH"].split(os.pathsep)[0]))
    )
    runner.main(["host", "--num-steps", "2"])
    runner.main(["peers", "--quick"])
    (script, first), (module, second) = ran
    assert script == [sys.executable, os.path.relpath(ROOT / "bench" / "host.py"), "--num-steps", "2"]
    assert module == [sys.executable, "-m", "bench.peers", "--quick"] and first == second == str(ROOT)
