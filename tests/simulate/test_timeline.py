"""A device's own time line: a step begins when it was submitted and the one before it has ended."""

from minivllm.plan import StepOutput, StepPlan
from minivllm.simulate.clock import VirtualClock
from minivllm.simulate.host import NO_HOST
from minivllm.simulate.timeline import TimelineExecutor


class Worker:
    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def execute(self, plan):
        self.clock.wait_until(self.clock() + self.seconds)
        return StepOutput({"r": [plan.step]})


def queue_of(seconds):
    host, stopwatch = VirtualClock(), VirtualClock()
    return host, TimelineExecutor(Worker(stopwatch, seconds), stopwatch, host, NO_HOST)


def test_submitting_takes_the_host_no_time_and_waiting_takes_it_to_the_steps_end():
    host, queue = queue_of(3.0)
    first, second = queue.submit(StepPlan(0)), queue.submit(StepPlan(1))
    assert host() == 0 and not first.is_ready()
    assert first.result().tokens == {"r": [0]} and host() == 3
    assert not second.is_ready() and second.result().tokens == {"r": [1]} and host() == 6


def test_a_device_that_is_idle_begins_when_it_is_asked():
    host, queue = queue_of(3.0)
    queue.submit(StepPlan(0)).result()
    host.wait_until(10.0)
    assert queue.submit(StepPlan(1)).result() and host() == 13


def test_what_ended_long_ago_is_had_at_once():
    host, queue = queue_of(3.0)
    first, second = queue.submit(StepPlan(0)), queue.submit(StepPlan(1))
    second.result()
    assert first.is_ready() and first.result() and host() == 6
