"""What a recorded run of vLLM was: its requests and options, read from a folder as LLMServingSim's bench writes it.

    meta.json        the engine's options, as asked for and (in newer ones) as resolved
    config.json      LLMServingSim's description of the machine: memory, links
    requests.jsonl   of each request its lengths, and when it arrived, was queued, got its first and its last token
    timeseries.csv   requests running and waiting, and the share of KV in use, by second

(casys-kaist/LLMServingSim 5daddb2, bench/core/recorder.py.) Of what is missing vLLM 0.19's defaults are taken.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from minivllm.errors import ConfigError, TraceError

GIB = 2**30
CONTEXT_BYTES = int(0.6 * GIB)  # CUDA's context and libraries in a process of vLLM (its "non-torch memory")
CAPTURE_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))  # tokens of its captured forwards, where 512 fit
SAME_CLOCK = 1e5  # seconds: nothing of a run lies further apart


@dataclass(frozen=True, slots=True)
class Served:
    """One request. Seconds, by one clock; None: not measured."""

    num_prompt: int
    num_output: int
    arrival: float
    queued: float | None  # when the engine core took it
    first: float | None
    last: float | None


@dataclass(frozen=True, slots=True)
class Machine:
    name: str  # of the device
    memory: int  # bytes of one
    link_bandwidth: float | None  # bytes a second
    link_latency: float | None  # seconds


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    model: str
    machine: Machine
    dataset: str  # SHA-256 of what was asked; "" if not said
    options: Mapping[str, Any]
    requests: Sequence[Served]
    series: Sequence[Mapping[str, float]]  # t, running, waiting, kv_cache_pct

    def option(self, name: str) -> Any:
        return self.options[name]


# Option -> (where a resolved configuration has it, vLLM 0.19's default). In engine_kwargs it has its own name.
OPTIONS: dict[str, tuple[str, Any]] = {
    "tensor_parallel_size": ("parallel_config", 1),
    "pipeline_parallel_size": ("parallel_config", 1),
    "data_parallel_size": ("parallel_config", 1),
    "enable_expert_parallel": ("parallel_config", False),
    "max_num_seqs": ("scheduler_config", 128),
    "max_num_batched_tokens": ("scheduler_config", 2048),
    "max_model_len": ("model_config", None),
    "block_size": ("cache_config", 16),
    "num_gpu_blocks": ("cache_config", None),
    "gpu_memory_utilization": ("cache_config", 0.9),
    "enable_prefix_caching": ("cache_config", True),
    "kv_cache_dtype": ("cache_config", "auto"),
    "enable_chunked_prefill": ("scheduler_config", True),
    "async_scheduling": ("scheduler_config", True),
    "scheduler_reserve_full_isl": ("scheduler_config", True),
    "policy": ("scheduler_config", "fcfs"),
    "long_prefill_token_threshold": ("scheduler_config", 0),
    "enforce_eager": ("model_config", False),
    "cudagraph_capture_sizes": ("compilation_config", None),
    "speculative_config": ("", None),
    "lora_config": ("", None),
    "kv_transfer_config": ("", None),
}
# What is not simulated, and the only value that it may have.
NOT_SIMULATED = {
    "pipeline_parallel_size": 1,
    "policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "speculative_config": None,
    "lora_config": None,
    "kv_transfer_config": None,
}
# Positive integers.
COUNTS = ("tensor_parallel_size", "data_parallel_size", "max_num_seqs", "max_num_batched_tokens", "block_size")


def read_run(folder: Path) -> Run:
    """Raises TraceError, naming the file and the line."""
    if not folder.is_dir():
        raise TraceError(f"{folder}: no such folder; a run has meta.json, config.json, requests.jsonl, timeseries.csv")
    meta = _object(folder / "meta.json")
    if not isinstance(model := meta.get("model"), str):
        raise TraceError(f"{folder / 'meta.json'}: no field model, a name")
    return Run(
        folder.resolve().name,
        model,
        _machine(folder, meta),
        str(meta.get("dataset_hash") or ""),
        _options(folder / "meta.json", meta),
        _requests(folder / "requests.jsonl"),
        _series(folder / "timeseries.csv"),
    )


def _options(path: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    resolved, asked = (_part(meta, name) for name in ("resolved_config", "engine_kwargs"))
    places = [_part(meta, "kv_cache"), asked]
    options = {}
    for name, (section, default) in OPTIONS.items():
        own = resolved if not section else _part(resolved, section)
        options[name] = next((part[name] for part in (own, *places) if part.get(name) is not None), default)
    if options["kv_cache_dtype"] == "auto" and (kept := _part(resolved, "cache_config").get("cache_dtype")):
        options["kv_cache_dtype"] = kept
    for name in COUNTS:
        if not isinstance(options[name], int) or options[name] < 1:
            raise TraceError(f"{path}: {name} is {options[name]!r}, where a positive integer belongs")
    for name in ("num_gpu_blocks", "max_model_len"):
        if options[name] is not None and (not isinstance(options[name], int) or options[name] < 2):
            raise TraceError(f"{path}: {name} is {options[name]!r}, where an integer of 2 and more belongs")
    if not _is_time(share := options["gpu_memory_utilization"]) or not 0 < share <= 1:
        raise TraceError(f"{path}: gpu_memory_utilization is {share!r}, where a share of 0 to 1 belongs")
    for name, simulated in NOT_SIMULATED.items():
        if options[name] != simulated:
            raise ConfigError(f"{path}: {name}={options[name]} is not simulated yet; runs with {simulated} are")
    return options


def _part(of: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = of.get(name)
    return found if isinstance(found, dict) else {}


def _machine(folder: Path, meta: Mapping[str, Any]) -> Machine:
    path, known = folder / "config.json", _part(meta, "hardware")
    config = _object(path)
    try:
        (instance, *_) = config["nodes"][0]["instances"]
        name = known.get("device_name") or instance["hardware"]
        memory = known.get("device_total_memory_bytes") or instance["npu_mem"]["mem_size"] * GIB
    except (KeyError, IndexError, TypeError, ValueError):
        raise TraceError(
            f"{path}: no device: nodes[0].instances[0] with hardware and npu_mem.mem_size (GiB) names it"
        ) from None
    bandwidth, latency = (_first(config.get(field)) for field in ("link_bw", "link_latency"))
    return Machine(
        str(name),
        int(memory),
        bandwidth * 1e9 if bandwidth else None,
        latency * 1e-9 if latency is not None else None,
    )


def _first(value: Any) -> float | None:
    """link_bw and link_latency are a number, or one for each dimension of the topology, innermost first."""
    value = value[0] if isinstance(value, list) and value else value
    return float(value) if isinstance(value, int | float) and value >= 0 else None


def _object(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}:{error.lineno}: no JSON: {error.msg}") from None
    if not isinstance(found, dict):
        raise TraceError(f"{path}: {type(found).__name__}, where an object belongs")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: no text: {error}") from None


def _requests(path: Path) -> list[Served]:
    lines = [(n, line) for n, line in enumerate(_text(path).splitlines(), 1) if line.strip()]
    if not lines:
        raise TraceError(f"{path}: no request")
    found = [(number, _record(f"{path}:{number}", line)) for number, line in lines]
    offset = _offset([record for _, record in found])
    return [_served(f"{path}:{number}", record, offset) for number, record in found]


def _record(where: str, line: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{where}: no JSON: {error.msg}") from None
    if not isinstance(record, dict):
        raise TraceError(f"{where}: {type(record).__name__}, where an object belongs")
    for name in ("input_toks", "output_toks"):
        if type(record.get(name)) is not int or record[name] < 1:
            raise TraceError(f"{where}: {name} is {record.get(name)!r}, where a positive integer belongs")
    for name in ("arrival_time", "queued_ts", "first_token_ts", "last_token_ts"):
        if (value := record.get(name)) is not None and not _is_time(value):
            raise TraceError(f"{where}: {name} is {value!r}, where seconds belong")
    return record


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _offset(records: Sequence[Mapping[str, Any]]) -> float:
    """What an arrival lacks to the engine's clock. vLLM's arrival_time is since 1970, and what its core says is since
    the machine's start: the request that was queued soonest after it arrived is taken to have been so at once."""
    pairs = [(r.get("arrival_time"), r.get("queued_ts")) for r in records]
    waits = [queued - arrival for arrival, queued in pairs if arrival is not None and queued is not None]
    return min(waits) if waits and abs(min(waits)) > SAME_CLOCK else 0.0


