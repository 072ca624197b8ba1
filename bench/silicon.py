"""Measured points of real vLLM servers (ai-dynamo/aiconfigurator's silicon samples), each predicted by nothing but
tables of operators (bench/operators.py): this engine's V1 scheduler and KV manager with vLLM's options, devices that
take what the tables say, a virtual clock, and a client that keeps `concurrency` requests under way.

A row of the CSV is model, system, precision, isl, osl, concurrency, tp, attention_dp, moe_tp, moe_ep, backend_version,
and what was measured: mean ttft_ms and tpot_ms. Of data-parallel engine cores one is simulated, with its part of the
clients; the others do as it does.

What a row does not say is as InferenceMAX, which most rows are of, set it up: prompts and answers of 0.8 to 1 times isl
and osl, ten requests a client, all clients beginning at once, no prefix cache. K and V are in fp8 on Blackwell and, for
weights in fp8 with one scale, on the H200: with 16 bits the requests that were measured would not have fitted (Kimi
K2.5 on the B200, Llama 3.1 70B on one H200). Rows of another origin (no attention_dp) had vLLM's defaults.
"""

from __future__ import annotations

import csv
import re
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from common import note, percent
from operators import Kernels, OperatorCost, Split, Tables
from paper_plots import save as save_svg
from vllm_run import CAPTURE_SIZES, CONTEXT_BYTES

from minivllm.config import EngineConfig
from minivllm.engine.build.engine import build_over
from minivllm.engine.build.simulated import SimulatedWorkerBuilder
from minivllm.errors import ConfigError, TraceError, UserError
from minivllm.orphan import end_in_time
from minivllm.request import EngineRequest, SamplingParams
from minivllm.simulate.clock import VirtualClock
from minivllm.simulate.cost import Numbers
from minivllm.simulate.devices import DEVICES, Device
from minivllm.simulate.host import NO_HOST, HostCost
from minivllm.simulate.models import MODELS
from minivllm.simulate.runs import RunWorker
from minivllm.simulate.shape import Shape, read_shape
from minivllm.simulate.timeline import TimelineExecutor
from minivllm.simulate.weights import FP8, MXFP4, WeightBytes
from minivllm.simulate.workload import FIRST_TOKEN

