"""Rules: what is sampled is given to the device without waiting for it; a processor sees each token once, in order and
for its own request, before it is applied; a row that needs no token waits for none; and what comes behind a request's
end is possible."""

import numpy as np
import pytest
import torch
from grammar_driver import BACKENDS, compiler, vocabulary
from slow_copies import SlowCopies
from torch.utils._python_dispatch import TorchDispatchMode

from minivllm import SamplingParams, StructuredParams
from minivllm.batch import InputBatch
from minivllm.plan import Join, StepPlan
from minivllm.runner.async_sampling import AsyncVerifier, PinnedRing
from minivllm.runner.prompt_logprobs import PromptLogprobs
from minivllm.sampling.grammar_mask import GrammarMask, make_grammar_mask
from minivllm.sampling.processors import DEFAULT_PROCESSORS
from minivllm.sampling.sampler import Sampler
from minivllm.sampling.verify import Verifier

V = 50
PLAIN, FOLLOWING, BIASED = {}, {"presence_penalty": 0.5}, {"logit_bias": {3: 1.0}}


class Seen:
    """A processor that writes down what it is told."""

    keeps_argmax = False
    follows_output = True

    def __init__(self, vocab_size, max_rows):
        self.tokens = []

    def join(self, row, params, token_ids, num_prompt_tokens):
        return params.presence_penalty != 0

    def leave(self, row):
        self.tokens.append((row, "left"))

    def observe(self, row, token):
        self.tokens.append((row, token))

    def apply(self, logits, rows):
        self.tokens.append("applied")
        return logits


class Steps:
    """A sampler of 8 rows, whose steps draw the tokens that they are told to."""

    def __init__(self, num_buffers=3):
        self.stream = SlowCopies(0)
        self.sampler = Sampler(V, 8, processors=(Seen, *DEFAULT_PROCESSORS))
        self.verifier = AsyncVerifier(Verifier(self.sampler), PinnedRing(self.stream, num_buffers))
        self.seen = self.sampler.processors[0].tokens

    def join(self, **rows):
        for name, params in rows.items():
            self.sampler.join(int(name[1:]), Join("", [1], 1, SamplingParams(temperature=0.0, **params)))

    def __call__(self, tokens, drafts=None, **kwargs):
        """tokens: {row: the token it is to draw}"""
        rows, wanted = np.array(list(tokens)), np.array(list(tokens.values()))
        logits = torch.zeros(len(rows), V)
        logits[torch.arange(len(rows)), torch.from_numpy(wanted)] = 50.0
        none = np.full(len(rows), -1)
        return self.verifier(logits, rows, np.full(len(rows), 4), none if drafts is None else np.array(drafts))


def opened(sampled):
    assert isinstance(sampled.tokens, torch.Tensor)
    return sampled.output.result().tokens.tolist()


def test_only_a_row_that_follows_its_output_waits_and_only_for_its_own_tokens():
    steps = Steps()
    steps.join(r0=FOLLOWING, r1=FOLLOWING, r2=PLAIN, r3=BIASED)
    first = steps({0: 10, 2: 11, 3: 9})
    second = steps({2: 12, 3: 13})  # the bias is the same whatever came before
    third = steps({1: 14})  # nothing of it is in flight
    assert steps.stream.num_waits == 0 and steps.seen == ["applied"] * 2
    assert opened(first) == [10, 11, 9] and steps.stream.num_waits == 1
    fourth = steps({1: 15, 2: 16})
    assert steps.stream.num_waits == 3, "for the third, and for what came before it"
    assert [opened(step) for step in (second, third, fourth)] == [[12, 13], [14], [15, 16]]
    assert steps.stream.num_waits == 4


def test_each_token_is_observed_once_in_order_and_before_the_processor_is_applied():
    steps = Steps()
    steps.join(r0=FOLLOWING, r1=FOLLOWING)
    first, second = steps({0: 10, 1: 11}), steps({1: 12})
    assert steps.seen == ["applied", (0, 10), (1, 11), "applied"]
    third = steps({1: 13, 0: 14})
    assert steps.seen[4:] == [(1, 12), "applied"]
    assert [opened(step) for step in (third, first, second)] == [[13, 14], [10, 11], [12]]
    assert third.output.result().tokens.tolist() == [13, 14]
    assert steps.seen[6:] == [(1, 13), (0, 14)]


def test_steps_that_end_in_disorder_are_observed_in_order():
    steps = Steps()
    steps.join(r0=FOLLOWING, r1=FOLLOWING)
    first, second = steps({0: 10}), steps({1: 11})
    assert opened(second) == [11] and steps.seen[2:] == [(0, 10), (1, 11)] and opened(first) == [10]


