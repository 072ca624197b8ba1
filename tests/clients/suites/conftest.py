"""What every client's file gets: a server, and a mark that says which capability a test shows.

`make clients` (clients/run.py) runs a file in an environment of its own, where nothing but pytest and the client is
installed, against a server that it names by CLIENTS_URL and CLIENTS_MODEL. `make test` runs the files whose packages
are installed against the server of the tests beside them, over random weights.
"""

from __future__ import annotations

import os

import pytest
from clients.suites.common import CAPABILITIES, Served


def pytest_configure(config):
    config.addinivalue_line("markers", "shows(capability): which column of the clients' table a test is part of")


@pytest.fixture(autouse=True)
def told(request, record_property):
    """The capability, for the report that clients/run.py reads."""
    (capability,) = request.node.get_closest_marker("shows").args
    assert capability in CAPABILITIES
    record_property("capability", capability)


@pytest.fixture(scope="module")
def served(request):
    if url := os.environ.get("CLIENTS_URL"):
        return Served(url, os.environ["CLIENTS_MODEL"])
    return Served(request.getfixturevalue("server").url, "dummy:tiny")


@pytest.fixture(autouse=True)
def answers_that_last(request):
    """An answer that a client leaves must not be over before the client has looked at its beginning."""
    (capability,) = request.node.get_closest_marker("shows").args
    if capability != "abort" or "CLIENTS_URL" in os.environ:
        yield
        return
    from steps import before_each_step, slow_down

    with before_each_step(request.getfixturevalue("server").engine, slow_down):
        yield
