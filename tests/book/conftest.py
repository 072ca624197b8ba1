"""The site is built once, as `make site` builds it, and looked at in one Chromium."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from areas import CHECK
from book.html_pages import Page

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
ALONE = ("-D", "root_doc=index", "-D", "include_patterns=index.md", "-D", "html_extra_path=")  # a page of a test
NO_NAMES = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
sys.path.insert(0, str(ROOT / "site"))


def build(source: Path, out: Path, *options: str) -> Path:
    pytest.importorskip("sphinx", reason='pip install -e ".[site]"')
    pytest.importorskip("furo", reason='pip install -e ".[site]"')
    command = [sys.executable, "-m", "sphinx", "-n", "-W", "--keep-going", "-q", "-c", "site", *options]
    command += [] if source == ROOT else ALONE
    done = subprocess.run([*command, str(source), str(out)], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="session")
def builder() -> Callable[..., Path]:
    return build


@pytest.fixture(scope="session")
def built(tmp_path_factory, request) -> Path:
    """The first of the run's processes that asks builds it, and the others wait for it. A check begins with the last
    check's, and reads what has changed since."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "site"
    folder.mkdir(exist_ok=True)
    out, is_whole = folder / "html", folder / "is-whole"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_whole.exists():
            shutil.rmtree(out, ignore_errors=True)  # of a build that failed: a second one would be silent about it
            last = ROOT / "build" / "site-check"
            keeps = request.config.getoption("--area") == CHECK
            if keeps and last.exists():
                shutil.move(last, out)
            build(ROOT, out)
            if keeps:
                shutil.copytree(out, last)
            is_whole.touch()
    return out


@pytest.fixture(scope="session")
def pages(built) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(built.rglob("*.html"))}


@pytest.fixture(scope="session")
def gallery(tmp_path_factory) -> Path:
    """One page with every widget, and results that are made up: tests/book/gallery, tests/book/fixtures."""
    return build(HERE / "gallery", tmp_path_factory.mktemp("gallery"), "-D", f"book_bench={HERE / 'fixtures'}")


@pytest.fixture(scope="module")  # its event loop lives in the main thread: while it does, no test can asyncio.run()
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason='pip install -e ".[dev]"')
    if CHROMIUM is None:
        pytest.skip("no Chromium here (Debian: apt install chromium)")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS, NO_NAMES])
        yield running
        running.close()
