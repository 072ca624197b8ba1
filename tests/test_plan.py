"""The data that crosses the seams of a step: what a plan adds up to, and a result that is on its way."""

from __future__ import annotations

import pytest

from minivllm.plan import AsyncOutput, StepPlan


def test_a_step_computes_what_all_of_its_requests_compute():
    assert StepPlan(0).total_tokens == 0
    assert StepPlan(0, {"a": 5, "b": 1, "c": 3}).total_tokens == 9


class Device:
    """Has its result once `done` is set, and counts how often it was asked for it."""

    def __init__(self, result):
        self.done, self.num_asked, self.result = False, 0, result

    def make(self):
        self.num_asked += 1
        self.done = True
        return self.result

    def output(self) -> AsyncOutput:
        return AsyncOutput(lambda: self.done, self.make)


def test_a_result_is_made_when_it_is_first_asked_for_and_is_the_same_each_time():
    device = Device([7])
    output = device.output()
    assert not output.is_ready() and device.num_asked == 0
    device.done = True
    assert output.is_ready() and device.num_asked == 0, "to ask whether it is there does not fetch it"
    assert output.result() is output.result() is device.result
    assert device.num_asked == 1
    device.done = False
    assert output.is_ready(), "what was fetched stays"


def test_no_result_is_a_result_too():
    device = Device(None)
    output = device.output()
    assert output.result() is output.result() is None and device.num_asked == 1


def test_what_follows_from_a_result_is_ready_with_it_and_made_once():
    device, seen = Device(7), []
    output = device.output()
    then = output.then(lambda value: seen.append(value) or value + 1)
    assert not then.is_ready() and not seen
    assert then.result() == then.result() == 8 and seen == [7]
    assert output.is_ready() and output.result() == 7 and device.num_asked == 1


def test_what_is_here_already_waits_for_nothing():
    output = AsyncOutput.ready(7)
    assert output.is_ready() and output.result() == 7
    assert output.then(str).result() == "7"


def test_a_failure_is_ready_and_is_raised_to_each_who_asks():
    output = AsyncOutput.failed(ValueError("lost"))
    assert output.is_ready() is True
    for asked in (output, output, output.then(str)):
        with pytest.raises(ValueError, match="^lost$"):
            asked.result()
