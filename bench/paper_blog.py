"""vLLM's first post (June 2023): requests a minute beside Hugging Face's generate and its server TGI, when all is asked
at once.

Of its two machines LLaMA-13B on an A100 with 40 GB is here, by OPT-13B's layers, which are as large, and with the KV
slots that the paper has there. LLaMA-7B's A10G is no device of minivllm/simulate.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from paper_figures import Claim, Figure, Found, Settings, Unsure
from paper_simulated import Panel, hangs_on_the_host, in_groups, simulate_all

from minivllm.simulate.traces import load_trace

BLOG = "vLLM's first post (June 2023)"
SYSTEMS = ("vllm", "tgi", "huggingface")
TRACE = "sharegpt:arrivals=at_once"
NUM_REQUESTS = 600


def throughput(panel: Panel, settings: Settings) -> Found:
    """Prompts a minute, of NUM_REQUESTS that are all there at once."""
    own = {"huggingface": settings}  # the only one that is given batches
    return Found({s: _a_minute(s, panel.width, own.get(s, replace(settings, batch=1))) for s in panel.systems})


@cache
def _a_minute(system: str, width: int, settings: Settings) -> float:
    options = {}
    if system == "huggingface":  # its rows are a prompt's samples too; it keeps what it computed, and no more
        options = {"scheduler.max_num_seqs": settings.batch * width, "kv.allocation": "paged"}
    panel = Panel("", "13b", TRACE, 0.0, (system,), width=width, options=options)
    requests = in_groups(load_trace(TRACE, num_requests=NUM_REQUESTS, seed=settings.seed), width)
    figures = simulate_all(system, panel, requests, settings)
    return 60 * NUM_REQUESTS / float(figures.rows.column("last").max())


_HF = "how many prompts generate() was given at once is not said; here ended rows and padding cost nothing"
_TGI = "of TGI 0.8 only the decisions are here: its kernels and its host are taken to be as fast as vLLM's"
FIGURE = Figure(
    BLOG,
    "Requests a minute, LLaMA-13B, 1 A100",
    {
        "blog-1": Panel("one output for each", "13b", TRACE, 0.0, SYSTEMS),
        "blog-3": Panel("three outputs for each", "13b", TRACE, 0.0, SYSTEMS, width=3),
    },
    throughput,
    [
        Claim("blog-1", "over Hugging Face's generate", "vllm", "huggingface", 14.0, 24.0, _HF),
        Claim("blog-1", "over TGI", "vllm", "tgi", 2.2, 2.5, _TGI),
        Claim("blog-3", "over Hugging Face's generate", "vllm", "huggingface", 8.5, 15.0, _HF),
        Claim("blog-3", "over TGI", "vllm", "tgi", 3.3, 3.5, _TGI),
    ],
    "requests a minute",
    unsure=[
        Unsure("prompts in a batch of generate()", "blog-1 blog-3", {str(n): {"batch": n} for n in (2, 4, 16)}),
        hangs_on_the_host("blog-1"),
    ],
)
