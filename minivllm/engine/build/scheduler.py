"""The scheduler of a configuration, and what stands around it."""

from __future__ import annotations

from minivllm import features
from minivllm.config import EngineConfig
from minivllm.kv.base import KVManager
from minivllm.lora.scheduling import AdapterLimit
from minivllm.scheduler.admission import Admission
from minivllm.scheduler.base import Limits
from minivllm.scheduler.beam import BeamScheduler
from minivllm.scheduler.fault_isolation import FaultIsolation
from minivllm.scheduler.inject import Injector
from minivllm.scheduler.policy import Policy


def build_admission(config: EngineConfig, limits: Limits) -> Admission:
    options = {"block_size": config.kv.block_size, "max_model_len": limits.max_model_len}
    longest = {"max_model_len": limits.max_model_len}
    by_name = {"peak": options, "reserve_all": longest, "reserve_share": longest}
    wanted = by_name.get(config.scheduler.admission, {})
    admission = features.ADMISSIONS.get(config.scheduler.admission)(**wanted)
    return AdapterLimit(admission, config.lora.max_loras) if config.lora.enabled else admission


def build_policy(config: EngineConfig, limits: Limits, kv: KVManager) -> Policy:
    by_name = {"longest_prefix": {"kv": kv}, "half_full": {"max_num_seqs": limits.max_num_seqs}}
    name = config.scheduler.policy
    return features.POLICIES.get(name)(**by_name.get(name, {}))


def build_scheduler(
    config: EngineConfig, kv: KVManager, limits: Limits, lookahead: int = 0, keeps_kv: bool = True
) -> BeamScheduler:
    """keeps_kv: whether a prompt's chunk finds what earlier ones computed; else no prompt is cut."""
    policy = build_policy(config, limits, kv)
    kind = features.SCHEDULERS.get(config.scheduler.kind)
    admission = build_admission(config, limits)
    num_drafts = 0 if config.spec_decode.method == "none" else config.spec_decode.k
    chunked = config.scheduler.chunked_prefill and keeps_kv
    base = kind(kv, limits, policy, chunked, admission, lookahead, num_drafts)
    inner = policy.around(base)
    if config.debug.preempt_every or config.debug.evict_all:
        inner = Injector(inner, kv, config.debug.preempt_every, config.debug.evict_all)
    return BeamScheduler(FaultIsolation(inner), base)
