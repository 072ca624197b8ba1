"""Chapter 3: count what a step costs. Fill in `step_cost`, then run the tests:

python -m minivllm chapter 3 --exercise
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minivllm.models.spec import ModelSpec


class Cost(NamedTuple):
    flops: int  # multiplications and additions
    bytes: int  # moved between memory and the processor


def step_cost(
    spec: ModelSpec,
    requests: Sequence[tuple[int, int]],
    weight_bytes: int = 2,
    kv_bytes: int = 2,
) -> Cost:
    """One step over `requests`, each (tokens now, tokens computed before). Sizes: bytes a number.

    FLOPs: two for each weight that a token meets in the layers' matrices; two for each weight of
    the LM head, which only the last token of each request meets; and in attention, for each layer
    and each pair of a query and a key that it sees, 2 * head_size for the score and 2 * head_size
    for the sum, for each query head.
    Bytes: each matrix (the layers' and the LM head's) once; K and V of every token of each request
    once, be they read or, for the tokens of now, written. Norms, the embedding's look-up and the
    vectors between the layers are left out.
    """
    raise NotImplementedError("yours to write")
