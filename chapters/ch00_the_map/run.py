"""Chapter 0: what does an engine do all day? Forty steps of it with three guests, written down and read."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from chapters.ch00_the_map.solution import stories
from chapters.harness import in_time, main, note
from minivllm.config import DEFAULT_MODEL, EngineConfig
from minivllm.engine.build import Engine, build
from minivllm.engine.tokenizer import TextTokenizer
from minivllm.request import EngineRequest, SamplingParams
from minivllm.trace import TraceRecorder, read


class Guest(NamedTuple):
    name: str
    arrives: int  # before this step
    num_new: int  # tokens that it wants
    prompt: str


GUESTS = (
    Guest("ada", 0, 24, "The best thing about the sea is"),
    Guest(
        "ben",
        6,
        22,
        "I have been asked to write a report about the old lighthouse. It was built two hundred years ago, it has four "
        "hundred steps and one lamp, and the keeper lives there with his dog and a great many books. The report begins",
    ),
    Guest("cleo", 14, 26, "Once upon a time there was"),
)
NUM_STEPS = 40
CONFIG = {
    "model.dtype": "float32",  # so that outputs can be compared token by token
    "model.quantization": "none",
    "model.max_model_len": 256,
    "kv.num_blocks": 32,
    "kv.prefix": "none",
}


def serve(engine: Engine, tokenizer: TextTokenizer, guests: tuple[Guest, ...]) -> list[dict[str, Any]]:
    """Run the engine until all have been served; the records of its steps."""
    core, step = engine.core, 0
    with tempfile.TemporaryDirectory() as folder:
        recorder = TraceRecorder(Path(folder) / "trace.jsonl")
        recorder.on_start(engine.config.flat(), engine.info)
        core.observers.append(recorder)
        while step == 0 or not core.is_settled:
            for guest in guests:
                if guest.arrives == step:
                    params = SamplingParams(temperature=0, seed=0, max_tokens=guest.num_new, ignore_eos=True)
                    core.add(EngineRequest(guest.name, tokenizer.encode(guest.prompt), params))
            core.step()
            step += 1
        core.observers.remove(recorder)
        recorder.close()
        records = list(read(Path(folder) / "trace.jsonl").steps())
    first = records[0]["step"]
    return [record | {"step": record["step"] - first} for record in records if record["sched"]]


def lanes(steps: list[dict[str, Any]]) -> dict[str, str]:
    """{request: a letter a step}: P where it computed a prompt, x where it computed one token."""
    found = {guest.name: [" "] * len(steps) for guest in GUESTS}
    for i, step in enumerate(steps):
        for name, now, _ in step["sched"]:
            found[name][i] = "P" if now > 1 else "x"
    return {name: "".join(marks).rstrip() for name, marks in found.items()}


def told_row(step: dict[str, Any]) -> str:
    return "  ".join(f"({name}, {now}, {before})" for name, now, before in step["sched"])


def measure(smoke: bool) -> dict[str, Any]:
    config = EngineConfig.build("v1", {**CONFIG, "executor.num_threads": torch.get_num_threads()})
    engine = build(config)
    tokenizer = TextTokenizer.load(engine.tokenizer_dir)
    note("  each guest alone")
    alone = {guest.name: serve(engine, tokenizer, (guest._replace(arrives=0),)) for guest in GUESTS}
    note("  all three")
    steps = serve(engine, tokenizer, GUESTS)
    engine.core.shutdown()
    told = stories(steps)
    spent = {phase: sum(step["times"][phase] for step in steps) for phase in ("schedule", "execute", "update")}
    return {
        "model": DEFAULT_MODEL,
        "threads": torch.get_num_threads(),
        "steps": [
            {
                "step": step["step"],
                "requests": len(step["sched"]),
                "tokens": sum(now for _, now, _ in step["sched"]),
                "ms": round(sum(step["times"].values()), 2),
            }
            for step in steps
        ],
        "first_steps": [
            {"step": step["step"], "sched": told_row(step)} for step in steps if step["step"] in (0, 1, 6, 7)
        ],
        "lanes": lanes(steps),
        "guests": {
            guest.name: {
                "arrives": guest.arrives,
                "num_prompt": len(tokenizer.encode(guest.prompt)),
                "num_new": guest.num_new,
                "num_computed": told[guest.name].num_computed,
                "first_step": told[guest.name].first_step,
                "prompt": guest.prompt,
                "text": tokenizer.decode(told[guest.name].output),
                "as_alone": told[guest.name].output == stories(alone[guest.name])[guest.name].output,
            }
            for guest in GUESTS
        },
        "num_steps": len(steps),
        "alone": {
            "num_steps": sum(map(len, alone.values())),
            "seconds": round(sum(sum(step["times"].values()) for run in alone.values() for step in run) / 1e3, 2),
        },
        "seconds": round(sum(spent.values()) / 1e3, 2),
        "percent": {phase: round(100 * ms / sum(spent.values()), 2) for phase, ms in spent.items()},
        "phases": {phase: {"ms": round(ms / len(steps), 3)} for phase, ms in spent.items()},
    }


def check(results: dict[str, Any]) -> None:
    """What the text claims, true on any machine."""
    assert results["num_steps"] == NUM_STEPS, "the run is not the one that the text describes"
    for name, guest in results["guests"].items():
        assert guest["as_alone"], f"{name}'s neighbours changed its answer"
        assert guest["num_computed"] == guest["num_prompt"] + guest["num_new"] - 1
        assert guest["first_step"] == guest["arrives"], f"{name} had to wait"
        assert results["lanes"][name].count("P") == 1, f"{name}'s prompt did not run whole"
    assert max(step["requests"] for step in results["steps"]) == len(GUESTS), "they never ran together"
    assert results["alone"]["num_steps"] > NUM_STEPS
    in_time(results["alone"]["seconds"] > results["seconds"], "side by side they took no less time")
    one, three = (min(s["ms"] for s in results["steps"] if s["requests"] == s["tokens"] == n) for n in (1, 3))
    in_time(three < 1.5 * one, "a step for three takes much longer than a step for one")
    in_time(results["percent"]["execute"] > 85, "the engine has other things to do than the forward pass")


def tell(results: dict[str, Any]) -> str:
    tens = "".join(f"{i:<10}" for i in range(0, NUM_STEPS, 10))
    lines = [f"{'step':6}{tens}".rstrip()]
    lines += [f"{name:6}{marks}" for name, marks in results["lanes"].items()]
    lines += ["", "P: a whole prompt went through the model; x: one token did", ""]
    for name, guest in results["guests"].items():
        lines.append(
            f"{name:5} came before step {guest['arrives']}: {guest['num_prompt']} tokens of prompt, {guest['num_new']} "
            f"of answer, {guest['num_computed']} through the model"
        )
    lines += [
        "",
        f"{results['num_steps']} steps in {results['seconds']} s; one guest after the other: "
        f"{results['alone']['num_steps']} steps in {results['alone']['seconds']} s, the same answers",
        "a step, on average:",
    ]
    lines += [
        f"    {phase:9} {found['ms']:8.3f} ms {results['percent'][phase]:6.2f} %"
        for phase, found in results["phases"].items()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main("00", measure, check, tell)
