"""Which part of a model a device holds: its rank, and over how many devices each kind of parallelism spreads the model.

    tp  tensor     each layer's matrices are cut: attention by heads, an MLP by its inner size, the vocabulary by tokens
    pp  pipeline   a stage holds some of the layers, and sends its hidden states on to the next
    cp  context    of a request's tokens each device keeps the K and V of every cp-th (context.py)
    dp  data       each device, or group of the above, has requests of its own
    ep  expert     the experts of a mixture are spread over the devices that compute the same layers, tp * dp of them,
                   instead of being cut; it takes no devices of its own

Ranks are counted as vLLM counts them, tensor parallelism innermost, because it talks most: rank = ((dp_rank * pp +
pp_rank) * cp + cp_rank) * tp + tp_rank. Everything here is arithmetic on data, without torch: a scheduler may ask too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

from minivllm.errors import ConfigError


class Span(NamedTuple):
    """Items start to stop - 1 of `of`: rows, heads, layers, experts."""

    start: int
    stop: int
    of: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def times(self, size: int) -> Span:
        """As many items each: heads as rows."""
        return Span(self.start * size, self.stop * size, self.of * size)


class Mixture(Protocol):
    """What a placement has to know of a model's experts: ExpertsSpec."""

    @property
    def num_experts(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def sparse(self) -> tuple[bool, ...]: ...


class Sizes(Protocol):
    """What it has to know of a model: ModelSpec or EncoderSpec."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Placement:
    rank: int = 0
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    stages: tuple[int, ...] = ()  # layers of each pipeline stage; (): equally many

    def __post_init__(self) -> None:
        for field in fields(self)[1:6]:
            if (size := getattr(self, field.name)) < 1:
                raise ConfigError(f"{field.name}={size}: a model is spread over at least one device")
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} is not one of {self.size}: dp * pp * cp * tp devices")
        if self.ep > 1 and (self.ep % self.dp or self.tp % self._expert_groups):
            raise ConfigError(
                f"ep={self.ep} must be dp={self.dp} times a divisor of tp={self.tp}, so that each expert is held once"
            )
        if self.stages and (len(self.stages) != self.pp or min(self.stages) < 1):
            raise ConfigError(f"stages={self.stages} must name a positive number of layers for each of pp={self.pp}")

    # ------------------------------------------------------------------------------------------------- among the ranks

    @property
    def size(self) -> int:
        """Devices in all."""
        return self.dp * self.pp * self.cp * self.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def cp_rank(self) -> int:
        return self.rank // self.tp % self.cp

    @property
    def pp_rank(self) -> int:
        return self.rank // (self.tp * self.cp) % self.pp

    @property
    def dp_rank(self) -> int:
        return self.rank // (self.tp * self.cp * self.pp)

    def peers(self, axis: str) -> tuple[int, ...]:
        """The ranks that differ from this one along tp, cp, pp or dp alone, this one among them, in their order."""
        strides = {"tp": 1, "cp": self.tp, "pp": self.tp * self.cp, "dp": self.tp * self.cp * self.pp}
        stride, first = strides[axis], self.rank - getattr(self, f"{axis}_rank") * strides[axis]
        return tuple(first + i * stride for i in range(getattr(self, axis)))

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    # --------------------------------------------------------------------------------------------------- of the model

    def check(self, model: Sizes) -> None:
        """Raises ConfigError, one sentence, for a model whose sizes cannot be spread like this."""
        kv_heads, mixture = _kv_heads(model), _mixture(model)
        if self.cp > 1:
            raise ConfigError(f"cp={self.cp}: no attention backend spreads a request's keys over devices yet")
        if model.num_heads % self.tp:
            raise ConfigError(f"tp={self.tp} does not divide the model's {model.num_heads} attention heads")
        if kv_heads % self.tp and self.tp % kv_heads:
            raise ConfigError(f"tp={self.tp} neither divides nor is a multiple of the model's {kv_heads} KV heads")
        if model.intermediate_size % self.tp and not (mixture and all(mixture.sparse)):
            raise ConfigError(f"tp={self.tp} does not divide the MLP's {model.intermediate_size} intermediate numbers")
        if (self.tp - 1) * -(-model.vocab_size // self.tp) >= model.vocab_size:
            raise ConfigError(f"tp={self.tp} leaves a device none of the vocabulary's {model.vocab_size} tokens")
        self._check_layers(model.num_layers)
        if mixture is not None:
            self._check_experts(mixture)
        elif self.ep > 1:
            raise ConfigError(f"ep={self.ep}: the model has no experts to spread")

    def _check_layers(self, num_layers: int) -> None:
        if self.stages and sum(self.stages) != num_layers:
            raise ConfigError(f"stages={self.stages} have {sum(self.stages)} layers, the model has {num_layers}")
        if not self.stages and num_layers % self.pp:
            raise ConfigError(
                f"pp={self.pp} does not divide the model's {num_layers} layers: say how many each stage has (stages)"
            )

    def _check_experts(self, mixture: Mixture) -> None:
        cuts = self._expert_cuts
        if mixture.num_experts % self.ep:
            raise ConfigError(f"ep={self.ep} does not divide the model's {mixture.num_experts} experts")
        if mixture.intermediate_size % cuts:
            size = mixture.intermediate_size
            raise ConfigError(
                f"an expert's {size} intermediate numbers cannot be cut into {cuts}: tp * dp / ep devices"
            )

    def layers(self, num_layers: int) -> Span:
        """Those of this rank's stage."""
        sizes = self.stages or (num_layers // self.pp,) * self.pp
        start = sum(sizes[: self.pp_rank])
        return Span(start, start + sizes[self.pp_rank], num_layers)

    def part(self, count: int) -> Span:
        """This rank's of equal parts: of heads, of an MLP's inner size. tp divides count."""
        size = count // self.tp
        return Span(self.tp_rank * size, (self.tp_rank + 1) * size, count)

    def kv_heads(self, count: int) -> Span:
        """Those that this rank's query heads share. Fewer KV heads than ranks are repeated."""
        if count % self.tp == 0:
            return self.part(count)
        own = self.tp_rank * count // self.tp
        return Span(own, own + 1, count)

    def vocabulary(self, count: int) -> Span:
        """Tokens of this rank. The last rank's part is the shorter one where tp does not divide count."""
        size = -(-count // self.tp)
        return Span(self.tp_rank * size, min((self.tp_rank + 1) * size, count), count)

    # --------------------------------------------------------------------------------------------------- of a mixture

    @property
    def _expert_groups(self) -> int:
        """Into how many the tp ranks of one replica are divided, each with experts of its own."""
        return max(1, self.ep // self.dp)

    @property
    def _expert_cuts(self) -> int:
        """Over how many ranks one expert is cut."""
        return self.tp // self._expert_groups

    def experts(self, count: int) -> Span:
        """Those of which this rank holds all, or a cut."""
        size = count // self.ep
        group = (self.dp_rank if self.ep > 1 else 0) * self._expert_groups + self.tp_rank // self._expert_cuts
        return Span(group * size, (group + 1) * size, count)

    def expert_part(self, count: int) -> Span:
        """What this rank holds of the inner size of each of its experts."""
        size, cut = count // self._expert_cuts, self.tp_rank % self._expert_cuts
        return Span(cut * size, (cut + 1) * size, count)


def _kv_heads(model: Sizes) -> int:
    """An encoder's heads share nothing."""
    return getattr(model, "num_kv_heads", model.num_heads)


def _mixture(model: Sizes) -> Mixture | None:
    return getattr(model, "experts", None)
