"""Chapter 14: what is left when the maths is fast? What a step asks for, and how long the asking takes.

One thread, so that the asking and the maths are not on two cores. The thin twin is the default model's layers with
hardly any arithmetic in them: what its step takes is the price of the calls.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chapters.ch14_fewer_launches.launches import asked_for, eager_launches
from chapters.ch14_fewer_launches.stage import (
    CPU,
    MOST,
    Forward,
    Stage,
    compiled,
    eager,
    fused,
    in_pieces,
    in_whole,
    thin,
    thin_twin,
)
from chapters.harness import in_time, main, milliseconds, note, with_three_digits
from minivllm.compile.graphs import Exact, RecordedCalls, capture_sizes
from minivllm.config import DEFAULT_MODEL
from minivllm.loading.cache import default_cache_dir
from minivllm.loading.load import load_model
from minivllm.loading.sources import resolve
from minivllm.models.spec import ModelSpec
from minivllm.runner.forward_fused import unavailable

SIZES, SMOKE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), (1, 16, 256)
REQUESTS, SMOKE_REQUESTS = (1, 8, 32), (1,)  # of steps of the model as it is
SECONDS, SMOKE_SECONDS = 0.7, 0.2  # of all ways at one size
STAIRS = 48
FASTER = ("compiled", "fused", "one_call")
LOOK_UP = 1  # of the tokens' embeddings, before all pieces: straight into the place where a capture reads them
INPUTS = 2  # that are put where a capture reads them: what the look-up gives, and positions
LISTS = {
    "every": ("every size", tuple(range(1, MOST + 1))),
    "twos": ("powers of two", tuple(2**i for i in range(10))),
    "ours": ("this engine's", capture_sizes(MOST)),
    "vllm": ("vLLM 0.11.0's", (1, 2, 4, *range(8, MOST + 1, 8))),
}


def weights_of_a_layer(spec: ModelSpec) -> int:
    attention = 2 * spec.hidden_size * spec.head_size * (spec.num_heads + spec.num_kv_heads)
    return attention + 3 * spec.hidden_size * spec.intermediate_size


# ---------------------------------------------------------------------------------------- padding


def padded(num: int, sizes: Sequence[int]) -> int:
    return min(size for size in sizes if size >= num)


def padding(name: str, sizes: Sequence[int]) -> dict[str, Any]:
    """Of steps of 1 to MOST tokens, each as often as the others."""
    wasted = [1 - num / padded(num, sizes) for num in range(1, MOST + 1)]
    return {
        "name": name,
        "captures": len(sizes),
        "worst": round(100 * max(wasted)),
        "few": round(100 * sum(wasted[:16]) / 16),
        "mean": round(100 * sum(wasted) / MOST, 1),
    }


# ---------------------------------------------------------------------------------------- the script


def timed_thin(dense: nn.Module, packed: nn.Module, pieces: Forward, smoke: bool) -> list[dict[str, Any]]:
    stage, one_call = Stage(dense, SIZES[-1]), Stage(packed, SIZES[-1])
    rows = []
    for num in SMOKE_SIZES if smoke else SIZES:
        note(f"  the thin twin, {num} tokens")
        runs = {
            "eager": stage.step(eager(dense), num),
            "compiled": stage.step(pieces, num),
            "fused": stage.step(fused(dense), num),
            "one_call": one_call.step(fused(packed), num),
        }
        rows.append({"tokens": num, **timed(runs, smoke)})
    return rows


def timed(runs: dict[str, Callable[[], Tensor]], smoke: bool) -> dict[str, dict[str, float]]:
    for run in runs.values():
        run()
    return milliseconds(runs, SMOKE_SECONDS if smoke else SECONDS, 3)


def timed_wide(twin: nn.Module, smoke: bool) -> tuple[dict[str, dict[str, float]], list[dict[str, Any]]]:
    """A step of one request, as written, with less and less maths in it; steps with weights of 4 bits, as written and
    in one call."""
    sizes = SMOKE_REQUESTS if smoke else REQUESTS
    models = {}
    for name, quantization in (("32-bit weights", "none"), ("4-bit weights", "int4")):
        note(f"  the model as it is, with {name}")
        weights = {"quantization": quantization, "dtype_asked": False}  # as a CPU computes that has nothing narrower
        models[name] = load_model(DEFAULT_MODEL, torch.float32, CPU, **weights).model
    models["thin twin"] = twin
    feel = timed({name: Stage(model, 1).step(eager(model), 1) for name, model in models.items()}, smoke)
    model, rows = models["4-bit weights"], []
    stage = Stage(model, sizes[-1])
    for num in sizes:
        found = timed({"eager": stage.step(eager(model), num), "one_call": stage.step(fused(model), num)}, smoke)
        saved = found["eager"]["min"] - found["one_call"]["min"]
        rows.append({"requests": num, **found, "saved": round(saved, 2)})
    return feel, rows


def timed_recorded(model: nn.Module, smoke: bool) -> dict[str, dict[str, float]]:
    """What stands in for graphs on a CPU, beside the calls that it does again."""
    stage, whole = Stage(model, 1, "reference"), Stage(model, 1, "reference")
    runs = {
        "called": stage.step(eager(model), 1),
        "piecewise": stage.step(in_pieces(model, 1, RecordedCalls()), 1),
        "full": whole.step(in_whole(whole, 1, RecordedCalls()), 1),
    }
    return timed(runs, smoke)


def differences(dense: nn.Module, packed: nn.Module, pieces: Forward) -> dict[str, float]:
    """The largest difference of a hidden state from the eager one's, at a size that padding would give."""
    stage, one_call, num = Stage(dense, 24), Stage(packed, 24), 24
    whole = Stage(dense, 24, "reference")
    pairs = {
        "compiled": (stage.step(pieces, num), stage.step(eager(dense), num)),
        "fused": (stage.step(fused(dense), num), stage.step(eager(dense), num)),
        "one_call": (one_call.step(fused(packed), num), one_call.step(eager(packed), num)),
        "piecewise": (stage.step(in_pieces(dense, num, RecordedCalls()), num), stage.step(eager(dense), num)),
        "full": (whole.step(in_whole(whole, num, RecordedCalls()), num), whole.step(eager(dense), num)),
    }
    found = {}
    for name, (other, written) in pairs.items():
        other()  # what is recorded here is done again below
        found[name] = round((other() - written()).abs().max().item(), 7)
    return found


