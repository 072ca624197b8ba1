"""Rotary position embedding (RoFormer, Su et al. 2021) in the half-split form of Hugging Face checkpoints.

cos and sin of every position are computed once, in fp32, and indexed by the positions of a step; all layers share the
gathered rows. A step's rotation is three small operations a layer, for q and k together, because they lie side by side
in the packed product. With x = (a, b) the rotated pair is (a cos - b sin, b cos + a sin) = x (cos, cos) + roll(x)
(-sin, sin): the sign lives in the gathered sine, so that no half is negated or concatenated. At few tokens, where the
number of calls is what costs, that is faster than rotate_half, and than turning the two halves apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from minivllm.models.spec import RopeSpec


class Rotation(NamedTuple):
    """A step's angles, broadcast over heads."""

    cos: Tensor  # [T, 1, head_size]: (cos, cos)
    sin: Tensor  # [T, 1, head_size]: (-sin, sin)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, heads, head_size] -> rotated, like x."""
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.sin)


def rotation(cos: Tensor, sin: Tensor) -> Rotation:
    """cos, sin [T, head_size / 2], of each pair of a head."""
    return Rotation(torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1))


class Angles(NamedTuple):
    """A step's positions, and the tables of all, for a kernel that looks its angles up itself."""

    positions: Tensor  # [T] int64
    cos: Tensor  # [max_position, head_size / 2]
    sin: Tensor  # like cos


class RotaryTables(nn.Module):
    """In a RotaryEmbedding's place: gathers nothing."""

    def __init__(self, rotary: RotaryEmbedding):
        super().__init__()
        self.register_buffer("cos", rotary.cos, persistent=False)
        self.register_buffer("sin", rotary.sin, persistent=False)

    def forward(self, positions: Tensor) -> Angles:
        return Angles(positions, self.cos, self.sin)


class RotaryEmbedding(nn.Module):
    def __init__(self, rope: RopeSpec, head_size: int, max_position: int, dtype: torch.dtype):
        super().__init__()
        frequencies, scale = FREQUENCIES[rope.kind](rope, head_size)  # [head_size / 2]
        angles = torch.arange(max_position, dtype=torch.float32)[:, None] * frequencies  # [max_position, head_size / 2]
        self.register_buffer("cos", (angles.cos() * scale).to(dtype), persistent=False)
        self.register_buffer("sin", (angles.sin() * scale).to(dtype), persistent=False)

    def forward(self, positions: Tensor) -> Rotation:
        """positions [T] int64, each below max_position."""
        return rotation(self.cos[positions], self.sin[positions])


def unturned(x: Tensor) -> Tensor:
    """The rotation of a layer without positions."""
    return x