def test_a_token_of_a_row_that_was_left_is_not_its_next_owner_s():
    steps = Steps()
    steps.join(r0=FOLLOWING, r1=FOLLOWING, r2=FOLLOWING)
    first = steps({0: 10, 1: 11, 2: 12})
    steps.sampler.leave(0)
    steps.sampler.leave(1)
    steps.join(r0=FOLLOWING)
    second = steps({0: 13, 2: 14})
    assert opened(first) == [10, 11, 12] and opened(second) == [13, 14]
    assert steps.seen == ["applied", (0, "left"), (1, "left"), (2, 12), "applied", (0, 13), (2, 14)]


def test_steps_that_nobody_reads_keep_no_buffer_and_no_place():
    """As of steps that fail behind their sampling."""
    steps = Steps(num_buffers=2)
    steps.join(r0=FOLLOWING, r1=PLAIN, r2=PLAIN)
    for token in range(10, 20):
        steps({1: token})
    steps.sampler.leave(1)
    last = [steps({2: 20, 0: 21}), steps({2: 22, 0: 23})]
    assert [opened(step) for step in last] == [[20, 21], [22, 23]]
    assert not steps.verifier._unobserved and not steps.stream._in_flight
    assert [entry for entry in steps.seen if entry != "applied"] == [(0, 21), (0, 23)]


def test_a_step_with_drafts_has_its_tokens_at_once_and_processors_have_seen_all_before():
    steps = Steps()
    steps.join(r0=FOLLOWING, r1=PLAIN)
    first = steps({0: 10, 1: 11})
    rows, wanted = np.array([0, 0, 1]), [12, 13, 14]
    logits = torch.zeros(3, V)
    logits[range(3), wanted] = 50.0
    sampled = steps.verifier(logits, rows, np.array([4, 5, 4]), np.array([12, -1, -1]))
    assert sampled.on_its_way is None and sampled.tokens.tolist() == wanted
    assert [entry for entry in steps.seen if entry != "applied"] == [(0, 10), (0, 12), (0, 13)]
    assert opened(first) == [10, 11]


def test_without_a_distribution_the_row_is_named_and_the_next_step_is_possible():
    steps = Steps()
    steps.join(r0=FOLLOWING, r1=PLAIN)
    logits = torch.zeros(2, V)
    logits[0] = torch.nan
    rows = np.array([0, 1])
    first = steps.verifier(logits, rows, np.full(2, 4), np.full(2, -1))
    second = steps({0: 3, 1: 4})
    (_, (row, token), _) = steps.seen
    assert row == 0 and 0 <= token < V
    assert first.output.result().invalid.tolist() == [0]
    assert opened(second) == [3, 4] and not len(second.output.result().invalid)


# ---------------------------------------------------------------- behind the end of a request


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("last", ["end of sequence", "stop token", "neither"])
def test_a_grammar_that_has_ended_leaves_the_next_step_a_token(backend, last):
    step = GrammarMask(compiler(backend), len(vocabulary()), make_grammar_mask(compiler(), torch.device("cpu")))
    eos, tokens = vocabulary().eos_ids[0], vocabulary().tokens
    letter, other = tokens.index(b"a"), tokens.index(b"z")
    params = SamplingParams(structured=StructuredParams(regex="a{2,3}"), stop_token_ids=[other])
    assert step.join(1, params, [7, letter, letter], 1)
    for token in ({"end of sequence": eos, "stop token": other, "neither": tokens.index(b"q")}[last], letter, eos, eos):
        step.observe(1, token)
        _, masks = step.fill(np.array([1]))
        assert masks.any(), f"no token is left after {token}"


KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.9, "logprobs": 0, "repetition_penalty": 1.2},
    {"temperature": 0.9, "frequency_penalty": 0.3, "presence_penalty": 0.1, "logprobs": 20},
    {"temperature": 0.9, "bad_words_token_ids": ((5,), (7, 8))},
    {"temperature": 0.0, "min_tokens": 2, "eos_token_ids": (1, 2)},
    {"temperature": 0.9, "logit_bias": {5: 1.0, 6: -1.0}, "begin_suppress_tokens": (5, 7)},
    {"temperature": 0.9, "allowed_token_ids": [5, 6, 40, 41]},
    {"temperature": 0.9, "structured": StructuredParams(regex="[a-z]{2,9}"), "min_tokens": 2},
    {"temperature": 0.0, "structured": StructuredParams(choice=["yes", "no"]), "logprobs": 2},
]


def sampler_of(device, kinds):
    processors = (make_grammar_mask(compiler("dfa"), torch.device(device)), *DEFAULT_PROCESSORS)
    sampler = Sampler(len(vocabulary()), 16, device, processors)
    for row, params in enumerate(kinds):
        sampler.join(row, Join("", [1, 2, 3, 7], 3, SamplingParams(seed=row, **params)))
    return sampler


def test_rows_whose_request_has_ended_can_be_sampled_from():
    kinds = [{**kind, "logprobs": 1} for kind in KINDS]
    sampler, rows = sampler_of("cpu", kinds), np.arange(len(KINDS))
    for token in (vocabulary().eos_ids[0], 1, 2, len(vocabulary()) - 1):
        sampler.observe(rows, np.full(len(rows), token))
        sampled = sampler(torch.randn(len(rows), len(vocabulary())), rows, np.full(len(rows), 9))
        assert not len(sampled.invalid)


