"""How long should OpenMP's threads spin, alone and beside busy programs?

Told by output tokens per second, setting by setting. One fresh process a run, since the setting is read while torch is
loaded. Settings take turns within a round; every other round runs them in the other order.

    python -m bench threads --settings default GOMP_SPINCOUNT=2000 OMP_WAIT_POLICY=passive --busy 0 1 --rounds 5
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from common import emit, note, parser, spread

from minivllm.config import DEFAULT_MODEL, parse_set
from minivllm.machine import num_cores

CHILD = """
import json, sys, time
from minivllm import LLM, SamplingParams
job = json.loads(sys.argv[1])
params = SamplingParams(temperature=0.0, max_tokens=job["output_len"], ignore_eos=True)
rates = {}
with LLM(job["model"], overrides=job["overrides"]) as llm:
    for n in job["num_reqs"]:
        prompts = [{"prompt_token_ids": [(7 * i + 3 * j) % 400 + 5 for j in range(16)]} for i in range(n)]
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        rates[n] = n * job["output_len"] / (time.perf_counter() - begin)
print("\\n" + json.dumps(rates))
"""
BUSY = "while True: pass"


def run(setting: str, job: dict) -> dict[str, float]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    if setting == "default":
        setting = "GOMP_SPINCOUNT=300000"  # what GNU OpenMP takes where nothing is set; unset would mean the engine's
    name, _, value = setting.partition("=")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(job)], env=env | {name: value}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    args = parser(__doc__.splitlines()[0], Path(__file__).stem)
    settings = ["default", "GOMP_SPINCOUNT=20000", "GOMP_SPINCOUNT=2000", "OMP_WAIT_POLICY=passive"]
    args.add_argument("--settings", nargs="+", default=settings)
    args.add_argument("--busy", type=int, nargs="+", default=[0, 1], help="other programs that use a core each")
    args.add_argument("--model", default=DEFAULT_MODEL)
    args.add_argument("--num-reqs", type=int, nargs="+", default=[1, 32])
    args.add_argument("--output-len", type=int, default=64)
    args.add_argument("--rounds", type=int, default=5)
    args.add_argument("--set", action="append", default=[], metavar="a.b=c", help="an option of minivllm")
    args = args.parse_args()
    job = {name: getattr(args, name) for name in ("model", "num_reqs", "output_len")} | {
        "overrides": parse_set(args.set)
    }
    rates: dict[tuple[int, str, str], list[float]] = {}
    for round_ in range(args.rounds):
        for busy in args.busy:
            others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(busy)]
            try:
                for setting in args.settings[:: -1 if round_ % 2 else 1]:
                    for num_reqs, rate in run(setting, job).items():
                        rates.setdefault((busy, num_reqs, setting), []).append(rate)
                        note(f"round {round_}, {busy} busy, {num_reqs:>3} requests, {setting}: {rate:.1f} tokens/s")
            finally:
                for other in others:
                    other.kill()
                    other.wait()
    results = [
        {"busy": busy, "num_reqs": int(n), "setting": setting, "tokens_per_second": spread(values, 1)}
        for (busy, n, setting), values in sorted(rates.items())
    ]
    for row in results:
        note(f"{row['busy']} busy, {row['num_reqs']:>3} requests, {row['setting']}: {row['tokens_per_second']}")
    emit("threads", job | {"rounds": args.rounds, "cores": num_cores()}, results, args.out)


if __name__ == "__main__":
    main()