class PairedRotation(NamedTuple):
    """As Rotation, where an element's partner is where `partners` says. What has none is multiplied by 1 and 0."""

    cos: Tensor  # [T, 1, head_size]
    sin: Tensor  # [T, 1, head_size]: negative for the first of a pair
    partners: Tensor  # [head_size] int64

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, heads, head_size] -> rotated, like x."""
        return torch.addcmul(x * self.cos, x.index_select(-1, self.partners), self.sin)


class PairedRotaryEmbedding(RotaryEmbedding):
    """Of the first `rotary_size` of each head alone (GPT-J, NeoX), or with neighbours as pairs, as the paper has it."""

    def __init__(
        self,
        rope: RopeSpec,
        rotary_size: int,
        head_size: int,
        max_position: int,
        dtype: torch.dtype,
        *,
        interleaved: bool,
    ):
        super().__init__(rope, rotary_size, max_position, dtype)
        self.interleaved, at, half = interleaved, torch.arange(head_size), rotary_size // 2
        of_pair = at ^ 1 if interleaved else torch.where(at < half, at + half, at - half)
        self.register_buffer("partners", torch.where(at < rotary_size, of_pair, at), persistent=False)
        self.rest = head_size - rotary_size

    def forward(self, positions: Tensor) -> PairedRotation:
        """positions [T] int64, each below max_position."""
        cos, sin = self.cos[positions], self.sin[positions]  # [T, rotary_size / 2]
        if self.interleaved:
            cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
        else:
            cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        cos, sin = F.pad(cos, (0, self.rest), value=1.0), F.pad(sin, (0, self.rest))
        return PairedRotation(cos.unsqueeze(1), sin.unsqueeze(1), self.partners)


class MRotaryEmbedding(RotaryEmbedding):
    """Three positions a token (M-RoPE, Qwen2-VL, Wang et al. 2024): its time, height and width in what it shows.
    Each pair of a head turns by one of them, in sections. A text's three are equal, and give the rotation of one."""

    def __init__(self, rope: RopeSpec, head_size: int, max_position: int, dtype: torch.dtype, sections: Sequence[int]):
        """sections: how many pairs turn by time, by height and by width, and so on in turns; head_size / 2 in all."""
        super().__init__(rope, head_size, max_position, dtype)
        assert sum(sections) * 2 == head_size, (sections, head_size)
        rows = torch.tensor([i % 3 for i, num_pairs in enumerate(sections) for _ in range(num_pairs)])
        self.register_buffer("rows", rows, persistent=False)  # [head_size / 2]: by which position each pair turns

    def forward(self, positions: Tensor) -> Rotation:
        """positions [3, T] int64, or [T] where a token's three are equal."""
        if positions.dim() == 1:
            return super().forward(positions)
        at = positions[self.rows].T  # [T, head_size / 2]
        return rotation(self.cos.gather(0, at), self.sin.gather(0, at))


class Frequencies(NamedTuple):
    per_pair: Tensor  # [head_size / 2] fp32, radians a token
    scale: float = 1.0  # of cos and sin (yarn's attention temperature)


def plain(rope: RopeSpec, head_size: int) -> Frequencies:
    return Frequencies(1.0 / rope.theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size))


def linear(rope: RopeSpec, head_size: int) -> Frequencies:
    """Position interpolation (Chen et al. 2023)."""
    return Frequencies(plain(rope, head_size).per_pair / rope.factor)


def llama3(rope: RopeSpec, head_size: int) -> Frequencies:
    """Llama 3.1: slow pairs are interpolated, fast ones kept, those between blended by how often they turn."""
    fast = plain(rope, head_size).per_pair
    turns = rope.original_max_position * fast / (2 * math.pi)  # within the original context
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return Frequencies(keep * fast + (1 - keep) * fast / rope.factor)


def yarn(rope: RopeSpec, head_size: int) -> Frequencies:
    """YaRN (Peng et al. 2023): as llama3, but the blend is linear in the index of the pair, and attention is
    sharpened."""

    def pair_with_turns(turns: float) -> float:  # index of the pair that turns so often within the original context
        return head_size * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    interpolate = ((torch.arange(head_size // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    fast = plain(rope, head_size).per_pair
    return Frequencies((1 - interpolate) * fast + interpolate * fast / rope.factor, rope.attention_factor)


def longrope(rope: RopeSpec, head_size: int) -> Frequencies:
    """LongRoPE (Ding et al. 2024): each pair is slowed down by a factor of its own, and attention is sharpened."""
    factors = torch.tensor(rope.factors, dtype=torch.float32)
    assert len(factors) * 2 == head_size, (len(factors), head_size)
    return Frequencies(plain(rope, head_size).per_pair / factors, rope.attention_factor)


# "dynamic" NTK scaling changes frequencies only past the original context, where ModelSpec.max_position ends: keys in
# the cache were rotated with the old frequencies, so going on would mix two scales.
FREQUENCIES: dict[str, Callable[[RopeSpec, int], Frequencies]] = {
    "default": plain,
    "linear": linear,
    "dynamic": plain,
    "llama3": llama3,
    "yarn": yarn,
    "longrope": longrope,
}
