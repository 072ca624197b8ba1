"""A forked process is as one from the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from forked import Process, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there it is subprocess's own")

SHOW = """
import json, os, random, signal, sys
import helper
print(json.dumps([sys.argv, os.getcwd(), os.environ["NAME"], __name__, sys.path[0], random.random()]))
print("wrong", file=sys.stderr)
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, len(os.listdir("/proc/self/fd")))
print("torch" in sys.modules, "triton" in sys.modules)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "show.py").write_text(SHOW)
    return tmp_path / "show.py"


def test_it_has_its_arguments_environment_folder_and_streams(script, tmp_path):
    seen = []
    for args in ([str(script), "a", "--b"], [str(script)]):
        done = run(*args, env=os.environ | {"NAME": "x"}, cwd=tmp_path)
        lines = done.stdout.splitlines()
        assert (done.returncode, done.stderr) == (0, "wrong\n")
        *found, chance = json.loads(lines[0])
        assert found == [args, str(tmp_path), "x", "__main__", str(tmp_path)]
        assert lines[1:] == ["True 4", "True False"]  # the fourth is the listing's own
        seen.append(chance)
    assert seen[0] != seen[1]


def test_a_module_is_found_where_it_runs(script, tmp_path):
    assert run("-m", "show", env=os.environ | {"NAME": "x"}, cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    "code, status", [("raise SystemExit(3)", 3), ("1 / 0", 1), ("import os, signal; os.kill(os.getpid(), 9)", -9)]
)
def test_its_end_is_told(code, status, tmp_path):
    (tmp_path / "end.py").write_text(f"import atexit; atexit.register(print, 'at exit'); {code}")
    done = run(str(tmp_path / "end.py"))
    assert done.returncode == status and ("ZeroDivisionError" in done.stderr) == (status == 1)
    assert done.stdout == ("at exit\n" if status > 0 else "")


def test_one_that_takes_too_long_is_ended(tmp_path):
    (tmp_path / "sleep.py").write_text("import time; time.sleep(60)")
    with pytest.raises(subprocess.TimeoutExpired):
        run(str(tmp_path / "sleep.py"), timeout=0.3)


def test_what_it_is_sent_it_reads_and_others_do_not_hold_its_pipe(tmp_path):
    (tmp_path / "read.py").write_text("import sys; sys.exit(len(sys.stdin.buffer.read()))")
    first, second = (Process([str(tmp_path / "read.py")]) for _ in range(2))
    assert first.poll() is None and psutil.Process(first.pid).is_running()
    first.stdin.write(b"12345")
    first.stdin.close()
    assert first.wait(20) == 5
    second.send_signal(signal.SIGTERM)
    assert second.wait(20) == -signal.SIGTERM == second.poll()
    second.stdin.close()
