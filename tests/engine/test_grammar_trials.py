"""A grammar that no compiler gets done with harms its own request and no other: its child is killed and replaced."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import queue
import threading

import msgspec
import numpy as np
import psutil
import pytest
from fakes import FakeEngine
from grammar_bombs import Bombs
from grammar_driver import BACKENDS, compiler, vocabulary

from minivllm import AsyncLLM
from minivllm.engine.compilations import NUM_THREADS, Compilations
from minivllm.engine.grammar_trials import GrammarTrials
from minivllm.engine.messages import Abort, Add, Close, Refused, Report
from minivllm.engine.step_loop import StepLoop
from minivllm.errors import BadRequest
from minivllm.request import EngineRequest, SamplingParams
from minivllm.sandbox import Limits
from minivllm.structured.compiler import GrammarCompiler
from minivllm.structured.params import StructuredParams
from minivllm.structured.trial import answer_of, make_work, setup_of
from minivllm.wanted import Unwanted

WIDE = Limits(seconds=120, megabytes=512)  # no test waits for these
SHORT = Limits(seconds=1.0, megabytes=512)  # which a small grammar needs little of
SPECIFICATIONS = [
    StructuredParams(regex="[a-c]{3}"),
    StructuredParams(choice=["yes", "no"]),
    StructuredParams(json={"type": "object", "properties": {"a": {"enum": ["x", 1]}}, "required": ["a"]}),
    StructuredParams(json={"type": "boolean"}, disable_any_whitespace=True),
    StructuredParams(json_object=True),
    StructuredParams(grammar='root ::= "a" ("b" | root)'),
    StructuredParams(json={"$ref": "#/$defs/l", "$defs": {"l": {"type": "array", "items": {"$ref": "#/$defs/l"}}}}),
]


@pytest.fixture(autouse=True)
def bombs_are_for_children(monkeypatch):
    monkeypatch.setenv("BOMBS_PARENT", str(os.getpid()))


def bombs() -> GrammarCompiler:
    return GrammarCompiler(vocabulary, [("bombs", Bombs)])


@pytest.mark.parametrize("names", [(), *((name,) for name in BACKENDS)], ids=str)
def test_what_a_child_translates_is_built_to_the_same_grammar(names):
    work = make_work(setup_of(compiler(*names)))

    def choose(params):
        return answer_of(work(msgspec.msgpack.encode(params)))

    fresh = GrammarCompiler(vocabulary, [(name, BACKENDS[name]) for name in names or BACKENDS])
    for params in SPECIFICATIONS:
        try:
            expected = compiler(*names).compile(params)
        except BadRequest as error:
            with pytest.raises(BadRequest) as e:
                fresh.compile(params, choose)
            assert str(e.value) == str(error) and e.value.param == error.param
            continue
        found = fresh.compile(params, choose)
        assert type(found) is type(expected)
        masks = np.zeros((2, vocabulary().num_words), np.int32)
        for mask, compiled in zip(masks, (found, expected), strict=True):
            compiled.start().fill_mask(mask)
        assert (masks[0] == masks[1]).all()


def test_a_real_child_gives_the_masks_of_this_process_and_loads_no_torch():
    """XGrammar imports it, for what a child never does."""
    known = GrammarCompiler(vocabulary, list(BACKENDS.items()))
    trials = GrammarTrials(known, WIDE)
    try:
        for params in (*SPECIFICATIONS, StructuredParams(json={"type": "string", "pattern": "^a+$"})):
            assert trials._choose(params, lambda: True) == compiler().choose(params)[:2]
        for wrong in ({"grammar": "root ::= missing ) |"}, {"regex": "(a"}, {"json": {"not": {}, "oneOf": [{}, {}]}}):
            with pytest.raises(BadRequest) as expected:
                compiler().compile(StructuredParams(**wrong))
            with pytest.raises(BadRequest) as found:
                trials._choose(StructuredParams(**wrong), lambda: True)
            assert str(found.value) == str(expected.value)
        if hasattr(psutil.Process, "memory_maps"):
            maps = psutil.Process(trials.pid).memory_maps()
            assert any("xgrammar" in each.path for each in maps) and not any("libtorch" in each.path for each in maps)
    finally:
        trials.close()


@pytest.mark.parametrize(
    "regex, limits, why",
    [("endless", SHORT, r"takes over 1 s"), ("memory", WIDE, "memory"), ("crash", WIDE, "ended its process")],
)
def test_a_grammar_beyond_a_limit_is_refused_by_name_and_the_next_one_compiles(regex, limits, why):
    known = bombs()
    trials = GrammarTrials(known, limits)
    try:
        for params in (StructuredParams(regex=regex, field="guided_regex"),) * 2:
            with pytest.raises(BadRequest, match=f"guided_regex: regex: compiling it .*{why}") as e:
                trials.compile(params, lambda: True)
            assert e.value.param == "guided_regex" and not known.has(params)
        good = StructuredParams(regex="a+")
        trials.compile(good, lambda: True)
        assert known.has(good)
        with pytest.raises(BadRequest, match="without its"):
            trials.compile(StructuredParams(regex="(a"), lambda: True)
    finally:
        trials.close()


class Loop:
    """A step loop over the fake model, in a thread, with real children."""

    def __init__(self, known: GrammarCompiler, limits: Limits):
        self.trials, self.inbox, self.messages = [], queue.SimpleQueue(), queue.SimpleQueue()
        self.compilations = Compilations(known, lambda: self.make(known, limits))
        core = FakeEngine().core
        loop = StepLoop(core, {}, self._take, self.messages.put, compilations=self.compilations)
        self.loop, self.thread = loop, threading.Thread(target=loop.run)
        self.thread.start()

    def make(self, known, limits):
        self.trials.append(GrammarTrials(known, limits))
        return self.trials[-1]

    def _take(self, patience):
        try:
            return self.inbox.get(patience != 0, patience)
        except queue.Empty:
            return None

    def add(self, req_id, regex=None):
        structured = None if regex is None else StructuredParams(regex=regex)
        params = SamplingParams(max_tokens=2, ignore_eos=True, structured=structured)
        self.inbox.put(Add(EngineRequest(req_id, [1, 2, 3], params)))

    def ended(self) -> str:
        """The next request that ends or is refused."""
        while True:
            message = self.messages.get(timeout=60)
            if isinstance(message, Refused):
                return f"{message.req_id} refused"
            if isinstance(message, Report):
                for delta in message.deltas:
                    if delta.finish_reason is not None:
                        return delta.req_id

    def close(self):
        self.inbox.put(Close())
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.loop.close()


def test_compilations_that_nobody_waits_for_end_and_make_place_for_others():
    loop = Loop(bombs(), WIDE)
    try:
        loop.add("plain")
        assert loop.ended() == "plain" and not loop.trials, "who uses no grammar pays for no child"
        for i in range(NUM_THREADS + 1):  # each holds a child; the last one waits for its turn
            loop.add(f"endless {i}", f"endless{i}")
        loop.inbox.put(Abort([f"endless {i}" for i in range(NUM_THREADS + 1)]))
        loop.add("good", "a+")
        assert loop.ended() == "good"
    finally:
        loop.close()
    assert all(trials.pid is None for trials in loop.trials)


class GivesUpFirst:
    """Trials whose first compilation is given up behind `gate`."""

    def __init__(self, known):
        self.known, self.at_work, self.gate = known, threading.Event(), threading.Event()

    def get_ready(self): ...
    def close(self): ...

    def compile(self, params, is_wanted):
        first = not self.at_work.is_set()
        self.at_work.set()
        assert self.gate.wait(30)
        if first:
            raise Unwanted("nobody waits for it")
        self.known.compile(params)


def test_who_comes_while_a_compilation_is_given_up_gets_another_one():
    trials = GivesUpFirst(bombs())
    compilations = Compilations(trials.known, lambda: trials)
    params = SamplingParams(structured=StructuredParams(regex="a"))
    assert compilations.hold(EngineRequest("gone", [1], params))
    assert trials.at_work.wait(30)
    compilations.forget(["gone"])
    assert compilations.hold(second := EngineRequest("new", [1], params))
    trials.gate.set()
    while not (ended := compilations.ready()):
        pass
    assert ended[0].waiting == [second] and ended[0].failure is None and not compilations.is_busy
    compilations.close()


@pytest.mark.parametrize(
    "params, is_ordinary",
    [
        (StructuredParams(json_object=True), True),
        (StructuredParams(choice=["yes", "no"]), True),
        (StructuredParams(choice=["a" * 3000]), False),
        (StructuredParams(json={"type": "object", "title": "T", "properties": {"a": {"type": "string"}}}), True),
        (StructuredParams(json={"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"const": 1}, {"enum": [2]}]}}}), True),
        (StructuredParams(json={"anyOf": [{"type": "string"}], "title": "T"}), True),
        (StructuredParams(json={"anyOf": [{"required": ["a"]}], "properties": {"a": {"type": "null"}}}), False),
        (StructuredParams(json={"$ref": "#/$defs/a", "type": "object", "$defs": {"a": {"type": "object"}}}), False),
        (StructuredParams(json={"type": "string", "description": "d" * 3000}), False),
        (StructuredParams(json={"type": "object", "properties": {"a": {"type": "string", "maxLength": 1001}}}), False),
        (StructuredParams(json={"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}}), True),
        (StructuredParams(json={"type": "integer", "minimum": 0, "maximum": 120}), True),
        (StructuredParams(json={"type": "string", "pattern": "a"}), False),
        (StructuredParams(json={"oneOf": [{"type": "string"}, {"type": "null"}]}), False),
        (StructuredParams(json={"type": "string", "format": "date"}), False),
        (StructuredParams(json="{"), False),
        (StructuredParams(regex="a"), False),
        (StructuredParams(grammar='root ::= "a"'), False),
    ],
    ids=str,
)  # fmt: skip
def test_only_what_nothing_multiplies_in_needs_no_child(params, is_ordinary, monkeypatch):
    tried = []
    known = GrammarCompiler(vocabulary, [("llguidance", BACKENDS["llguidance"])])
    trials = GrammarTrials(known)
    monkeypatch.setattr(trials, "_choose", lambda bare, is_wanted: tried.append(1) or known.choose(bare)[:2])
    with contextlib.suppress(BadRequest):
        trials.compile(params, lambda: True)
    assert bool(tried) != is_ordinary


def test_a_grammar_is_kept_as_long_as_its_request_lives_however_many_others_come(monkeypatch):
    monkeypatch.setattr("minivllm.structured.compiler.MAX_GRAMMARS", 1)
    known = bombs()
    kept = StructuredParams(regex="kept")
    known.compile(kept)
    for regex in ("b", "c", "d"):
        known.compile(StructuredParams(regex=regex))
    assert known.has(kept)
    del kept
    gc.collect()
    assert not known.has(StructuredParams(regex="kept")) and not known._used


def test_an_engine_leaves_no_child_behind():
    def children_that_try():
        return {p for p in psutil.Process().children() if "minivllm.structured.trial" in p.cmdline()}

    async def main():
        before = children_that_try()
        llm = AsyncLLM(
            overrides={"model.path": "dummy:tiny", "kv.num_blocks": 100, "executor.num_threads": 1}
            | {"structured.backend": "dfa"}
        )
        try:
            params = SamplingParams(max_tokens=3, structured=StructuredParams(regex="yes|no"))
            async for out in llm.generate("x", params, "r"):
                text = out.outputs[0].text
            return text, children_that_try() - before
        finally:
            await llm.shutdown()

    text, children = asyncio.run(main())
    assert text in ("yes", "no") and children
    psutil.wait_procs(children, timeout=30)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
