"""Which figures of papers on serving does this engine give again, on simulated GPUs?

One line of JSON a figure, with a verdict on each of the paper's claims. What a figure is: bench/paper_figures.py and
the modules that it names. What no paper says is stated, as options here; where a verdict hangs on it, the figure is
measured with other values too (--sure: not). With --out a picture is drawn beside the results; --draw draws those of
committed results again.

    python -m bench papers --figure 2 13 --out
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from common import RESULTS, emit, note, parser
from paper_figures import FIGURES, Settings, load, run

WHAT = {
    "limit": "seconds of normalized latency, in the mean",
    "minutes": "of arrivals in each simulation",
    "host_ms": "of the host in each step",
    "host_us": "of the host for each request in a step",
    "host_share": "of V0's host in each step, over the device's time, in the figure of V1's post",
    "load": "times a panel's rate, where the paper gives none",
    "batch": "prompts of Hugging Face's generate at once",
    "long_share": "of a chat's prompts fill the context",
    "copy_us": "to start one copy between host and device",
    "link_share": "of the link's rate that copies reach",
    "prefill_nodes": "of Mooncake's 16",
    "router": "among nodes of vLLM's beside Mooncake",
    "seed": "of lengths and arrivals",
}


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__, "papers")
    options.add_argument("--figure", nargs="+", choices=FIGURES, default=list(FIGURES))
    for option in fields(Settings):
        name = "--" + option.name.replace("_", "-")
        options.add_argument(name, type=type(option.default), default=option.default, help=WHAT[option.name])
    options.add_argument("--sure", action="store_true", help="measure nothing again with other constants")
    options.add_argument("--draw", action="store_true", help="measure nothing: draw what is committed")
    args = options.parse_args(argv)
    if args.draw:
        for record in newest(RESULTS / "papers.jsonl", args.figure):
            draw(record, RESULTS)
        return
    settings = Settings(**{option.name: getattr(args, option.name) for option in fields(Settings)})
    for name in args.figure:
        note(f"figure {name}")
        figure = load(name)
        results = run(replace(figure, unsure=()) if args.sure else figure, settings, note)
        params = {"figure": name, **asdict(settings)}
        emit("papers", params, results, args.out)
        if args.out is not None:
            draw({"params": params, "results": results}, args.out.parent)


def newest(path: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Of each figure's lines the last, in the order of names."""
    records = {record["params"]["figure"]: record for record in map(json.loads, path.read_text().splitlines())}
    return [records[name] for name in names if name in records]


def draw(record: dict[str, Any], folder: Path) -> None:
    from paper_plots import plot, save

    name = record["params"]["figure"]
    path = folder / f"papers-{name}.svg"
    save(plot(record, load(name)), path)
    note(str(path))


if __name__ == "__main__":
    main()
