"""The `profile` command: measure the machine at hand, so that `simulate`, `plan` and `serve` can take its time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.config import EngineConfig, from_vllm_names
from minivllm.terminal import Parser, add_engine_options, engine_options, fail, interrupts_end_at_once, print_table

if TYPE_CHECKING:
    from minivllm.simulate.profile import Profile

SECONDS = 45.0
OUT = Path("machine.json")
EXAMPLES = """Runs steps of many sizes through the real worker and fits a sum of terms to their times.

  %(prog)s dummy:qwen3-0.6b --out here.json
  python -m minivllm simulate dummy:qwen3-0.6b --gpu here.json --rate 2
"""
TOLD = {
    "all": "all",
    "decodes": "decodes",
    "prompts": "prompts",
    "both": "decodes beside prompts",
    "moves": "blocks moved",
}


def main(argv: Sequence[str], prog: str = "python -m minivllm profile") -> int:
    args = parser(prog).parse_args(argv)
    if not 0 < args.seconds < float("inf"):
        fail(f"--seconds {args.seconds:g}: must be above 0", code=2)
    options = engine_options(args)
    names = {name: value for name, value in options.items() if name not in ("preset", "overrides")}
    config = EngineConfig.build(args.preset, {**from_vllm_names(names), **options["overrides"]})
    from minivllm.simulate.profile import write_profile

    with interrupts_end_at_once():
        from minivllm.engine.build.profile import profile_machine
    profile = profile_machine(config, args.seconds, lambda text: print(text, file=sys.stderr, flush=True))
    write_profile(profile, args.out)
    show(profile, args.out)
    return 0


def parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="Measure this machine with a model, for simulated devices to be like it.")
    add_engine_options(parser, model_argument=True)
    parser.epilog = EXAMPLES
    group = parser.add_argument_group("profile")
    group.add_argument("--out", type=Path, default=OUT, metavar="FILE", help=f"written to; ends in .json ({OUT})")
    group.add_argument(
        "--seconds", type=float, default=SECONDS, metavar="S", help=f"of measuring, the model loaded ({SECONDS:g})"
    )
    return parser


def show(profile: Profile, path: Path) -> None:
    rows = [
        (TOLD[kind], f"{error.num_steps:,}", f"{error.mean:.1%}", f"{error.p90:.1%}")
        for kind, error in profile.errors.items()
    ]
    print(f"{profile.model.name}, {profile.dtype}, on {profile.what}")
    print_table(
        "how far a step is off that the fit had not seen", ("steps", "measured", "mean", "90th percentile"), rows
    )
    step, request = (1e6 * seconds for seconds in profile.host_cost)
    print(f"The host takes {step:.0f} us a step and {request:.1f} us for each request in it, without HTTP and text.")
    print(f"Written to {path}: python -m minivllm simulate {profile.model.name} --gpu {path}")
