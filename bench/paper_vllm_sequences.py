"""The vLLM paper's figures on several sequences of a prompt (14, 15) and on chats (17).

Nobody knows without a model when beams leave each other. Of beams only what follows from the paper's own saving is
here: with figure 15's share of blocks saved, vLLM has room for as many more sequences of one prompt.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from paper_figures import Claim, Figure, Found, Settings, Unsure
from paper_simulated import CHATS, ORCAS, Panel, build, hangs_on_the_host, rates, requests_of
from paper_vllm import PAPER
from sharing import PAPER_PERCENT, Counting

PAIR = ("vllm", "orca-oracle")
WIDTHS = (2, 4, 6)
ENDS = {2: 0, 6: 1}  # width -> which of the two figures that the paper's text has


def more_slots(width: int) -> float:
    """What a beam's saving is worth beside that of parallel sampling, which the simulated engine makes itself."""
    parallel, beam = (PAPER_PERCENT["alpaca"][kind][ENDS[width]] / 100 for kind in ("parallel", "beam"))
    return (1 - parallel) / (1 - beam)


def parallel(width: int) -> Panel:
    return Panel(f"{width} samples of each prompt", "13b", "alpaca", 16.0 / width, PAIR, width=width)


def beams(width: int) -> Panel:
    title = f"{width} beams, of figure 15's saving"
    return Panel(title, "13b", "alpaca", 16.0 / width, PAIR, width=width, more_slots=more_slots(width))


def savings(panel: Panel, settings: Settings) -> Found:
    """Percent of blocks that sharing saves, in the mean over steps, by the number of samples."""
    found = {}
    for width in WIDTHS:
        several = replace(panel, width=width)
        cluster = build("vllm", several, settings)
        core = cluster.replicas[0].core
        core.scheduler = counting = Counting(core.scheduler, core.scheduler.base.kv)
        cluster.run(requests_of(several, settings.load * panel.rate / width, settings))
        in_use, without = np.array(counting.counts).T
        found[str(width)] = 100 * float(np.mean(1 - in_use / without))
    return Found(found)


FIGURE_14 = Figure(
    PAPER,
    "Figure 14: several sequences of a prompt, OPT-13B, Alpaca",
    {
        "basic": Panel("one of each prompt", "13b", "alpaca", 16.0, PAIR),
        **{f"14-{width}": parallel(width) for width in WIDTHS},
        **{f"14-beam-{width}": beams(width) for width in ENDS},
    },
    rates,
    [
        Claim("basic", "rate over Orca (Oracle), one sample", "vllm", "orca-oracle", 1.3, 1.3),
        *(Claim(f"14-{n}", f"{n} samples", "vllm", "orca-oracle", 1.3, 2.3) for n in WIDTHS),
        Claim("14-beam-2", "2 beams", "vllm", "orca-oracle", 1.3, 2.3),
        Claim("14-beam-6", "6 beams", "vllm", "orca-oracle", 2.3, 2.3),
    ],
    "requests a second",
    ("requests a second", "normalized latency, s a token"),
    unsure=[Unsure("us of the host for each request in a step", "basic 14-beam-6", {"60": {"host_us": 60.0}})],
)


def saving(name: str) -> Panel:
    low, high = PAPER_PERCENT[name]["parallel"]
    title = {"alpaca": "Alpaca", "sharegpt": "ShareGPT"}[name]
    rate = {"alpaca": 16.0, "sharegpt": 1.5}[name]
    return Panel(title, "13b", name, rate, tuple(map(str, WIDTHS)), {"2": low, "6": high})


FIGURE_15 = Figure(
    PAPER,
    "Figure 15: blocks saved by parallel samples, OPT-13B",
    {"15-alpaca": saving("alpaca"), "15-sharegpt": saving("sharegpt")},
    savings,
    [
        Claim(f"15-{name}", f"percent saved, {width} samples", str(width), "", low, low)
        for name in ("alpaca", "sharegpt")
        for width, low in ((n, PAPER_PERCENT[name]["parallel"][end]) for n, end in ENDS.items())
    ],
    "percent of blocks saved",
    unsure=[Unsure("times the rate", "15-alpaca 15-sharegpt", {"0.5": {"load": 0.5}})],
)

_FILL = 'how many prompts fill the context is "most" in the paper, and how long the others are is not said'
FIGURE_17 = Figure(
    PAPER,
    "Figure 17: chats, OPT-13B",
    {"17": Panel("the last 1,024 tokens in, at most 1,024 out", "13b", CHATS, 0.5, ORCAS)},
    rates,
    [
        Claim("17", "rate over Orca (Oracle)", "vllm", "orca-oracle", 2.0, 2.0, _FILL),
        Claim("17", "rate over Orca (Max)", "vllm", "orca-max", 2.0, 2.0, _FILL),
        Claim("17", "the Orcas coincide: Oracle over Max", "orca-oracle", "orca-max", 1.0, 1.0, _FILL),
        Claim("17", "the Orcas coincide: Pow2 over Max", "orca-pow2", "orca-max", 1.0, 1.0, _FILL),
    ],
    "requests a second",
    ("requests a second", "normalized latency, s a token"),
    unsure=[
        Unsure(
            "share of prompts that fill the context",
            "17",
            {"0.38": {"long_share": 0.38}, "1": {"long_share": 1.0}},
        ),
        hangs_on_the_host("17"),
    ],
)
