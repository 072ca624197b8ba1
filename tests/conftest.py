"""How the tests are spread over processes (`-n auto`), and what some of them share.

--matrix FILE: write which configurations the conformance tests ran, and how they ended (`make matrix`).
"""

from __future__ import annotations

import functools
import gc
import json
import os
import ssl
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import again
import areas
import pytest
import same_tests
import summary
from hypothesis import Phase, settings

# The same examples in every CI run, so that a red one is its change's fault; new ones wherever a person runs the tests.
settings.register_profile("ci", derandomize=True)
# Of a change to the code (run_mutants.py), whether it fails is all that is asked, not the smallest example that does.
settings.register_profile("mutants", derandomize=True, phases=[Phase.explicit, Phase.generate])
if "MUTANT_UNDER_TEST" in os.environ:
    settings.load_profile("mutants")
elif os.environ.get("CI"):
    settings.load_profile("ci")

OUTCOMES = pytest.StashKey[list]()

# ---------------------------------------------------------------------------------------- processes

# Tests that may run beside those of their own file: they share nothing, and together they take minutes.
APART = (
    "tests/book/test_chapters.py::test_the_claims_hold_on_this_machine",
    "tests/conformance/test_tiny_model.py",
    "tests/kernels/test_compiled.py",
    "tests/kernels/test_interpreter.py",
    "tests/lora/test_conformance.py",
)
# What takes longest begins first, so that no core has a long file left while the others have nothing.
LONGEST_FIRST = (
    *APART,
    *("tests/compile/test_piecewise.py", "tests/bench/test_gpu.py", "tests/bench/test_bench.py"),
    *("tests/serve/test_lifecycle.py", "tests/serve/test_page_browser.py", "tests/serve/test_api_servers.py"),
    *("tests/fuzz/test_parsers.py", "tests/attack/test_attack.py"),
)
WORKER = os.environ.get("PYTEST_XDIST_WORKER")
MEMORY = 2 << 30  # bytes: what a worker and the servers that it starts may need

if WORKER:
    # A core each: two threads in each of several processes on two cores spend their time waiting for one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """A process more than there are cores, as far as memory goes. Alone on the machine that changes nothing: the cores
    are what all wait for. Beside others who want them, the system deals cores out by process."""
    import psutil

    from minivllm.machine import num_cores

    return max(1, min(num_cores() + 1, psutil.virtual_memory().available // MEMORY))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """--dist loadfile, but for the files that are too long for one process."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Spread(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return nodeid if nodeid.startswith(APART) else super()._split_scope(nodeid)

    config.option.loadscopereorder = False  # the order is pytest_collection_modifyitems'
    return Spread(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """A test that is marked `alone` waits until the other processes are between two tests, and they wait for its end:
    what it says is about time. Whoever waits to be alone has shut the door, so that others cannot keep it waiting."""
    if not WORKER:
        return (yield)
    import fcntl

    how = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    folder = item.config._tmp_path_factory.getbasetemp().parent  # of all the run's processes
    with open(folder / "door", "w") as door, open(folder / "room", "w") as room:
        fcntl.flock(door, how)
        if how == fcntl.LOCK_SH:
            fcntl.flock(door, fcntl.LOCK_UN)
        fcntl.flock(room, how)
        return (yield)  # and closing the files gives both back


def pytest_ignore_collect(collection_path, config):
    """Files of other areas are not even imported."""
    if (area := config.getoption("--area")) is None or not collection_path.is_relative_to(config.rootpath / "tests"):
        return None
    path = collection_path.relative_to(config.rootpath).as_posix() + "/" * collection_path.is_dir()
    return None if areas.may_hold(path, area) else True


def pytest_collection_modifyitems(config, items):
    if (area := config.getoption("--area")) is not None:
        if WORKER and area == areas.CHECK:
            same_tests.note(config, items)
        runs = [areas.belongs(item.nodeid, area, bool(item.get_closest_marker("alone"))) for item in items]
        config.hook.pytest_deselected(items=[item for item, its in zip(items, runs, strict=True) if not its])
        items[:] = [item for item, its in zip(items, runs, strict=True) if its]
    if WORKER and not config.pluginmanager.hasplugin("randomly"):  # make orders
        items.sort(key=lambda item: _rank(item.nodeid))  # stable: a file's own order stays


def pytest_collection_finish(session):
    """Thousands of tests and the libraries they import stay: no collection of garbage need look at them again."""
    gc.freeze()


def _rank(nodeid):
    return next((i for i, name in enumerate(LONGEST_FIRST) if nodeid.startswith(name)), len(LONGEST_FIRST))


# ---------------------------------------------------------------------------------------- shared


@pytest.fixture(scope="session", autouse=True)
def trust_is_read_once():
    """An HTTP client reads and parses all the certificates of the web, 30 ms of a core, also to talk to 127.0.0.1; and
    most tests of the server have a client of their own."""
    create = ssl.create_default_context
    ssl.create_default_context = functools.cache(create)
    yield
    ssl.create_default_context = create


@pytest.fixture(scope="session", autouse=True)
def responses_are_kept_elsewhere(tmp_path_factory):
    """What servers keep of their answers is not the user's (serve/response_store.py)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def the_same_draws_in_every_run():
    """What a test draws without a seed of its own: a red run is its change's fault (see "ci" above), in any order. No
    seed that a test may have taken for something else: the same numbers twice would not be independent."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(961_748_941)


def pytest_addoption(parser):
    choices = [areas.GATE, areas.CHECK, *areas.AREAS]
    parser.addoption("--area", choices=choices, help="the gate's tests alone, or an area's: areas.py")
    parser.addoption("--matrix", metavar="FILE", type=Path, help="write the conformance tests' outcomes as JSON")


@pytest.fixture
def short_folder():
    """Where TMPDIR may point to: pytest's own folders are too long for paths of sockets (child.make_folder)."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def apart(monkeypatch):
    """A device of which nothing can be read: whatever waits for it fails, and so does what is mixed with the host's."""
    import torch

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # there is no GPU to pin for
    return torch.device("meta")


@pytest.fixture
def forked_cores(monkeypatch):
    """Engine cores in processes of their own, forked where torch is there already (forked.py): for tests of what they
    compute. Of how they start and end: tests/engine/test_process.py."""
    import forked

    from minivllm import child

    start = child.start

    def forked_start(module, *args, **options):
        if module != "minivllm.engine.process" or options or sys.platform != "linux":
            return start(module, *args, **options)
        env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        return forked.Process(["-m", module, *args], env=env, blocked=list(child.INTERRUPT))

    monkeypatch.setattr(child, "start", forked_start)


def pytest_configure(config):
    config.stash[OUTCOMES] = []
    config.pluginmanager.register(again)
    if not WORKER:
        config.pluginmanager.register(summary.Summary(config))
        if config.getoption("--area") == areas.CHECK:
            config.pluginmanager.register(same_tests.SameTests())
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
        import quick_interpreter

        quick_interpreter.install()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    config = getattr(item, "callspec", None) and item.callspec.params.get("config")
    if call.when == "call" and "conformance" in item.path.parts and isinstance(config, dict):
        options = {f.name: config.get(f.field, f.default) for f in item.module.AXES}
        run = {"test": item.name.partition("[")[0], "options": options, "passed": report.passed}
        item.config.stash[OUTCOMES].append(run)
    return report


def pytest_sessionfinish(session):
    path = session.config.getoption("--matrix")
    if path is not None:
        runs = [json.dumps(run) for run in session.config.stash[OUTCOMES]]
        path.write_text('{"schema": "minivllm.matrix/1", "runs": [\n' + ",\n".join(runs) + "\n]}\n")
