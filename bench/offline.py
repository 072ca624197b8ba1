"""How many output tokens per second, beside transformers' static-batch generate on the same token ids?

Prefill is in the time. Each engine lives in a process of its own, loaded once. A round runs both, one after the other,
in turns who is first, so that a noisy minute of the machine meets both; a ratio is taken within a round. Prompts are
new in every round, so no engine can reuse a prefix. All requests arrive at once and have equal lengths: the best case
for a static batch.

    python -m bench offline --num-reqs 1 8 32 --rounds 5
    python -m bench offline --before ../older    # beside another checkout of this project: has a change cost anything?
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import emit, note, parser, spread

from minivllm.config import DEFAULT_MODEL, parse_set
from minivllm.machine import num_cores

Tokens = list[list[int]]
ROOT = Path(__file__).resolve().parent.parent

# -------------------------------------------------------------------------------------------- in an engine's process


class MiniVLLM:
    def __init__(self, job: dict[str, Any]):
        from minivllm import LLM

        overrides = {"executor.num_threads": job["threads"], **job["overrides"]}
        max_len = job["input_len"] + job["output_len"]
        self.llm = LLM(job["model"], dtype=job["dtype"], max_model_len=max_len, overrides=overrides)

    def generate(self, prompts: Tokens, num_tokens: int) -> Tokens:
        from minivllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class Transformers:
    def __init__(self, job: dict[str, Any]):
        import torch

        from minivllm.loading import resolve
        from minivllm.runner.naive_worker import load_transformers

        torch.set_num_threads(job["threads"])
        self.model = load_transformers(resolve(job["model"]), getattr(torch, job["dtype"]), torch.device("cpu"), 0)
        self.model.generation_config.eos_token_id = None  # ignore_eos

    def generate(self, prompts: Tokens, num_tokens: int) -> Tokens:
        import torch

        ids = torch.tensor(prompts)  # [R, T]
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, pad_token_id=0
            )
        return out[:, ids.shape[1] :].tolist()


ENGINES = {"minivllm": MiniVLLM, "transformers": Transformers}


def serve(name: str) -> None:
    """Answer jobs, one JSON line each, until standard input ends."""
    import psutil

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not be taken for an answer
    engine = ENGINES[name](json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": name}), file=answers)
    for line in sys.stdin:
        job = json.loads(line)
        begin = time.perf_counter()
        tokens = engine.generate(job["prompts"], job["num_tokens"])
        seconds = time.perf_counter() - begin
        rss = psutil.Process().memory_info().rss
        print(json.dumps({"seconds": seconds, "tokens": tokens, "rss": rss}), file=answers)


# -------------------------------------------------------------------------------------------- in the parent


class Peer:
    """An engine in a process of its own, of the checkout in a folder."""

    def __init__(self, name: str, job: dict[str, Any], folder: Path = ROOT):
        env = os.environ | {"OMP_NUM_THREADS": str(job["threads"]), "TOKENIZERS_PARALLELISM": "false"}
        env["PYTHONPATH"] = str(folder)
        command = [sys.executable, str(folder / "bench/offline.py"), "--serve", name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.ask(job)

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine ended with exit code {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)


def compare(peers: dict[str, Peer], num_reqs: int, args: Any, generator: np.random.Generator) -> dict[str, Any]:
    rates: dict[str, list[float]] = {name: [] for name in peers}
    rss, same = {}, []
    for round_ in range(-1, args.rounds):  # round -1 warms up
        prompts = generator.integers(0, args.vocab, (num_reqs, args.input_len)).tolist()
        answers = {}
        for name in sorted(peers, reverse=round_ % 2 > 0):
            job = {"prompts": prompts, "num_tokens": args.output_len if round_ >= 0 else min(4, args.output_len)}
            answers[name] = answer = peers[name].ask(job)
            assert [len(t) for t in answer["tokens"]] == [job["num_tokens"]] * num_reqs, f"{name}: wrong length"
            rss[name] = round(answer["rss"] / 2**20)
            if round_ >= 0:
                rates[name].append(num_reqs * args.output_len / answer["seconds"])
        if round_ >= 0:
            same += map(common_prefix, *(answer["tokens"] for answer in answers.values()))
            note(f"{num_reqs:4} requests, round {round_}: " + ", ".join(f"{n} {r[-1]:.1f}" for n, r in rates.items()))
    ours, theirs = rates.values()
    return {
        "num_reqs": num_reqs,
        "tokens_per_second": {name: spread(values, 1) for name, values in rates.items()},
        "ratio": spread([a / b for a, b in zip(ours, theirs, strict=True)]),
        "rss_mib": rss,
        "equal_tokens": spread(same, 1),  # how many a request before the first difference (a tie, in bf16)
    }


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def main() -> None:
    args = parser(__doc__.splitlines()[0], Path(__file__).stem)
    args.add_argument("--model", default=DEFAULT_MODEL)
    args.add_argument("--dtype", default="bfloat16")
    args.add_argument("--num-reqs", type=int, nargs="+", default=[1, 8, 32])
    args.add_argument("--input-len", type=int, default=128)
    args.add_argument("--output-len", type=int, default=128)
    args.add_argument("--rounds", type=int, default=5)
    args.add_argument("--threads", type=int, default=num_cores())
    args.add_argument("--vocab", type=int, default=49_152, help="prompts are random ids below this")
    args.add_argument("--set", action="append", default=[], metavar="a.b=c", help="an option of minivllm")
    args.add_argument("--before", type=Path, metavar="FOLDER", help="a checkout of this project beside it instead")
    args.add_argument("--serve", choices=list(ENGINES), help="(internal) be one of the engines")
    args = args.parse_args()
    if args.serve:
        return serve(args.serve)
    names = ("model", "dtype", "input_len", "output_len", "threads")
    job = {name: getattr(args, name) for name in names} | {"overrides": parse_set(args.set)}
    other = "transformers" if args.before is None else "before"
    beside = Peer(other, job) if args.before is None else Peer("minivllm", job, args.before.resolve())
    peers = {"minivllm": Peer("minivllm", job), other: beside}
    generator = np.random.default_rng(0)
    results = [compare(peers, num_reqs, args, generator) for num_reqs in args.num_reqs]
    for peer in peers.values():
        peer.close()
    for row in results:
        ratio = row["ratio"]
        note(f"{row['num_reqs']:4} requests: {ratio['median']} x {other} ({ratio['min']} to {ratio['max']})")
    emit("offline", job | {"rounds": args.rounds}, results, args.out)


if __name__ == "__main__":
    main()
