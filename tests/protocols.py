"""Which classes stand for which Protocol, written so that the type checker proves it: `make lint` reads this file.

The engine takes its parts from registries, by name, so no call in it shows a checker that a part fits. Here each class
is assigned to the type of its Protocol. Nothing runs this; tests/test_protocols.py asks that no part is missing.
"""

from minivllm.attention.base import AttentionBackend, CrossBackend, LatentBackend, StateBackend
from minivllm.attention.cpu import CPUAttention
from minivllm.attention.cross import CrossReference, CrossSDPA
from minivllm.attention.flash import FlashBackend
from minivllm.attention.flashinfer import FlashInferBackend
from minivllm.attention.flex import FlexBackend
from minivllm.attention.latent import LatentReference
from minivllm.attention.latent_cpu import LatentCPU
from minivllm.attention.reference import ReferenceAttention
from minivllm.attention.sdpa import SDPAAttention
from minivllm.attention.state import StateChunked, StateReference
from minivllm.attention.state_cpu import StateCPU
from minivllm.attention.triton import TritonAttention
from minivllm.engine.build.cluster import PolicyRouter
from minivllm.engine.client import EngineClient, InprocClient, LinkClient
from minivllm.engine.contents import Tells
from minivllm.engine.core import EngineCore, Observer
from minivllm.engine.link import Link, ThreadLink
from minivllm.engine.process_link import ProcessLink
from minivllm.engine.router import RouterLink
from minivllm.engine.routing import LeastLoaded, Prefix, RoundRobin, RoutingPolicy
from minivllm.engine.step_loop import Reporter
from minivllm.executor.background import BackgroundExecutor
from minivllm.executor.base import Executor
from minivllm.executor.uni import UniExecutor
from minivllm.kv.base import KVManager, PrefixIndex
from minivllm.kv.contiguous import ContiguousKVManager
from minivllm.kv.handover import ReceivingKV, SendingKV
from minivllm.kv.manager import PagedKVManager
from minivllm.kv.none import NoKV
from minivllm.kv.prefix import NoPrefix
from minivllm.kv.prefix_hash import HashPrefix
from minivllm.kv.prefix_radix import RadixPrefix
from minivllm.kv.store import StoredKV, StoredSendingKV
from minivllm.kv.swap import Auto, Recompute, Swap, SwapPolicy
from minivllm.lora.scheduling import AdapterLimit, AdapterUse
from minivllm.lora.slots import AdapterSlots, NoAdapters
from minivllm.runner.forward import EagerForward, ForwardRunner
from minivllm.runner.forward_fused import FusedForward
from minivllm.runner.forward_graphs import FullForward
from minivllm.runner.forward_piecewise import PiecewiseForward
from minivllm.runner.inputs import InputBuilder, RowState
from minivllm.runner.inputs_gather import GatherInputs
from minivllm.runner.inputs_persistent import PersistentInputs
from minivllm.runner.inputs_rebuild import RebuildInputs
from minivllm.runner.naive_worker import OneByOne
from minivllm.runner.prompt_logprobs import PromptLogprobs
from minivllm.sampling.base import LogitsProcessor
from minivllm.sampling.grammar_mask import GrammarMask
from minivllm.sampling.processors import AllowedTokenIds, BadWords, LogitBias, MinTokens, Penalties
from minivllm.sampling.sampler import Sampler
from minivllm.scheduler.admission import Admission, AdmitAll, FullPrompt, PredictedPeak, Watermark
from minivllm.scheduler.beam import BeamScheduler
from minivllm.scheduler.fair import Fair, MakingWay
from minivllm.scheduler.fault_isolation import FaultIsolation
from minivllm.scheduler.gather import Gathering, HalfFull, SaysWhen, ServedRatio
from minivllm.scheduler.inject import Injector
from minivllm.scheduler.longest_prefix import LongestPrefix, Sorting
from minivllm.scheduler.phased import PhasedScheduler
from minivllm.scheduler.policy import FCFS, DecodesFirst, Policy, Priority
from minivllm.scheduler.protocol import Scheduler
from minivllm.scheduler.reserve import ReserveAll, ReservePrompt, ReserveShare
from minivllm.scheduler.static import StaticScheduler
from minivllm.scheduler.unified import UnifiedScheduler
from minivllm.serve.ledger import Ledger, OwnLedger
from minivllm.serve.shared_ledger import SharedLedger
from minivllm.simulate.babble import Babble
from minivllm.simulate.clock import Clock, RealClock, VirtualClock
from minivllm.simulate.cluster import Core, Router
from minivllm.simulate.light_worker import LightWorker
from minivllm.simulate.pipeline import PipelineExecutor
from minivllm.simulate.runs import RunWorker
from minivllm.simulate.timeline import TimedWorker, TimelineExecutor
from minivllm.simulate.worker import Answers, Guesses, SimulatedWorker, Tokens
from minivllm.spec_decode.base import NoProposer, Proposer
from minivllm.spec_decode.draft_model import DraftModelProposer
from minivllm.spec_decode.eagle import EagleProposer
from minivllm.spec_decode.lookup import Lookup, LookupProposer
from minivllm.spec_decode.medusa import MedusaProposer
from minivllm.spec_decode.ngram import NGram
from minivllm.spec_decode.suffix import SuffixLookup
from minivllm.structured.base import CompiledGrammar, Grammar, GrammarBackend
from minivllm.structured.calls import CallsGrammar, CompiledCalls, CompiledEither, Either
from minivllm.structured.dfa import CompiledDFA, DFABackend, DFAGrammar
from minivllm.structured.escape import CompiledEscape, Escape
from minivllm.structured.llguidance_backend import CompiledLLGuidance, LLGuidance, LLGuidanceBackend
from minivllm.structured.prelude import CompiledFree, CompiledPrelude, Free, PreludeGrammar
from minivllm.structured.xgrammar_backend import CompiledXGrammar, XGrammar, XGrammarBackend
from minivllm.trace import TraceRecorder
from minivllm.trace_recent import RecentSteps

