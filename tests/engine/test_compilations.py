"""A grammar is compiled once, beside the step loop: what runs goes on, and what waits for it comes in order."""

from __future__ import annotations

import queue
import threading

import pytest
from eventually import PATIENCE
from eventually import eventually as wait_for
from fakes import FakeEngine

from minivllm.engine.compilations import Compilations
from minivllm.engine.messages import Abort, Add, Close, Ended, Refused, Report
from minivllm.engine.step_loop import StepLoop
from minivllm.errors import BadRequest, MinivllmError
from minivllm.request import EngineRequest, SamplingParams
from minivllm.structured.params import StructuredParams
from minivllm.wanted import Unwanted


class SlowCompiler:
    """Knows a grammar once `gate` has let it through. Its own trials."""

    def __init__(self):
        self.gate, self.compiled, self.failure = threading.Event(), [], None

    def has(self, params):
        return params.key in self.compiled

    def get_ready(self): ...
    def close(self): ...

    def compile(self, params, is_wanted):
        while not self.gate.wait(0.01):
            if not is_wanted():
                raise Unwanted("nobody waits")
        if self.failure is not None:
            raise self.failure
        self.compiled.append(params.key)


def make_compilations(compiler):
    return Compilations(compiler, lambda: compiler)


class Loop:
    """A step loop over the fake model, in a thread."""

    def __init__(self):
        self.engine, self.compiler, self.messages = FakeEngine(), SlowCompiler(), []
        self.inbox = queue.SimpleQueue()
        self.loop = StepLoop(
            self.engine.core, {}, self._take, self.messages.append, compilations=make_compilations(self.compiler)
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
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive() and isinstance(self.messages[-1], Ended)


@pytest.fixture
def loop():
    loop = Loop()
    yield loop
    loop.compiler.gate.set()
    loop.close()


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


def test_a_clients_grammar_waits_for_no_more_than_one_of_a_flood(monkeypatch):
    monkeypatch.setattr("minivllm.engine.compilations.NUM_THREADS", 1)
    compiler = SlowCompiler()
    compilations = make_compilations(compiler)

    def ask(client, regex):
        params = SamplingParams(structured=StructuredParams(regex=regex))
        assert compilations.hold(EngineRequest(f"{client}-{regex}", [1], params, client=client))
        return params.structured.key

    flood = [ask("flood", f"a{{{i}}}") for i in range(1, 6)]
    quiet = [ask("quiet", "b"), ask("quiet", "c")]
    compiler.gate.set()
    wait_for(lambda: len(compiler.compiled) == 7)
    before = [[key in flood for key in compiler.compiled[: compiler.compiled.index(own)]].count(True) for own in quiet]
    assert before[0] <= 2 and before[1] <= before[0] + 1, "one in hand, and one for each of its own"
    assert [key for key in compiler.compiled if key in flood] == flood
    compilations.close()


def test_beside_a_flood_of_grammars_that_never_end_anothers_is_compiled_at_once():
    compiler = SlowCompiler()
    real = compiler.compile

    def compile_own(params, is_wanted):
        if params.regex == "own":
            compiler.compiled.append(params.key)
        else:
            real(params, is_wanted)

    compiler.compile = compile_own
    compilations = make_compilations(compiler)
    for client, regex in [*(("flood", f"a{{{i}}}") for i in range(1, 12)), ("quiet", "own")]:
        params = SamplingParams(structured=StructuredParams(regex=regex))
        assert compilations.hold(EngineRequest(f"{client}-{regex}", [1], params, client=client))
    wait_for(lambda: len(compiler.compiled) == 1)
    compiler.gate.set()
    compilations.close()


def test_nobody_overtakes_those_whose_grammar_has_just_been_compiled():
    compiler = SlowCompiler()
    compilations = make_compilations(compiler)
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
