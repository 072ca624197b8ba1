"""From the configuration to a proposer and a rule of acceptance: the entries of these two axes."""

from __future__ import annotations

from collections.abc import Callable

from minivllm.sampling.rejection import Rejection
from minivllm.sampling.verify import PickFor
from minivllm.sampling.verify import match as pick_by_match
from minivllm.spec_decode.base import NoProposer, Proposer, Target
from minivllm.spec_decode.lookup import LookupProposer
from minivllm.spec_decode.ngram import NGram
from minivllm.spec_decode.suffix import EarlierOutputs, SuffixLookup

MakeProposer = Callable[[Target], Proposer]
MakeAcceptance = Callable[[Proposer], PickFor]


def none(target: Target) -> Proposer:
    return NoProposer()


def ngram(target: Target) -> Proposer:
    asked = target.config.spec_decode
    return LookupProposer(lambda tokens, _: NGram(tokens, asked.ngram_min, asked.ngram_max), asked.k, target.throttle)


def suffix(target: Target) -> Proposer:
    asked = target.config.spec_decode
    earlier = EarlierOutputs(asked.suffix_tokens)
    return LookupProposer(lambda tokens, num: SuffixLookup(tokens, num, earlier), asked.k, target.throttle)


def match(proposer: Proposer) -> PickFor:
    return pick_by_match


def rejection(proposer: Proposer) -> PickFor:
    return Rejection(proposer.draft_probs)
