"""One step in flight beside two, on a device that sleeps. The script itself asserts that neither drafts nor an overlap
change a token."""

from __future__ import annotations

import json
import os
from pathlib import Path

import forked

ROOT = Path(__file__).parent.parent.parent


def test_drafts_make_fewer_forwards_and_one_step_at_a_time_never_has_the_next_plan_ready():
    small = ["--num-requests", "4", "--num-tokens", "40", "--pass-ms", "10", "--rounds", "1"]
    # Ten milliseconds: on a busy machine too, some plan is made meanwhile.
    command = ["bench/steps_in_flight.py", "--methods", "none", "ngram", *small]
    done = forked.run(*command, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    none, ngram = json.loads(done.stdout)["results"]
    for overlap in "12":
        assert ngram[overlap]["tokens_per_forward"] > 1.3 * none[overlap]["tokens_per_forward"]
        assert 0 < none[overlap]["idle_percent"]["min"] < 100
    assert none["1"]["ready_percent"]["max"] == 0 < none["2"]["ready_percent"]["max"]