COLUMNS = ("model", "system", "precision", "isl", "osl", "concurrency", "tp", "ttft_ms", "tpot_ms")
SYSTEMS = {"a100_sxm": "a100-80", "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "b300_sxm": "b300"}
TABLES_OF = {"b300_sxm": "b200_sxm"}  # of a system that has none: whose stand for its
BLACKWELL = ("b200_sxm", "b300_sxm", "gb200", "gb300")
TOLD = 50  # predictions between two notes of how many there are
ROUNDS = 10  # requests of each client
SHORTEST = 0.8  # of isl and osl
MAX_TOKENS, MAX_SEQS, MEMORY_SHARE = 8192, 1024, 0.9  # vLLM's defaults for a server on such a GPU
ASYNC_SINCE = (0, 14)  # vLLM's release that plans a step while the one before runs, if not told otherwise
NVFP4 = 4.5 / 8  # bytes: for 16 weights a scale in 8 bits
INT4 = 4.5 / 8  # for 32 weights a scale in 16 bits
BLOCK_FP8 = ("qwen", "deepseek", "minimax", "glm", "kimi")  # published in fp8 with a scale for 128 x 128 weights


@dataclass(frozen=True)
class Point:
    line: int  # of the file
    model: str
    system: str
    precision: str
    isl: int  # tokens
    osl: int
    concurrency: int
    split: Split
    version: str
    is_async: bool  # whether a step is planned while the one before runs
    ttft: float  # ms, mean
    tpot: float

    @property
    def case(self) -> tuple[Any, ...]:
        """What the prediction depends on: rows of several days repeat it."""
        own = self.model, self.system, self.precision, self.isl, self.osl, self.concurrency, self.split
        return *own, self.is_async


@dataclass(frozen=True)
class Predicted:
    ttft: float  # ms, mean
    tpot: float
    by_formulas: tuple[str, ...]  # what no table had


# -------------------------------------------------------------------------------------------------------------- points


def read_points(path: Path) -> list[Point]:
    """Raises TraceError, with the line."""
    try:
        rows = list(csv.DictReader(path.read_text().splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from None
    if missing := [name for name in COLUMNS if not rows or name not in rows[0]]:
        raise TraceError(f"{path}: no rows with {', '.join(missing)}")
    points = []
    for number, row in enumerate(rows, 2):
        try:
            points.append(_point(row, number))
        except ValueError as error:
            raise TraceError(f"{path}:{number}: {error}") from None
    return points


def _point(row: Mapping[str, str], number: int) -> Point:
    count = partial(_count, row)
    ttft, tpot = (float(row[name]) for name in ("ttft_ms", "tpot_ms"))
    if not (0 < ttft < np.inf and 0 < tpot < np.inf):
        raise ValueError(f"ttft_ms={ttft:g}, tpot_ms={tpot:g}: not the times of a server")
    version = row.get("backend_version") or ""
    return Point(
        number,
        row["model"],
        row["system"],
        row["precision"],
        *(count(name) for name in ("isl", "osl", "concurrency")),
        _split(count("tp"), count("attention_dp", 1), count("moe_tp", 1), count("moe_ep", 1)),
        version,
        bool(row.get("attention_dp")) or release(version) >= ASYNC_SINCE,
        ttft,
        tpot,
    )


def _count(row: Mapping[str, str], name: str, default: int | None = None) -> int:
    """0 and nothing at all are `default`, where there is one."""
    if default is not None and row.get(name) in (None, "", "0"):
        return default
    if not re.fullmatch(r"[1-9]\d*", row[name] or ""):
        raise ValueError(f"{name}={row[name]!r} is not a positive integer")
    return int(row[name])


def _split(tp: int, dp: int, moe_tp: int, moe_ep: int) -> Split:
    """dp = tp is a server of tp devices, each of them an engine core: InferenceMAX counts so, and moe_ep is tp, or
    tp * dp where it was multiplied again."""
    if dp == tp > 1 and moe_ep in (tp, tp * dp):
        return Split(1, dp, 1, dp)
    if dp > 1:
        return Split(tp, dp, moe_tp, moe_ep)
    return Split(tp, 1, moe_tp if moe_ep > 1 else tp, moe_ep)


def release(version: str) -> tuple[int, ...]:
    """Of a version that names none: later than all."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else (99,)


# ------------------------------------------------------------------------------------------------------- what is served


def find_name(model: str) -> str:
    """Whose sizes are known (minivllm/simulate/models.py), whatever follows: a precision, a date; but what was
    distilled from a model has others. Raises ConfigError."""
    name = model.rpartition("/")[2].lower()
    for known in sorted(MODELS, key=len, reverse=True):
        if re.match(re.escape(known) + r"(?![\w.])(?!.*distill)", name):
            return known
    raise ConfigError(f"{model}: its sizes are not known here")


def shape_of(name: str) -> Shape:
    return read_shape(MODELS[name], name)


def kernels_of(name: str, precision: str, system: str) -> tuple[Kernels, Numbers]:
    """What the checkpoints that are served in such a precision hold. Raises ConfigError."""
    has_experts = shape_of(name).experts is not None
    match precision:
        case "" | "bf16" | "bfloat16":
            linear, experts, weights = "bfloat16", "bfloat16", WeightBytes(2, 2, "bfloat16", "")
        case "fp8":
            linear = "fp8_block" if name.startswith(BLOCK_FP8) else "fp8"
            experts, weights = linear, WeightBytes(1, 1, FP8, "")
        case "int4":
            linear, experts, weights = "bfloat16", "int4_wo", WeightBytes(2, INT4, "bfloat16", "")
        case "fp4" if name.startswith("gpt-oss"):
            on_blackwell = system in BLACKWELL  # which multiplies what it rounds to fp8
            experts = "w4a8_mxfp4_mxfp8" if on_blackwell else "w4a16_mxfp4"
            linear, weights = "bfloat16", WeightBytes(2, MXFP4, FP8 if on_blackwell else "bfloat16", "")
        case "fp4" if has_experts:  # attention stays as it was
            linear, experts, weights = "bfloat16", "nvfp4", WeightBytes(2, NVFP4, "bfloat16", "")
        case "fp4":
            linear, experts, weights = "nvfp4", "nvfp4", WeightBytes(NVFP4, NVFP4, FP8, "")
        case _:
            raise ConfigError(f"precision={precision}: not modelled")
    cached = "fp8" if system in BLACKWELL or (system, linear) == ("h200_sxm", "fp8") else "bfloat16"
    return Kernels(linear, experts if has_experts else None, cached), Numbers(
        "bfloat16", 2, 1 if cached == "fp8" else 2, 0, weights
    )


def config_of(point: Point, name: str, kv_bytes: int) -> EngineConfig:
    return EngineConfig.build(
        "v1",
        {
            "model.path": name,
            "model.max_model_len": point.isl + point.osl,
            "executor.kind": "simulated",
            "executor.device": SYSTEMS[point.system],
            "kv.prefix": "none",
            "kv.memory": str(kv_bytes),
            "scheduler.max_num_seqs": MAX_SEQS,
            "scheduler.max_num_batched_tokens": MAX_TOKENS,
        },
    )


def kv_bytes_of(cost: OperatorCost, device: Device) -> int:
    """What vLLM gives K and V on each device. Raises ConfigError if nothing is left."""
    left = int(MEMORY_SHARE * device.memory - cost.weight_bytes - cost.forward_bytes(MAX_TOKENS, MAX_SEQS))
    if (left := left - CONTEXT_BYTES) <= 0:
        raise ConfigError(f"{device.what}: no room for KV beside {cost.weight_bytes / 1e9:.0f} GB of weights")
    return left


# ---------------------------------------------------------------------------------------------------------- the client


class FrontEnd:
    """The server's process that takes requests, one after the other: HTTP, a prompt's text becoming tokens, and back.

    vLLM 0.32's, of an empty prompt and more of each token: bench/LOG.md of 2026-11-27."""

    REQUEST, TOKEN = 7.6e-3, 5.5e-6  # seconds

    def __init__(self) -> None:
        self._free_at = 0.0

    def take(self, now: float, num_prompt: int) -> float:
        """-> when the engine core has it."""
        self._free_at = max(now, self._free_at) + self.REQUEST + self.TOKEN * num_prompt
        return self._free_at


@dataclass(slots=True)
class Sent:
    """Seconds of one request, as its client has them."""

    num_output: int
    sent: float
    first: float = 0.0
    last: float = 0.0


class ClosedLoop:
    """Clients that each wait for an answer before they ask again. An Ahead: no run goes on when somebody comes."""

    def __init__(self, lengths: Sequence[tuple[int, int]], clock: VirtualClock, is_async: bool):
        """lengths: prompt and output of each request, in the order in which they are sent. is_async: a step is planned
        when the one before begins, so that who comes while one runs waits for it and for the next."""
        self.sent: dict[str, Sent] = {}
        self._lengths = deque(enumerate(lengths))
        self._clock = clock
        self._is_async = is_async
        self._front = FrontEnd()
        self._coming: deque[tuple[float, EngineRequest]] = deque()
        self._core: Any = None
        self._planned_at = 0.0  # when the next step's plan was made

    def serve(self, core: Any, concurrency: int) -> list[Sent]:
        """Raises ConfigError for a request that fails."""
        for _ in range(concurrency):
            self._send()
        self._core = core
        while self._coming or core.has_work:
            self._admit(core)
            if core.has_work:
                for delta in core.step():
                    self._take(delta)
            else:
                self._clock.wait_until(self._coming[0][0])
        return list(self.sent.values())

    def tokens_waiting(self) -> int:
        waiting = self._core.scheduler.base.waiting
        return waiting[-1].num_tokens if waiting else 0

    def seconds_left(self, step_seconds: float) -> float:
        if not self._coming:
            return np.inf
        return max(0.0, self._coming[0][0] - self._clock() - step_seconds)

    def _send(self) -> None:
        if not self._lengths:
            return
        number, (num_prompt, num_output) = self._lengths.popleft()
        now, req_id = self._clock(), str(number)
        self.sent[req_id] = Sent(num_output, now)
        params = SamplingParams(max_tokens=num_output, ignore_eos=True, temperature=0)
        request = EngineRequest(req_id, [FIRST_TOKEN] * num_prompt, params)
        self._coming.append((self._front.take(now, num_prompt), request))

    def _admit(self, core: Any) -> None:
        now = self._clock()
        until = self._planned_at if self._is_async and core.has_work else now
        while self._coming and self._coming[0][0] <= until:
            core.add(self._coming.popleft()[1])
        self._planned_at = now

    def _take(self, delta: Any) -> None:
        if delta.error is not None:
            raise ConfigError(f"request {delta.req_id}: {delta.error}")
        of, now = self.sent[delta.req_id], self._clock()
        if delta.token_ids:
            of.first, of.last = of.first or now, now
        if delta.finish_reason is not None:
            self._send()


def lengths_of(point: Point) -> list[tuple[int, int]]:
    """Of one engine core's requests."""
    rng = np.random.default_rng(0)
    count = ROUNDS * clients_of(point)
    sizes = [rng.integers(max(1, int(SHORTEST * most)), most, count, endpoint=True) for most in (point.isl, point.osl)]
    return list(zip(*(size.tolist() for size in sizes), strict=True))


def clients_of(point: Point) -> int:
    return max(1, point.concurrency // point.split.dp)


# ---------------------------------------------------------------------------------------------------------- predictions


@cache
def tables_of(folder: Path, system: str) -> Tables:
    return Tables(folder, TABLES_OF.get(system, system))


# Of vLLM's engine core between two steps where none is planned ahead: a step of one request but for the model, and what
# more requests add to its scheduler (vLLM 0.32: bench/LOG.md of 2026-11-27).
VLLM_HOST = HostCost(1.3e-3, 7.5e-6)


def predict(folder: Path, point: Point) -> Predicted:
    """folder: of the tables. Raises UserError for what is not modelled, or does not fit."""
    if point.system not in SYSTEMS:
        raise ConfigError(f"{point.system}: not one of {', '.join(SYSTEMS)}")
    name, device = find_name(point.model), DEVICES[SYSTEMS[point.system]]
    kernels, numbers = kernels_of(name, point.precision, point.system)
    tables, host = tables_of(folder, point.system), NO_HOST if point.is_async else VLLM_HOST
    cost = OperatorCost(tables, kernels, point.split, CAPTURE_SIZES, host, device, shape_of(name), numbers)
    config = config_of(point, name, kv_bytes_of(cost, device))
    clock, stopwatch = VirtualClock(), VirtualClock()
    loop = ClosedLoop(lengths_of(point), clock, point.is_async)
    like = SimulatedWorkerBuilder(config, make_cost=lambda *_: cost).build()
    worker = RunWorker(like, stopwatch, loop)
    core = build_over(TimelineExecutor(worker, stopwatch, clock, NO_HOST), config, clock=clock).core
    sent = loop.serve(core, clients_of(point))
    core.shutdown()
    ttft = statistics.fmean(of.first - of.sent for of in sent)
    tpot = statistics.fmean((of.last - of.first) / max(1, of.num_output - 1) for of in sent)
    return Predicted(1e3 * ttft, 1e3 * tpot, tuple(sorted(cost.by_formulas)))


def try_to(folder: Path, point: Point) -> Predicted | str:
    """Or why not."""
    try:
        return predict(folder, point)
    except UserError as error:
        return str(error)


def predict_all(folder: Path, points: Iterable[Point], processes: int) -> dict[tuple[Any, ...], Predicted | str]:
    """By case, the longest first."""
    cases = {point.case: point for point in points}
    longest = sorted(cases.values(), key=lambda point: -point.concurrency * (point.osl + point.isl / 8))
    found = {}
    with ProcessPoolExecutor(processes, initializer=end_in_time) as pool:
        for point, result in zip(longest, pool.map(partial(try_to, folder), longest), strict=True):
            found[point.case] = result
            if len(found) % TOLD == 0:
                note(f"{len(found)} of {len(longest)} predicted")
    return found


# ------------------------------------------------------------------------------------------------------------- compared


def rows_of(points: Sequence[Point], found: Mapping[tuple[Any, ...], Predicted | str]) -> list[dict[str, Any]]:
    """Of each point that was predicted, the worst first."""
    rows = []
    for point in points:
        if isinstance(predicted := found[point.case], str):
            continue
        row = {name: value for name, value in asdict(point).items() if name not in ("split", "ttft", "tpot")}
        row |= {"split": list(point.split), "by_formulas": list(predicted.by_formulas)}
        for name in ("ttft", "tpot"):
            ours, theirs = getattr(predicted, name), getattr(point, name)
            row |= {f"{name}_ms": theirs, f"{name}_predicted_ms": round(ours, 3)}
            row[f"{name}_error_percent"] = percent(ours, theirs)
        rows.append(row)
    return sorted(rows, key=lambda row: -_worst(row))


def _worst(row: Mapping[str, Any]) -> float:
    return max(abs(row["ttft_error_percent"]), abs(row["tpot_error_percent"]))


def _groups(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """By model and GPU."""
    found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        found[f"{row['model'].rpartition('/')[2]} on {row['system']}"].append(row)
    return found


def headline(rows: Sequence[Mapping[str, Any]], left_out: Sequence[str]) -> dict[str, Any]:
    """ttft, tpot: mean absolute errors in percent; *_bias: mean errors. left_out: why, of each point."""
    by = {name: _errors(of) for name, of in _groups(rows).items()}
    return {
        **_errors(rows),
        "by": dict(sorted(by.items(), key=lambda item: -(item[1]["ttft"] + item[1]["tpot"]))),
        "left_out": dict(Counter(left_out)),
        "by_formulas": dict(Counter(what for row in rows for what in row["by_formulas"])),
    }


def _errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"points": len(rows)}
    for name in ("ttft", "tpot"):
        errors = [row[f"{name}_error_percent"] for row in rows]
        found[name] = round(statistics.fmean(map(abs, errors)), 2) if errors else None
        found[f"{name}_bias"] = round(statistics.fmean(errors), 2) if errors else None
    return found


def run(file: Path, folder: Path, processes: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(headline, rows). Raises TraceError."""
    begin = time.perf_counter()
    points = read_points(file)
    if not any(folder.glob("*_perf.parquet")):
        raise TraceError(f"{folder}: no tables of operators (*_perf.parquet)")
    found = predict_all(folder, points, processes)
    rows = rows_of(points, found)
    left_out = [reason for point in points if isinstance(reason := found[point.case], str)]
    return headline(rows, left_out) | {"seconds": round(time.perf_counter() - begin, 1)}, rows


# ---------------------------------------------------------------------------------------------------------------- drawn

PANELS = {"tpot": "time per output token", "ttft": "time to first token"}
EDGE = 105  # percent: what is beyond is counted at the edge
BAR = 40  # columns, of the worst error
MOST_DRAWN = 40  # points that are written out


def lines(found: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """For people: groups and points, the worst first, as bars."""
    said = [f"{name}: {of['points']} points, TTFT {of['ttft']} %, TPOT {of['tpot']} %" for name, of in _all(found)]
    said += [f"left out, {count}: {reason}" for reason, count in found["left_out"].items()]
    most = max((_worst(row) for row in rows), default=1.0)
    for row in rows[:MOST_DRAWN]:
        of = f"{row['model'].rpartition('/')[2]} {row['system']} {row['precision']} {row['isl']}/{row['osl']}"
        errors = f"TTFT {row['ttft_error_percent']:+6.1f} % TPOT {row['tpot_error_percent']:+6.1f} %"
        bar = "#" * max(1, round(BAR * _worst(row) / most))
        said.append(f"{of[:48]:48} x{row['concurrency']:<5} line {row['line']:<5} {errors}  {bar}")
    if len(rows) > MOST_DRAWN:
        said.append(f"... and {len(rows) - MOST_DRAWN} whose errors are smaller")
    return said


def _all(found: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [*found["by"].items(), ("all", found)]


def save_plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Each point's errors, a line a model and GPU, the worst above. Raises ConfigError for no points."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "minivllm"})
    from matplotlib.figure import Figure

    if not rows:
        raise ConfigError("no point was predicted: there is nothing to draw")
    ordered = sorted(_groups(rows).items(), key=lambda group: statistics.fmean(map(_worst, group[1])))
    figure = Figure(figsize=(8.2, 1.6 + 0.34 * len(ordered)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (name, what) in zip(panels, PANELS.items(), strict=True):
        for place, (_, of) in enumerate(ordered):
            errors = [row[f"{name}_error_percent"] for row in of]
            within = [error for error in errors if error <= EDGE]
            bars = [(error, error, np.nan) for error in within]  # one path, of which a page's SVG stays small
            ends = (place - 0.25, place + 0.25, np.nan) * len(within)
            axes.plot(np.ravel(bars), ends, color="#0072b2", alpha=0.6, linewidth=0.9)
            axes.plot(statistics.median(errors), place, "o", color="#d55e00", markersize=4)
            if beyond := len(errors) - len(within):
                axes.text(EDGE, place, f"{beyond} >", ha="right", va="center", fontsize=8, color="#0072b2")
        axes.axvline(0, color="#8c8c8c", linewidth=0.8)
        axes.set_xlim(-EDGE, EDGE)
        axes.set_xlabel(f"error of mean {what}, %")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(ordered)), [f"{name} ({len(of)})" for name, of in ordered])
    figure.suptitle(
        "Measured servers, each predicted (bars; beyond the edge: how many); dots: medians",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    if path.suffix == ".svg":
        save_svg(figure, path)
    else:
        figure.savefig(path, dpi=120)