# ---------------------------------------------------------------- nothing waits


class Faraway(SlowCopies):
    """Of a device whose numbers nobody can look at ("meta": shapes without memory): what arrives is all 5."""

    def taken(self, source):
        assert source.device.type == "meta"
        return torch.full(source.shape, 5).to(source.dtype)


class NoWaiting(TorchDispatchMode):
    """Lets nothing pass that a GPU would have to be waited for: a look at its numbers, a shape that depends on them, a
    copy to it from memory that is not pinned. (A device without numbers refuses the first two by itself.)"""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "_unique2")

    def __init__(self, monkeypatch):
        super().__init__()
        self.num_calls = self.num_uploads = 0
        self._pinned: dict[int, torch.Tensor] = {}  # by their ids, which are nobody else's while they are kept
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: self._pin(tensor))
        make = torch.tensor  # whose copy is not dispatched
        monkeypatch.setattr(torch, "tensor", lambda *args, **kwargs: self._made(make(*args, **kwargs)))

    def _pin(self, tensor):
        pinned = tensor.clone()
        self._pinned[id(pinned)] = pinned
        return pinned

    def _made(self, tensor):
        assert tensor.device.type == "cpu", "a copy that waits"
        return tensor

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name, places = function.overloadpacket.__name__, [a.device.type for a in args if isinstance(a, torch.Tensor)]
        if "meta" in places:
            self.num_calls += 1
            assert name not in self.FORBIDDEN, name
            if name in ("index", "index_put_", "index_put"):
                assert all(i is None or i.dtype == torch.int64 for i in args[1]), "a boolean index is a nonzero"
                assert all(i is None or i.device.type == "meta" for i in args[1]), "an index that is not there yet"
        target = torch.device(kwargs.get("device") or "cpu").type
        if name == "_to_copy" and places == ["cpu"] and target == "meta":
            self.num_uploads += 1
            assert id(args[0]) in self._pinned and kwargs.get("non_blocking"), "a copy that waits"
        assert not (name in ("_to_copy", "copy_") and set(places) == {"cpu", "meta"}), "a copy that waits"
        return function(*args, **kwargs)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.from_numpy(np.zeros(3)).to(x.device),
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: torch.as_tensor(np.zeros(3), device=x.device),
        lambda x: x.masked_select(x > 0),
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: x[torch.zeros(2, dtype=torch.int64)],
        lambda x: x.copy_(torch.zeros(4)),
    ],
)
def test_what_waits_does_not_pass(wait, monkeypatch):
    away = torch.empty(4, device="meta")
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), NoWaiting(monkeypatch):
        wait(away)


def test_no_step_waits_for_the_device_whatever_its_rows_want(monkeypatch):
    sampler = sampler_of("meta", KINDS)
    stream = Faraway(0)
    verifier, rows = AsyncVerifier(Verifier(sampler), PinnedRing(stream, 2)), np.arange(len(KINDS))
    none = np.full(len(rows), -1)
    nothing_waits = NoWaiting(monkeypatch)
    found = []
    for step in range(4):
        with nothing_waits:
            logits = torch.empty(len(rows), sampler.vocab_size, device="meta")
            found.append(verifier(logits, rows, np.full(len(rows), 4 + step), none))
        assert found[-1].tokens.device.type == "meta" and stream.num_waits == step, "only for the step before"
    assert nothing_waits.num_calls > 100 and nothing_waits.num_uploads > 20
    asked = [None if (count := kind.get("logprobs")) is None else 1 + count for kind in KINDS]
    assert [entries and len(entries) for entries in found[-1].output.result().logprobs] == asked


def test_log_probabilities_of_prompts_wait_for_nothing(monkeypatch):
    stream = Faraway(0)
    prompts = PromptLogprobs(lambda hidden: hidden, PinnedRing(stream, 2).send)
    for row, (name, num_top) in enumerate((("a", 2), ("b", 0))):
        prompts.join(row, Join(name, list(range(9)), 9, SamplingParams(prompt_logprobs=num_top)))
    plan = StepPlan(0, {"a": 5, "b": 3, "c": 1}, {"a": 0, "b": 2, "c": 0})
    batch = _batch(["a", "b", "c"], np.array([0, 5, 8, 9]))
    with NoWaiting(monkeypatch):
        output = prompts(plan, batch, torch.empty(9, 50, device="meta"))
    assert stream.num_waits == 0 and stream.num_copies == 1
    found = output.result()
    assert {name: list(map(len, of_each)) for name, of_each in found.items()} == {"a": [3] * 5, "b": [1] * 3}
    assert output.is_ready() and output.result() == found


def _batch(req_ids, query_start):
    batch = InputBatch.__new__(InputBatch)
    batch.req_ids, batch.rows, batch.query_start = req_ids, np.arange(len(req_ids)), query_start
    return batch