def _served(where: str, record: Mapping[str, Any], offset: float) -> Served:
    arrival, queued = record.get("arrival_time"), record.get("queued_ts")
    if arrival is None and queued is None:
        raise TraceError(f"{where}: neither arrival_time nor queued_ts says when it came")
    first, last = record.get("first_token_ts"), record.get("last_token_ts")
    begin = queued if arrival is None else arrival + offset
    times = [time for time in (queued, first, last) if time is not None]
    if any(later < earlier for earlier, later in pairwise(times)):
        raise TraceError(f"{where}: its times are not in their order: queued, first token, last token")
    return Served(record["input_toks"], record["output_toks"], begin, queued, first, last)


def _series(path: Path) -> list[dict[str, float]]:
    columns = ("t", "running", "waiting", "kv_cache_pct")
    rows = list(csv.reader(_text(path).splitlines()))
    if not rows or set(columns) - set(rows[0]):
        raise TraceError(f"{path}:1: its columns are not {', '.join(columns)}")
    places, found = [rows[0].index(name) for name in columns], []
    for number, row in enumerate(rows[1:], 2):
        try:
            found.append({name: float(row[place]) for name, place in zip(columns, places, strict=True)})
        except (IndexError, ValueError):
            raise TraceError(f"{path}:{number}: {', '.join(row)!r} is no row of numbers") from None
    return found
