"""What several servers count together outlives a disk that is full for a while."""

from __future__ import annotations

import errno
import os

from minivllm.engine.metrics import Metrics
from minivllm.serve.shared_metrics import SharedMetrics


def test_counts_that_found_no_room_are_written_once_there_is_some(tmp_path, monkeypatch, caplog):
    mine, theirs = Metrics("tiny"), Metrics("tiny")
    shared, reader = SharedMetrics(tmp_path, "server-0.1", mine), SharedMetrics(tmp_path, "server-1.1", theirs)

    def full(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.write_bytes", full)
        shared.write()
        shared.write()
    assert list(reader.others()) == [] and caplog.text.count("No space left on device") == 1
    shared.write()
    assert len(list(reader.others())) == 1
