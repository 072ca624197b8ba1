"""Layer kinds and KV groups: which of a model's layers share block tables, and what each of them must keep.

A layer of full attention reads all tokens of a request, one with a sliding window the last few. Layers of one kind
keep the same tokens, so they can share a block table: they are a group. All groups have as many layers, so that a block
of any of them takes as much memory, and one pool serves all (vLLM V1's hybrid KV cache manager):

    layers         0 full   1 window   2 window   3 full   4 window   5 window
    groups of two  0: layers 0, 3      1: layers 1, 2      2: layers 4, 5
    tensors        A: layers 0, 1, 4   B: layers 3, 2, 5

A block is one place in tensors A and B; the group that holds it says whose K and V are there. All groups count tokens
in blocks of the same size, so `block_size` tokens of a request take one block of each group, and a request's table is
one flat list: [group 0's first block, group 1's first, ..., group 0's second, ...]. With one group that is a plain
block table.

A layer with a recurrent state (linear attention, Mamba) keeps none of its tokens, and one state of fixed size. Its
block is where that stands behind the block's last token, or behind the last token that there is. So it is a layer whose
window is one token and the one before it: a table holds the block that is written and the one that is read, and a
prefix is found where the block that ends it still stands, whatever has become of those before. A state is much larger
than K and V of a few tokens, so blocks have to be long (`block_size_for`).

A layer of cross attention reads an encoder's output: as many positions for every request, all there before its first
token, and the same ones for all requests of one recording. That neither grows nor has a prefix, so nothing is gained by
blocks. Such layers are in no group; what they read is an item's (request.Item), in a slot of as many tokens as it has
(attention/cross.py).

No torch here: the control plane counts with these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Window = int | None  # tokens that a layer reads, the query's own among them; None: all


class LayerKind(NamedTuple):
    """What a layer keeps of a request: full and window K and V of each head, latent one vector a token (MLA), state one
    for all tokens (recurrent), cross K and V of an encoder's output. none is the name alone: nothing is kept, as in an
    encoder."""

    name: Literal["full", "window", "latent", "cross", "state", "none"]
    window: Window = None


class Latent(NamedTuple):
    """What a layer of multi-head latent attention keeps of a token, in the place of K and V (DeepSeek-V2, 2024): one
    vector of `rank` numbers that K and V of every head are made of, and a key of `rope_size` numbers that turns with
    the position, which all heads share."""

    rank: int
    rope_size: int

    @property
    def size(self) -> int:
        return self.rank + self.rope_size


class StateSpec(NamedTuple):
    """The state of a layer of linear attention: of each value head a matrix that maps keys to values, and the last
    inputs of a short convolution, whose channels are q, k and v. All in float32."""

    num_k_heads: int  # of q as well; a value head shares one with its neighbours
    num_v_heads: int
    k_size: int
    v_size: int
    kernel: int  # tokens that the convolution sees, the own among them
    rule: Literal["gated_delta", "ssd"]  # how a token changes it (attention/state.py)

    @property
    def channels(self) -> int:
        """Numbers a token of q, k and v together."""
        return 2 * self.num_k_heads * self.k_size + self.num_v_heads * self.v_size

    @property
    def places(self) -> tuple[slice, slice, slice]:
        """Of q, k and v among the channels, in the order of the checkpoints that have the rule."""
        keys, values = self.num_k_heads * self.k_size, self.num_v_heads * self.v_size
        if self.rule == "ssd":
            return slice(values + keys, None), slice(values, values + keys), slice(values)
        return slice(keys), slice(keys, 2 * keys), slice(2 * keys, None)

    @property
    def weights_shape(self) -> tuple[int, int]:
        """Of what a layer knows of its channels: the convolution's taps, the own token's last; its bias; and how much
        of a channel of v is added to what is answered."""
        return self.kernel + 2, self.channels

    @property
    def num_matrix_floats(self) -> int:
        return self.num_v_heads * self.k_size * self.v_size

    @property
    def num_floats(self) -> int:
        return self.num_matrix_floats + (self.kernel - 1) * self.channels


FULL, LATENT, STATE = LayerKind("full"), LayerKind("latent"), LayerKind("state", window=2)
CROSS = LayerKind("cross")
PAGED = ("full", "window", "latent", "state")  # kinds that blocks are kept of
READ = 16  # keys that a kernel reads together, from a multiple of it on: a masked one must still be the request's own


@dataclass(frozen=True, slots=True)
class KVGroup:
    kind: LayerKind
    layers: tuple[int, ...]  # by their index in the model


@dataclass(frozen=True, slots=True)
class KVGroups:
    groups: tuple[KVGroup, ...]

    @property
    def windows(self) -> tuple[Window, ...]:
        """Of each group."""
        return tuple(group.kind.window for group in self.groups)

    @property
    def has_states(self) -> bool:
        """Some of what is kept stands for all tokens up to one, and for no fewer."""
        return any(group.kind == STATE for group in self.groups)

    @property
    def num_tensors(self) -> int:
        """Layers whose K and V are in one block."""
        return max(len(group.layers) for group in self.groups)

    def places(self) -> dict[int, tuple[int, int]]:
        """{layer: (its group, its tensor)}"""
        return {
            layer: (number, tensor)
            for number, group in enumerate(self.groups)
            for tensor, layer in enumerate(group.layers)
        }

    def most_blocks(self, num_tokens: int, block_size: int, most_new: int) -> int:
        """What a request of so many tokens holds at its worst moment, if no step adds more than most_new tokens."""
        whole, before = -(-num_tokens // block_size), 0 if block_size % READ == 0 else READ - 1
        return sum(
            whole if window is None else min(whole, -(-(before + window - 1 + most_new) // block_size) + 1)
            for window in self.windows
        )

    def capacity(self, num_blocks: int, block_size: int, most_new: int) -> int:
        """The longest request, in tokens, that so many blocks hold."""
        if None in self.windows:  # its table grows for ever: no more whole blocks than fit
            most = num_blocks // self.windows.count(None)
        else:  # what all windows need at most is enough for any length
            most = num_blocks if self.most_blocks(1 << 62, block_size, most_new) > num_blocks else 1 << 40
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.most_blocks(middle * block_size, block_size, most_new) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low * block_size

    def __str__(self) -> str:
        def told(kind: LayerKind) -> str:
            if kind == STATE:
                return "a state"
            return "all tokens" if kind.window is None else f"{kind.window} tokens"

        in_order = sorted(self.groups, key=lambda group: group.kind.window is not None)
        return f"layers in groups: {', '.join(f'{len(group.layers)} of {told(group.kind)}' for group in in_order)}"


ONE_GROUP = KVGroups((KVGroup(FULL, (0,)),))  # what a model of one kind, full attention, looks like from above


def first_kept(num_tokens: int, window: Window, block_size: int) -> int:
    """The first block that is read, or lain in, for token number num_tokens, the next one to be computed."""
    return 0 if window is None else max(0, num_tokens - window + 1) // READ * READ // block_size


def block_size_for(state: StateSpec, bytes_per_token: int, asked: int) -> int:
    """Tokens a block: as many as were asked for or, if a state needs more room, as it takes. bytes_per_token: of K and
    V in one layer."""
    needed = -(-4 * state.num_floats // bytes_per_token)
    return asked if needed <= asked else -(-needed // READ) * READ


def one_group(kinds: Sequence[LayerKind]) -> KVGroups:
    """All layers together: each keeps all tokens, and a window is no more than a mask."""
    return KVGroups((KVGroup(FULL, tuple(i for i, kind in enumerate(kinds) if kind != CROSS)),))


def group_layers(kinds: Sequence[LayerKind]) -> KVGroups:
    """Groups of as many layers as the rarest kind has; or as the commonest one, if that is little more: then a few
    places of a block stay empty, and there are fewer tables (vLLM's rule). Those of states are the last. Layers of
    cross attention are in none."""
    unknown = {kind.name for kind in kinds} - {*PAGED, CROSS.name}
    assert not unknown, f"no pages are laid out for layers of kind {', '.join(sorted(unknown))}"
    members: dict[LayerKind, list[int]] = {}
    for layer, kind in enumerate(kinds):
        if kind != CROSS:
            members.setdefault(kind, []).append(layer)
    fewest, most = (choose(map(len, members.values())) for choose in (min, max))
    size = most if most < 1.25 * fewest else fewest
    return KVGroups(
        tuple(
            KVGroup(kind, tuple(layers[first : first + size]))
            for kind, layers in sorted(members.items(), key=lambda item: (item[0] == STATE, item[0].window is not None))
            for first in range(0, len(layers), size)
        )
    )
