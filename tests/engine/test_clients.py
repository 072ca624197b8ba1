"""Several front ends of one core, over real sockets: each hears of its own requests, and of nobody else's."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from eventually import PATIENCE
from eventually import eventually as wait_for
from fakes import FakeEngine

from minivllm.config import EngineConfig
from minivllm.engine.clients import Clients
from minivllm.engine.messages import (
    Abort,
    Adapters,
    Add,
    Call,
    Close,
    Ended,
    Facts,
    Failure,
    Gone,
    Refused,
    Report,
    Returned,
)
from minivllm.engine.socket_link import SocketLink
from minivllm.engine.step_loop import StepLoop
from minivllm.errors import BadRequest, ConfigError, EngineDead
from minivllm.lora.table import Adapter
from minivllm.request import BeamSearchParams, EngineRequest, SamplingParams, Sibling


class Core:
    """The fake model behind real sockets, in a thread."""

    def __init__(self, folder):
        self.engine, self.adapters = FakeEngine(), []
        self.clients = Clients(folder)
        self.clients.facts = lambda: Facts(EngineConfig(), [], 100, "fake", "", {"n": 1}, list(self.adapters))
        calls = {"load_lora": self._load, "echo": lambda text: text}
        loop = StepLoop(self.engine.core, calls, self.clients.take, self.clients.post)
        self.thread = threading.Thread(target=self._run, args=(loop,))
        self.thread.start()

    def _run(self, loop):
        loop.run()
        self.clients.close()

    def _load(self, name):
        self.adapters.append(Adapter(name, f"{name}#1", f"/{name}", 8))
        return list(self.adapters)


def heard_by(core):
    """The requests that come to it from now on."""
    heard, decode = [], core.clients._as_of_one

    def listen(client, command):
        if isinstance(command, Add):
            heard.append(command.request.id)
        return decode(client, command)

    core.clients._as_of_one = listen
    return heard


class FrontEnd:
    def __init__(self, folder, name):
        self.link, self.got = SocketLink(folder, name), []
        self.link.start(self.got.append)

    def add(self, req_id, max_tokens=5):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.link.send(Add(EngineRequest(req_id, [1, 2, 3], params)))

    def search(self, request_id, beam):
        self.link.send(Add(EngineRequest(f"{request_id}#0", [1, 2, 3], beam.step, group=request_id, beam=beam)))

    def of(self, kind):
        return [message for message in list(self.got) if isinstance(message, kind)]

    @property
    def tokens(self):
        found = {}
        for report in self.of(Report):
            for delta in report.deltas:
                found.setdefault(delta.req_id, []).extend(delta.token_ids)
        return found


@pytest.fixture
def folder(tmp_path_factory):
    return Path(tmp_path_factory.mktemp("c"))  # a socket's path has to be short


@pytest.fixture
def core(folder):
    core = Core(folder)
    yield core
    if core.thread.is_alive():
        link = SocketLink(folder, "last")
        link.send(Close())
        core.thread.join(PATIENCE)
        link.close()
    assert not core.thread.is_alive()


@pytest.fixture
def front_ends(core, folder):
    both = [FrontEnd(folder, f"f{i}") for i in range(2)]
    yield both
    for front_end in both:
        front_end.link.close()


def test_sequences_that_come_together_are_their_senders(core, front_ends):
    one, two = front_ends
    first = EngineRequest("a#0", [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True, seed=1), group="a")
    one.link.send(Add(first, [Sibling("a#1", 2), Sibling("a#2", 3)]))
    wait_for(lambda: {req_id: len(tokens) for req_id, tokens in one.tokens.items()} == {f"a#{i}": 4 for i in range(3)})
    assert not two.tokens and not core.clients._owners


def test_each_hears_of_its_own_requests_and_all_of_the_gauges(core, front_ends):
    one, two = front_ends
    one.add("a"), two.add("b"), one.search("c", BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True))
    lengths = {"a": 5, "b": 5, "c#0": 3, "c#1": 3}
    wait_for(lambda: {req_id: len(tokens) for req_id, tokens in {**one.tokens, **two.tokens}.items()} == lengths)
    assert set(one.tokens) == {"a", "c#0", "c#1"} and set(two.tokens) == {"b"}
    assert not core.clients._owners
    for front_end in front_ends:
        wait_for(lambda front_end=front_end: front_end.of(Report)[-1].stats.num_running == 0)
        assert len(front_end.of(Report)) >= 5
    assert [r for report in two.of(Report) for r in report.joined] == ["b"]


def test_a_name_that_another_front_end_uses_is_refused_and_the_first_goes_on(core, front_ends):
    one, two = front_ends
    refused, step, own = threading.Event(), core.engine.core.step, core.engine.core

    def one_step_until_then():  # or the first might have ended before the second asks
        if refused.is_set() or not own.stats.num_steps:
            return step()
        time.sleep(0.001)
        return []

    own.step = one_step_until_then
    try:
        one.add("same", 40)
        wait_for(lambda: one.tokens)
        two.add("same")
        wait_for(lambda: two.of(Refused))
        assert isinstance(two.of(Refused)[0].error.exception(), BadRequest)
        two.link.send(Abort(["same"]))  # not its own
        two.link.send(Call(1, "echo", ["heard"]))
        wait_for(lambda: two.of(Returned))
    finally:
        refused.set()
    wait_for(lambda: len(one.tokens["same"]) == 40)
    assert not two.tokens


def test_an_answer_goes_to_who_asked_and_news_of_adapters_to_all(core, front_ends):
    one, two = front_ends
    for front_end, text in zip(front_ends, "xy", strict=True):
        front_end.link.send(Call(1, "echo", [text]))
    wait_for(lambda: one.of(Returned) and two.of(Returned))
    assert [f.of(Returned)[0].value for f in front_ends] == ["x", "y"]
    assert not one.of(Adapters)
    one.link.send(Call(2, "load_lora", ["a"]))
    wait_for(lambda: len(one.of(Returned)) == 2 and two.of(Adapters))
    kinds = [type(message) for message in one.got if isinstance(message, Adapters | Returned)]
    assert kinds == [Returned, Adapters, Returned], "who asked knows it before its answer"
    assert len(two.of(Returned)) == 1


@pytest.mark.parametrize("orderly", [True, False])
def test_a_front_end_that_ends_takes_its_requests_along(core, front_ends, folder, orderly):
    one, two = front_ends
    doomed = FrontEnd(folder, "doomed")
    doomed.add("d", 10_000), one.add("a", 60)
    wait_for(lambda: doomed.tokens)
    if orderly:
        doomed.link.close()
    else:
        one.link.send(Gone("doomed"))  # as its parent does once it has died
    wait_for(lambda: "d" not in core.engine.scheduler.requests)
    wait_for(lambda: len(one.tokens.get("a", ())) == 60)
    assert list(core.clients._known) == [b"f0", b"f1"]
    core.engine.scheduler.check()
    if not orderly:
        doomed.link.close()


def test_a_core_that_ends_is_told_of_and_one_that_follows_is_found(core, front_ends, folder):
    one, _ = front_ends
    one.add("a", 10_000)
    wait_for(lambda: one.tokens)
    one.link.send(Close())
    core.thread.join(PATIENCE)
    wait_for(lambda: one.of(Ended) and not one.link.is_running)
    for i in range(100):
        one.add(f"lost {i}")
        time.sleep(0.001)  # while the link says hello anew
    again = Core(folder)
    taken = heard_by(again)
    try:
        wait_for(lambda: one.of(Facts) and one.link.is_running)
        one.add("b")
        wait_for(lambda: len(one.tokens.get("b", ())) == 5)
        assert taken == ["b"], "what was meant for the old core reached the new one"
    finally:
        one.link.send(Close())
        again.thread.join(PATIENCE)
    assert not again.thread.is_alive()


def test_a_core_that_cannot_be_built_says_why(folder):
    clients = Clients(folder)
    thread = threading.Thread(target=clients.tell_end, args=(Ended(Failure.of(ConfigError("no such thing"))),))
    thread.start()
    with pytest.raises(ConfigError, match="no such thing"):
        SocketLink(folder, "f")
    thread.join(PATIENCE)
    clients.close()


def test_closing_while_the_core_is_away_takes_no_time(core, front_ends):
    one, _ = front_ends
    one.link.send(Close())
    core.thread.join(PATIENCE)
    wait_for(lambda: one.of(Ended))
    begin = time.monotonic()
    one.link.close()
    assert time.monotonic() - begin < 10  # and not until somebody comes
    assert isinstance(one.of(Ended)[0].error.exception(), EngineDead)