schedulers: list[type[Scheduler]] = [UnifiedScheduler, PhasedScheduler, StaticScheduler]
around_schedulers: list[type[Scheduler]] = [BeamScheduler, FaultIsolation, Injector, MakingWay, AdapterUse]
policies_around: list[type[Scheduler]] = [Gathering, Sorting]
policies: list[type[Policy]] = [FCFS, Priority, Fair, DecodesFirst, LongestPrefix, ServedRatio, HalfFull]
gathering: list[type[SaysWhen]] = [ServedRatio, HalfFull]
admissions: list[type[Admission]] = [AdmitAll, Watermark, FullPrompt, PredictedPeak, AdapterLimit]
reserving: list[type[Admission]] = [ReserveAll, ReservePrompt, ReserveShare]
kv_managers: list[type[KVManager]] = [PagedKVManager, ContiguousKVManager, NoKV, StoredKV]
# `num_lent` is a property here: it is counted when it is asked for.
handing_over: list[type[KVManager]] = [SendingKV, ReceivingKV, StoredSendingKV]  # pyright: ignore[reportAssignmentType]
prefix_indexes: list[type[PrefixIndex]] = [NoPrefix, HashPrefix, RadixPrefix]
swap_policies: list[type[SwapPolicy]] = [Recompute, Swap, Auto]

tellers: list[type[Tells]] = [UniExecutor, BackgroundExecutor]
executors: list[type[Executor]] = [UniExecutor, BackgroundExecutor, TimelineExecutor, PipelineExecutor]
observers: list[type[Observer]] = [Reporter, TraceRecorder, RecentSteps]
clients: list[type[EngineClient]] = [InprocClient, LinkClient]
links: list[type[Link]] = [ThreadLink, ProcessLink, RouterLink]
routing_policies: list[type[RoutingPolicy]] = [RoundRobin, LeastLoaded, Prefix]

input_builders: list[type[InputBuilder]] = [GatherInputs]
# Of tokens that stay on a device: late.py's NewestTokens stands before these two, which are given arrays alone.
host_input_builders: list[type[InputBuilder]] = [RebuildInputs, PersistentInputs]  # pyright: ignore[reportAssignmentType]
row_states: list[type[RowState]] = [Sampler, PromptLogprobs, AdapterSlots, NoAdapters, Babble, Answers, Guesses]
forward_runners: list[type[ForwardRunner]] = [EagerForward, FusedForward, PiecewiseForward, OneByOne]
# `decision` is a property here: its inner's.
full_forward: list[type[ForwardRunner]] = [FullForward]  # pyright: ignore[reportAssignmentType]
attention_backends: list[type[AttentionBackend]] = [CPUAttention, SDPAAttention, FlexBackend]
# `graphs` is each object's own: it depends on its device.
reference: list[type[AttentionBackend]] = [ReferenceAttention]  # pyright: ignore[reportAssignmentType]
latent_reference: list[type[LatentBackend]] = [LatentReference]  # pyright: ignore[reportAssignmentType]
latent_backends: list[type[LatentBackend]] = [LatentCPU]
state_backends: list[type[StateBackend]] = [StateReference, StateChunked, StateCPU]
cross_backends: list[type[CrossBackend]] = [CrossReference, CrossSDPA]
gpu_attention_backends: list[type[AttentionBackend]] = [TritonAttention, FlashBackend, FlashInferBackend]
logits_processors: list[type[LogitsProcessor]] = [
    GrammarMask,
    AllowedTokenIds,
    BadWords,
    LogitBias,
    MinTokens,
    Penalties,
]
proposers: list[type[Proposer]] = [NoProposer, LookupProposer, DraftModelProposer, EagleProposer, MedusaProposer]
lookups: list[type[Lookup]] = [NGram, SuffixLookup]

grammar_backends: list[type[GrammarBackend]] = [XGrammarBackend, LLGuidanceBackend, DFABackend]
grammars: list[type[Grammar]] = [DFAGrammar, LLGuidance, XGrammar, CallsGrammar, Either, Escape, Free, PreludeGrammar]
compiled: list[type[CompiledGrammar]] = [CompiledDFA, CompiledLLGuidance, CompiledXGrammar, CompiledCalls]
compiled_around: list[type[CompiledGrammar]] = [CompiledEither, CompiledEscape, CompiledFree, CompiledPrelude]

clocks: list[type[Clock]] = [RealClock, VirtualClock]
tokens: list[type[Tokens]] = [Babble]
ledgers: list[type[Ledger]] = [OwnLedger, SharedLedger]
cores: list[type[Core]] = [EngineCore]
routers: list[type[Router]] = [PolicyRouter]
timed_workers: list[type[TimedWorker]] = [LightWorker, RunWorker, SimulatedWorker]
