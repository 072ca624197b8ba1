"""Rule: of a safetensors file a layer reads what it holds, and no more."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from minivllm.errors import ModelError
from minivllm.layers.embedding import Embedding
from minivllm.layers.experts import Experts
from minivllm.layers.linear import Linear, Unquantized
from minivllm.layers.stored import Axis, Cut, Shard, TensorSpec, cut
from minivllm.loading import safetensors_io
from minivllm.loading.safetensors_io import stored_tensors
from minivllm.models.checkpoint import Network, WeightMap, load_tensors


class Counted:
    """safe_open, counting the bytes that are asked of it by tensor."""

    def __init__(self):
        self.bytes: dict[str, int] = {}

    def __call__(self, path, framework):
        self.file = safe_open(path, framework)
        return self

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def keys(self):
        return self.file.keys()

    def _count(self, name, tensor):
        self.bytes[name] = self.bytes.get(name, 0) + tensor.nbytes
        return tensor

    def get_tensor(self, name):
        return self._count(name, self.file.get_tensor(name))

    def get_slice(self, name):
        counted, stored = self, self.file.get_slice(name)

        class Slice:
            def get_shape(self):
                return stored.get_shape()

            def __getitem__(self, index):
                return counted._count(name, stored[index])

        return Slice()


@pytest.fixture
def counted(monkeypatch) -> Counted:
    counted = Counted()
    monkeypatch.setattr(safetensors_io, "safe_open", counted)
    return counted


class Block(Network):
    """Half of a model: of q the second half of the outputs, of o the second half of the inputs, half a vocabulary."""

    def __init__(self):
        super().__init__()
        plain = {"dtype": torch.float32, "method": Unquantized()}
        self.qkv = Linear(16, {"q": 8, "k": 4}, bias=True, **plain)
        self.qkv.shards = {"q": Shard("outputs", 8, 16, 16)}
        self.o = Linear(8, {"": 16}, **plain)
        self.o.shards = {"": Shard("inputs", 8, 16, 16)}
        self.embedding = Embedding(10, 16, torch.float32)
        self.embedding.shards = {"": Shard("outputs", 10, 20, 20)}
        self.layers: list[nn.Module] = []
        self.weights = WeightMap(
            {"q": ("qkv", "q"), "k": ("qkv", "k"), "o": ("o", ""), "embed": ("embedding", "")}, layer={}
        )


def test_a_shard_reads_its_slice_of_each_tensor_and_no_more(tmp_path, counted):
    whole = {
        **{"q.weight": torch.randn(16, 16), "q.bias": torch.randn(16), "k.weight": torch.randn(4, 16)},
        **{"k.bias": torch.randn(4), "o.weight": torch.randn(16, 16), "embed.weight": torch.randn(20, 16)},
    }
    save_file(whole, file := tmp_path / "model.safetensors")
    load_tensors(model := Block(), stored_tensors([file]), tmp_path)
    assert torch.equal(model.qkv.weight, torch.cat([whole["q.weight"][8:], whole["k.weight"]]))
    assert torch.equal(model.qkv.bias, torch.cat([whole["q.bias"][8:], whole["k.bias"]]))
    assert torch.equal(model.o.weight, whole["o.weight"][:, 8:])
    assert torch.equal(model.embedding.weight, whole["embed.weight"][10:])
    halves = {"q.weight", "q.bias", "o.weight", "embed.weight"}
    assert counted.bytes == {name: t.nbytes // (2 if name in halves else 1) for name, t in whole.items()}


def test_an_expert_of_a_stack_is_read_by_itself(tmp_path, counted):
    """transformers 5 keeps all experts in one tensor [experts, gate and up, n_in]."""
    save_file({"x.mlp.experts.gate_up_proj": (of_all := torch.randn(4, 12, 8))}, file := tmp_path / "model.safetensors")
    model = Network()
    model.experts, model.layers = Experts(8, 6, 4, torch.float32), []
    places = {f"x.mlp.experts.{e}.{p}_proj": ("experts.gate_up", f"{e}.{p}") for e in range(4) for p in ("gate", "up")}
    model.weights = WeightMap(places, layer={})
    load_tensors(model, stored_tensors([file]), tmp_path)
    assert torch.equal(model.experts.gate_up.weight, of_all)
    assert counted.bytes == {"x.mlp.experts.gate_up_proj": of_all.nbytes}


def test_a_file_of_another_shape_than_the_whole_matrix_is_refused(tmp_path):
    save_file({"q.weight": torch.randn(8, 16)}, file := tmp_path / "model.safetensors")  # what the shard alone has
    with pytest.raises(ModelError, match=r"shape \[8, 16\], config.json asks for \[16, 16\]"):
        load_tensors(Block(), stored_tensors([file]), tmp_path)


@pytest.mark.parametrize(
    ("spec", "shard", "expected"),
    [
        (TensorSpec("packed", (64, 16), inputs=Axis(1, 8)), Shard("inputs", 64, 128, 128), Cut(1, 8, 16)),
        (TensorSpec("packed", (64, 16), inputs=Axis(1, 8)), Shard("outputs", 32, 64, 64), Cut(0, 32, 64)),
        (
            TensorSpec("zeros", (8, 4), outputs=Axis(0, 8), inputs=Axis(1, 32)),
            Shard("outputs", 0, 32, 64),
            Cut(0, 0, 4),
        ),
        (TensorSpec("blocks", (64, 72), inputs=Axis(1, 32, 18)), Shard("inputs", 32, 96, 128), Cut(1, 18, 54)),
        (
            TensorSpec("scale", (2, 2), outputs=Axis(0, 128)),
            Shard("outputs", 128, 200, 200),
            Cut(0, 1, 2),
        ),  # DeepSeek's
        (TensorSpec("order", (128,), outputs=None, inputs=Axis(0)), Shard("outputs", 0, 32, 64), None),
    ],
)
def test_what_a_shard_reads_follows_from_how_a_tensor_lies(spec, shard, expected):
    assert cut(spec, shard) == expected and cut(spec, None) is None


def test_a_cut_through_what_is_packed_together_is_refused():
    with pytest.raises(ModelError, match="inputs 0 to 100 of 200 cannot be read alone: scale keeps 32"):
        cut(TensorSpec("scale", (8, 7), inputs=Axis(1, 32)), Shard("inputs", 0, 100, 200))
