"""The figures of the vLLM paper (Kwon et al., SOSP 2023): what each is made of, and what the paper says of it.

KV slots are those of its table 1, mean lengths those of its figure 11. Where its figures were read is on
docs/papers.md: sentences of its sections 6.2, 6.4 and 6.5 in a reprint, the bars of figure 13 from memory.
"""

from __future__ import annotations

import kv_waste
from paper_figures import Claim, Figure, Found, Settings
from paper_simulated import ORCAS, SYSTEMS, Panel, batches, hangs_on_the_host, rates

PAPER = "vLLM (Kwon et al., SOSP 2023)"


def waste(panel: Panel, settings: Settings) -> Found:
    """Percent of the pool's slots that hold a token while requests wait. No device: steps are counted, not timed."""
    return Found({system: kv_waste.measure(SYSTEMS[system], 300, 16)["tokens"] for system in panel.systems})


FIGURE_2 = Figure(
    PAPER,
    "Figure 2: how much of the KV memory holds tokens",
    {
        "2": Panel(
            "OPT-13B, ShareGPT's mean lengths",
            "13b",
            "sharegpt",
            0.0,
            ORCAS,
            {"vllm": 96.3, "orca-oracle": 38.2, "orca-pow2": 26.8, "orca-max": 20.4},
        )
    },
    waste,
    [
        Claim("2", "percent of slots, vLLM", "vllm", "", 96.3, 96.3),
        Claim("2", "percent of slots, Orca (Oracle)", "orca-oracle", "", 38.2, 38.2),
        Claim("2", "percent of slots, Orca (Pow2)", "orca-pow2", "", 26.8, 26.8),
        Claim("2", "percent of slots, Orca (Max)", "orca-max", "", 20.4, 20.4),
    ],
    "percent of KV slots that hold a token",
)

_STATIC = "which batches FasterTransformer made is not said; here they fill the memory, and ended rows cost nothing"
FIGURE_12 = Figure(
    PAPER,
    "Figure 12: latency over the rate of requests",
    {
        "12a": Panel("OPT-13B, 1 A100, ShareGPT", "13b", "sharegpt", 1.0),
        "12b": Panel("OPT-66B, 4 A100, ShareGPT", "66b", "sharegpt", 0.5),
        "12c": Panel("OPT-175B, 8 A100-80, ShareGPT", "175b", "sharegpt", 1.0),
        "12d": Panel("OPT-13B, 1 A100, Alpaca", "13b", "alpaca", 15.0),
        "12e": Panel("OPT-66B, 4 A100, Alpaca", "66b", "alpaca", 10.0),
        "12f": Panel("OPT-175B, 8 A100-80, Alpaca", "175b", "alpaca", 10.0),
    },
    rates,
    [
        *(Claim(f"12{x}", "rate over Orca (Oracle)", "vllm", "orca-oracle", 1.7, 2.7) for x in "abc"),
        *(Claim(f"12{x}", "rate over Orca (Max)", "vllm", "orca-max", 2.7, 8.0) for x in "abc"),
        Claim("12a 12b 12c", "most over FasterTransformer", "vllm", "fastertransformer", 22.0, 22.0, _STATIC),
        # "Less pronounced" in the paper's words; that this is at most 1.3 is our reading.
        Claim("12f", "no large gap to Orca (Oracle)", "vllm", "orca-oracle", 1.0, 1.3),
        Claim("12f", "no large gap to Orca (Pow2)", "vllm", "orca-pow2", 1.0, 1.3),
    ],
    "requests a second",
    ("requests a second", "normalized latency, s a token"),
)
FIGURE_13 = Figure(
    PAPER,
    "Figure 13: requests in a step, OPT-13B",
    {
        "13a": Panel(
            "ShareGPT, 2 requests a second",
            "13b",
            "sharegpt",
            2.0,
            ORCAS,
            {"vllm": 30.42, "orca-oracle": 13.62, "orca-pow2": 9.81, "orca-max": 7.0},
        ),
        "13b": Panel(
            "Alpaca, 30 requests a second",
            "13b",
            "alpaca",
            30.0,
            ORCAS,
            # From memory, and in no text: two figures hang on them. Of 13a's bars the text has the ratios.
            {"vllm": 132.44, "orca-oracle": 72.75, "orca-pow2": 43.24, "orca-max": 7.0},
        ),
    },
    batches,
    [
        Claim("13a", "requests in a step over Orca (Oracle)", "vllm", "orca-oracle", 2.2, 2.2),
        Claim("13a", "requests in a step over Orca (Max)", "vllm", "orca-max", 4.3, 4.3),
        Claim("13b", "over Orca (Oracle), by the bars", "vllm", "orca-oracle", 1.82, 1.82),
        Claim("13b", "over Orca (Max), by the bars", "vllm", "orca-max", 18.9, 18.9),
    ],
    "requests in a step, in the mean",
    unsure=[hangs_on_the_host("13a")],
)
_SENTENCES = "the model is LLaMA-13B there, and how long its sentences are is a guess; see what the host changes"
FIGURE_16 = Figure(
    PAPER,
    "Figure 16: translation after a common beginning, 1 A100",
    {
        "16a": Panel("one example (80 tokens)", "13b", "translation:prefix=80", 15.0, ("vllm", "orca-oracle")),
        "16b": Panel("five examples (341 tokens)", "13b", "translation:prefix=341", 10.0, ("vllm", "orca-oracle")),
    },
    rates,
    [
        Claim("16a", "rate over Orca (Oracle), one example", "vllm", "orca-oracle", 1.67, 1.67, _SENTENCES),
        Claim("16b", "rate over Orca (Oracle), five examples", "vllm", "orca-oracle", 3.58, 3.58, _SENTENCES),
    ],
    "requests a second",
    ("requests a second", "normalized latency, s a token"),
    unsure=[hangs_on_the_host("16a 16b")],
)
