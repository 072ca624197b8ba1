"""How much memory does sharing save in parallel sampling and beam search?

Figure 15 of the vLLM paper (Kwon et al. 2023).

    saved = 1 - blocks in use / blocks that the tables name, the mean over the steps

counted between a step's plan and its end, from the KV manager's tables: a block that three tables name is one block and
would be three. (saved_of_sum_percent has the sums over all steps in the fraction instead, so that the last steps, when
few are left, count for less.) Prompts are random ids with the lengths of Alpaca and of ShareGPT, all there at once.

The paper (OPT-13B): 6.1 % to 9.8 % for parallel sampling and 37.6 % to 55.2 % for beam search on Alpaca, 16.2 % to
30.5 % and 44.3 % to 66.3 % on ShareGPT, each for 2 to 6 sequences. What beams share depends on how often they leave
each other, and so on the model and its prompts: random ids are not what people ask.

    python -m bench sharing --shapes alpaca --kinds parallel
    python -m bench sharing --shapes sharegpt --kinds beam --num-prompts 4
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from common import emit, note, parser
from tqdm import tqdm
from workloads import draw

from minivllm import LLM, BeamSearchParams, SamplingParams
from minivllm.config import DEFAULT_MODEL, parse_set
from minivllm.plan import Delta, StepOutput, StepPlan
from minivllm.scheduler.protocol import Scheduler

KINDS = ("parallel", "beam")
PAPER_PERCENT = {  # the lowest and the highest of 2, 4 and 6 sequences
    "alpaca": {"parallel": (6.1, 9.8), "beam": (37.6, 55.2)},
    "sharegpt": {"parallel": (16.2, 30.5), "beam": (44.3, 66.3)},
}


def count(tables: Iterable[Sequence[int]]) -> tuple[int, int]:
    """(blocks in use, blocks that would be without sharing)."""
    tables = list(tables)
    return len({block for blocks in tables for block in blocks}), sum(map(len, tables))


class Counting:
    """A Scheduler around another: counts blocks when a plan is made, and so before the requests that end with it go."""

    def __init__(self, inner: Scheduler, kv: Any):
        self.inner = inner
        self.kv = kv
        self.counts: list[tuple[int, int]] = []  # of each step in which somebody holds blocks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def schedule(self, now: float) -> StepPlan:
        plan = self.inner.schedule(now)
        found = count(table.blocks for table in self.kv.tables.values())
        if found[1]:
            self.counts.append(found)
        return plan

    def update(self, plan: StepPlan, out: StepOutput) -> list[Delta]:
        return self.inner.update(plan, out)


def measure(llm: LLM, kind: str, shape: str, width: int, args: Any) -> dict[str, Any]:
    llm._core.scheduler = counting = Counting(llm._core.scheduler, llm._core.scheduler.base.kv)
    arrivals = draw(shape, args.seed, num_requests=args.num_prompts, scale=args.scale, vocab=args.vocab).arrivals
    prompts = [{"prompt_token_ids": arrival.prompt_token_ids} for arrival in arrivals]
    common = {"ignore_eos": True}
    if kind == "beam":
        params = [BeamSearchParams(beam_width=width, max_tokens=a.max_tokens, **common) for a in arrivals]
    else:
        params = [SamplingParams(n=width, seed=i, max_tokens=a.max_tokens, **common) for i, a in enumerate(arrivals)]
    llm.generate(prompts, params, use_tqdm=False)
    llm._core.scheduler = counting.inner
    in_use, without = np.array(counting.counts).T
    return {
        "kind": kind,
        "shape": shape,
        "width": width,
        "saved_percent": round(100 * float(np.mean(1 - in_use / without)), 1),
        "saved_of_sum_percent": round(100 * float(1 - in_use.sum() / without.sum()), 1),
        "num_steps": len(in_use),
        "most_blocks": int(in_use.max()),
    }


def main() -> None:
    args = parser(__doc__, "sharing")
    args.add_argument("--model", default=DEFAULT_MODEL)
    args.add_argument("--dtype", default="auto")
    args.add_argument("--preset", default="v0", help="v0: forks share blocks; v1: through the prefix cache")
    args.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    args.add_argument("--shapes", nargs="+", default=list(PAPER_PERCENT), choices=PAPER_PERCENT)
    args.add_argument("--widths", type=int, nargs="+", default=[2, 4, 6], help="sequences a prompt")
    args.add_argument("--num-prompts", type=int, default=8)
    args.add_argument("--scale", type=float, default=1.0, help="of all lengths; blocks keep their size")
    args.add_argument("--seed", type=int, default=0)
    args.add_argument("--vocab", type=int, default=49_152, help="prompts are random ids below this")
    args.add_argument("--set", action="append", default=[], metavar="a.b=c", help="an option")
    args = args.parse_args()
    cases = [(kind, shape, width) for kind in args.kinds for shape in args.shapes for width in args.widths]
    longest = max(draw(shape, args.seed, scale=args.scale).max_model_len for shape in args.shapes)
    num_blocks = 1 + args.num_prompts * max(args.widths) * -(-longest // 16)  # nobody is preempted
    overrides = {"kv.num_blocks": num_blocks, "model.max_model_len": longest, "model.dtype": args.dtype}
    overrides["scheduler.max_num_seqs"] = args.num_prompts * max(args.widths)
    rows = []
    with LLM(args.model, preset=args.preset, overrides={**overrides, **parse_set(args.set)}) as llm:
        for kind, shape, width in tqdm(cases, unit="case", dynamic_ncols=True):
            rows.append(row := measure(llm, kind, shape, width, args))
            low, high = PAPER_PERCENT[shape][kind]
            note(f"\n{kind:8} {shape:8} {width}: {row['saved_percent']:5.1f} % saved (paper, 2 to 6: {low} to {high})")
    emit("sharing", vars(args) | {"paper_percent": PAPER_PERCENT}, rows, args.out)


if __name__ == "__main__":
    main()
