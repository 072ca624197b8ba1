"""A pytest plugin for llama.cpp's server tests: nothing is fetched before them, and servers have time to start."""

import outcomes


def pytest_configure(config):
    import utils

    utils.ServerPreset.load_all = staticmethod(lambda: None)
    start = utils.ServerProcess.start
    utils.ServerProcess.start = lambda self, timeout_seconds=120: start(self, timeout_seconds)
    outcomes.count_starts(utils.ServerProcess, "start")