def measure(smoke: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    dense, packed = thin_twin("none"), thin_twin("int4")
    if (obstacle := unavailable(dense, CPU)) is not None:
        raise SystemExit(f"this chapter compiles C++: {obstacle}")
    with tempfile.TemporaryDirectory() as empty:
        cache = default_cache_dir() / "compiled" if smoke else Path(empty)
        note("  compiling the pieces, half a minute" + (" if they are not there yet" if smoke else ""))
        begin = time.perf_counter()
        compiled_pieces = compiled(dense, cache, Exact())
        seconds = time.perf_counter() - begin
        asked, pieces = asked_for(dense, packed, cache)
    rows = timed_thin(dense, packed, compiled_pieces, smoke)
    feel, in_4_bits = timed_wide(dense, smoke)
    one, spec = rows[0], resolve(DEFAULT_MODEL).spec
    return {
        "model": DEFAULT_MODEL,
        "num_layers": spec.num_layers,
        "times_less": round(weights_of_a_layer(spec) / weights_of_a_layer(thin(spec))),
        "feel": [{"name": name, **times} for name, times in with_three_digits(feel).items()],
        "share": round(100 * feel["thin twin"]["min"] / feel["4-bit weights"]["min"]),
        "ways": asked,
        "look_up": LOOK_UP,
        "same_at_any_size": asked["eager"]["launches"] == eager_launches(dense, 16),
        "us_a_launch": round(1e3 * one["eager"]["min"] / asked["eager"]["launches"], 1),
        "build": {
            "seconds": round(seconds),
            "pieces": len(pieces.seen),
            "different": len(set(map(id, pieces.seen))),
        },
        "rows": rows,
        "sixteen": next(row for row in rows if row["tokens"] == 16),
        "gains": {way: [round(row["eager"]["min"] / row[way]["min"], 1) for row in (one, rows[-1])] for way in FASTER},
        "thin_saved": round(one["eager"]["min"] - one["one_call"]["min"], 2),
        "wide": in_4_bits,
        "recorded": timed_recorded(dense, smoke),
        "differences": differences(dense, packed, compiled_pieces),
        "lists": {key: padding(name, sizes) for key, (name, sizes) in LISTS.items()},
        "stairs": [
            {
                "tokens": num,
                **{key: padded(num, LISTS[key][1]) for key in ("ours", "twos")},
            }
            for num in range(1, STAIRS + 1)
        ],
    }


def check(results: dict[str, Any]) -> None:
    """What the text claims, true on any machine."""
    asked = {name: found["launches"] for name, found in results["ways"].items()}
    between = results["num_layers"] + 1  # what lies before, between and behind the attentions
    look_up = results.get("look_up", 0)  # in records of the time when it lay in the first piece: none
    assert asked["compiled"] == between + results["num_layers"] + look_up == asked["piecewise"] - INPUTS + look_up
    assert asked["full"] == 1 + INPUTS and asked["one_call"] == 1
    assert asked["eager"] > asked["fused"] > asked["compiled"], "nothing was put together"
    assert results["same_at_any_size"], "a step of more tokens asks for more"
    assert results["build"]["pieces"] == between and results["build"]["different"] == 3, (
        "equal layers are not one piece"
    )
    feel = [bar["min"] for bar in results["feel"]]
    # Where a CPU multiplies 4-bit weights in next to no time, hardly any maths is left to take away from that step.
    in_time(feel[0] > feel[1] and feel[0] > feel[2], f"less maths takes no less time: {feel} ms")
    in_time(feel[2] < 1.25 * feel[1], f"the twin, with hardly any maths, takes longer than the model: {feel} ms")
    in_time(feel[0] < 32 / 4 * feel[1], "the step got faster by as much as its weights got smaller")
    first, sixteen = results["rows"][0], results["sixteen"]
    in_time(sixteen["eager"]["min"] < 3 * first["eager"]["min"], "sixteen tokens take much longer than one")
    in_time(first["one_call"]["min"] < first["compiled"]["min"] < first["eager"]["min"], "fewer launches cost more")
    in_time(results["gains"]["one_call"][0] > results["gains"]["one_call"][1], "launches weigh as much in a large step")
    in_time(results["wide"][0]["saved"] > 0, "one call is no faster on the model itself")
    assert max(results["differences"].values()) < 1e-3, "a way of calling changed the result"
    assert results["differences"]["piecewise"] == results["differences"]["full"] == 0, (
        "a replay is not what was recorded"
    )
    every, ours, twos = (results["lists"][key] for key in ("every", "ours", "twos"))
    assert every["mean"] < ours["mean"] < twos["mean"] and every["captures"] > ours["captures"] > twos["captures"]


NAMES = {
    "eager": "as it is written",
    "fused": "small operations in C++",
    "one_call": "the whole stack in C++",
    "compiled": "compiled pieces",
    "piecewise": "graphs between attentions",
    "full": "one graph",
}


def tell(results: dict[str, Any]) -> str:
    first, last = results["rows"][0], results["rows"][-1]
    lines = [
        f"{results['model']}, {results['num_layers']} layers, one thread, float32; a step of one request, as written:",
        *(f"    {bar['name']:16} {bar['min']:7.2f} ms" for bar in results["feel"]),
        "",
        "                           a step asks for       ms, thin twin",
        f"                            calls      launches {first['tokens']:9} token {last['tokens']:5} tokens",
    ]
    for name, told in NAMES.items():
        way = results["ways"][name]
        ends = "    (on a GPU: not measured)"
        if name in first:
            ends = f"{first[name]['min']:14.2f} {last[name]['min']:12.2f}"
        lines.append(f"{told:26} {way['calls']:6} {way['launches']:13} {ends}")
    build, recorded, ours = results["build"], results["recorded"], results["lists"]["ours"]
    lines += ["", "the model itself, 4-bit weights     as written    in one call"]
    for row in results["wide"]:
        shown = f"{row['requests']} request{'s' if row['requests'] > 1 else ''}"
        lines.append(f"    {shown:29} {row['eager']['min']:8.1f} ms {row['one_call']['min']:11.1f} ms")
    lines += [
        "",
        f"{build['pieces']} pieces, {build['different']} of them different, compiled in {build['seconds']} s",
        f"recorded calls on this CPU, one token: {recorded['called']['min']:.2f} ms called, "
        f"{recorded['piecewise']['min']:.2f} in pieces, {recorded['full']['min']:.2f} whole",
        f"padding to {ours['captures']} sizes up to {MOST}: {ours['worst']} % of a step's rows at worst, "
        f"{ours['mean']} % in the mean",
    ]
    worst = max(results["differences"].values())
    lines += ["", f"all ways give the same hidden states (largest difference {worst:.0e})"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main("14", measure, check, tell)
