"""A grammar is compiled once, beside the step loop: what runs goes on, and what waits for it comes in order."""

from __future__ import annotations

import queue
import threading
import time

import pytest
from fakes import FakeEngine

from minivllm.engine.compilations import Compilations
from minivllm.engine.messages import Abort, Add, Close, Ended, Refused, Report
from minivllm.engine.step_loop import StepLoop
from minivllm.errors import BadRequest, MinivllmError
from minivllm.request import EngineRequest, SamplingParams
from minivllm.structured.params import StructuredParams


class SlowCompiler:
    """Knows a grammar once `gate` has let it through."""

    def __init__(self):
        self.gate, self.compiled, self.failure = threading.Event(), [], None

    def has(self, params):
        return params.key in self.compiled

    def compile(self, params):
        assert self.gate.wait(10)
        if self.failure is not None:
            raise self.failure
        self.compiled.append(params.key)


class Loop:
    """A step loop over the fake model, in a thread."""

    def __init__(self):
        self.engine, self.compiler, self.messages = FakeEngine(), SlowCompiler(), []
        self.inbox = queue.SimpleQueue()
        self.loop = StepLoop(
            self.engine.core, {}, self._take, self.messages.append, compilations=Compilations(self.compiler)
        )
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()

    def _take(self, patience):
        try:
            return self.inbox.get(patience != 0, patience)
        except queue.Empty:
            return None

    def add(self, req_id, regex=None, max_tokens=3, group=""):
        structured = None if regex is None else StructuredParams(regex=regex, field=f"of {group or req_id}")
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, structured=structured)
        self.inbox.put(Add(EngineRequest(req_id, [1, 2, 3], params, group=group)))

    def ended(self):
        reports = [message for message in list(self.messages) if isinstance(message, Report)]
        return [d.req_id for report in reports for d in report.deltas if d.finish_reason is not None]

    def close(self):
        self.inbox.put(Close())
        self.thread.join(10)
        assert not self.thread.is_alive() and isinstance(self.messages[-1], Ended)


@pytest.fixture
def loop():
    loop = Loop()
    yield loop
    loop.compiler.gate.set()
    loop.close()


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.005)


def test_tokens_of_others_go_on_while_a_grammar_is_compiled(loop):
    loop.add("with", "a+")
    loop.add("without")
    wait_for(lambda: loop.ended() == ["without"])
    assert not loop.compiler.compiled
    loop.compiler.gate.set()
    wait_for(lambda: loop.ended() == ["without", "with"])
    loop.add("again", "a+")
    wait_for(lambda: loop.ended()[-1] == "again")
    assert len(loop.compiler.compiled) == 1


def test_nobody_overtakes_those_whose_grammar_has_just_been_compiled():
    compiler = SlowCompiler()
    compilations = Compilations(compiler)
    params = SamplingParams(structured=StructuredParams(regex="c+"))
    first, second = (EngineRequest(name, [1], params) for name in "ab")
    assert compilations.hold(first)
    compiler.gate.set()
    wait_for(lambda: compiler.compiled)
    assert compilations.hold(second), "the first one has not been given back"
    wait_for(lambda: not compilations._done.empty())
    (compilation,) = compilations.ready()
    assert compilation.waiting == [first, second]
    assert not compilations.is_busy and not compilations.hold(first)


def test_those_that_wait_for_one_grammar_come_in_their_order_and_together(loop):
    arrived = []
    add = loop.engine.core.add
    loop.engine.core.add = lambda request: arrived.append(request.id) or add(request)
    for i in range(3):
        loop.add(f"r#{i}", "b+", group="r")
    loop.inbox.put(Abort(["r#1"]))
    wait_for(loop.inbox.empty)
    loop.compiler.gate.set()
    wait_for(lambda: len(loop.ended()) == 2)
    assert arrived == ["r#0", "r#2"] and len(loop.compiler.compiled) == 1


@pytest.mark.parametrize(
    "raised, told", [(BadRequest("of bad: no", "of bad"), BadRequest), (RuntimeError("boom"), MinivllmError)]
)
def test_a_grammar_that_cannot_be_refuses_its_request_alone(loop, raised, told):
    loop.compiler.failure = raised
    loop.compiler.gate.set()
    loop.add("bad", "(")
    loop.add("good")
    wait_for(lambda: "good" in loop.ended() and any(isinstance(m, Refused) for m in loop.messages))
    (refused,) = [m for m in loop.messages if isinstance(m, Refused)]
    assert refused.req_id == "bad" and type(refused.error.exception()) is told
