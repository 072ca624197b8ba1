"""Chapter 18: make an idea lose. Fill in `losing_workload`, then run the tests:

python -m minivllm chapter 18 --exercise
"""

from __future__ import annotations

from chapters.crowd import Guest


def losing_workload() -> list[Guest]:
    """Two to eight guests for whom V1's rules are a bad bargain, and for whom they still do what they promise.

    Rules: V0, against V1 with a budget of 32 tokens a step, on an engine on paper (paper.py) whose
    steps take 10 ms, and 1 ms more for each token. The longest wait for a first token must be at
    least a third longer under V1, though the longest gap between two tokens is shorter. And the
    prefix cache must find nothing. A prompt has at most 400 tokens, an answer at most 40.

    Guest(name, prompt, num_new, arrives): arrives is a step; crowd.random_tokens(n, seed) is a prompt.
    """
    raise NotImplementedError("yours to write")
