"""What a decoder does around its products, as data, for kernels that compute all of it in one call.

A layer is, with RMS norms N and `post` whose weights are given here, each where the layer has it, and a scale r:

    x += r post(o(attention(rope(qk_norm(qkv(N(x)))))));    x += r post(down(act(gate) up)), gate and up of N(x)

Windows, soft caps and scales of scores are the attention layers' (attention/base.py: AttentionSpec).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LayerDescription(NamedTuple):
    """Norms are what x / rms(x) is multiplied by, in float32 whatever the model's dtype is."""

    attention_norm: Tensor | None  # [hidden]
    mlp_norm: Tensor | None  # [hidden]
    attention_post_norm: Tensor | None  # [hidden]: of what attention gives, before it is added to x
    mlp_post_norm: Tensor | None  # [hidden]: likewise
    qk_norm: Tensor | None  # [heads + kv_heads, head_size]
    cos: Tensor | None  # [max_position, r / 2], in the model's dtype: the first r of a head are rotated; None: nothing
    sin: Tensor | None  # like cos


class Description(NamedTuple):
    layers: list[LayerDescription]
    norm: Tensor  # [hidden] float32, the final one
    eps: float  # of all norms
    qk_rounds: bool  # a head's x / rms(x) is rounded to the model's dtype before it is multiplied
    qk_whole: bool  # the root mean square is one of all of a token's q, and one of all of its k, and not of each head
    neighbours: bool  # the two of a pair that is rotated are neighbours, and not of two halves
    activation: str  # silu or gelu_tanh
    residual_scale: float  # of what is added to x, the product rounded
    embedding_scale: float  # of rows of the embedding, the result rounded
