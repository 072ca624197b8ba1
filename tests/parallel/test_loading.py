"""Rules: a rank reads its part of a checkpoint and no more, whatever form the weights are kept in; adapters are cut
with their layers; one device has the very layers that it has without a placement."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from loading.gguf_fixture import WIDE, write_gguf
from lora.adapters import write_adapter
from models.pairs import FP32_TOLERANCE, SMALL, error_of, random_tokens, save_oracle
from models.test_bert import our_hidden, random_ids
from parallel.devices import CPU, NUM_PROMPT, Device, run, together
from parallel.threads import all_ranks, on_all
from pooling.tiny import hidden_of, write_bert
from quantization.test_compressed_tensors import write_checkpoint
from safetensors.torch import load_file, save_file
from tolerances import HIDDEN, rounded_inputs
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3MoeConfig

from minivllm.errors import ConfigError, ModelError
from minivllm.kernels.cpu import blocks, build
from minivllm.layers import embedding, experts, linear, norm, sharded
from minivllm.loading import load, load_model, resolve
from minivllm.loading.safetensors_io import StoredTensor
from minivllm.lora.slots import AdapterSlots
from minivllm.models.bert import BertModel
from minivllm.models.llama import LlamaModel
from minivllm.parallel.group import ONE_DEVICE, Ranks
from minivllm.parallel.placement import Placement
from minivllm.quantization.packed import PackedMethod
from minivllm.runner.forward_fused import unavailable

QWEN3 = Qwen3Config(**SMALL, head_dim=32, tie_word_embeddings=True)
MIXTURE = Qwen3MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, head_dim=32)
TEXT = random_tokens(length=NUM_PROMPT + 3)


def loaded(path: Any, ranks: Ranks, **how: Any) -> nn.Module:
    return load_model(str(path), torch.float32, CPU, ranks=ranks, **how).model


# ---------------------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("original", [True, False], ids=["an expert a tensor", "all experts in one"])
@pytest.mark.parametrize(
    "config, placement, whole",
    [
        (MIXTURE, Placement(tp=2), {"norm", "mlp.gate.weight"}),
        (MIXTURE, Placement(tp=2, ep=2), {"norm", "mlp.gate.weight"}),
        (MIXTURE, Placement(pp=3), set()),
        (QWEN3, Placement(tp=2), {"norm"}),
    ],
    ids=["mixture, tp", "mixture, ep", "mixture, pp", "dense, tp"],
)
def test_a_rank_reads_its_part_and_no_more(config, placement, whole, original, tmp_path, monkeypatch):
    """Every number of the file is read by one rank, but for what all need (norms, a router), and by nobody twice."""
    save_oracle(config, tmp_path, save_original_format=original)
    counts, read = {}, StoredTensor.read

    def counted(tensor: StoredTensor) -> Tensor:
        found = read(tensor)
        counts[tensor._name] = counts.get(tensor._name, 0) + found.numel()
        return found

    monkeypatch.setattr(StoredTensor, "read", counted)
    for ranks in all_ranks(placement):
        loaded(tmp_path, ranks)
    file = load_file(tmp_path / "model.safetensors")
    for name, tensor in file.items():
        times = placement.tp if any(part in name for part in whole) else 1
        assert counts[name] == times * tensor.numel(), name


def test_a_tied_matrix_is_read_by_a_pipelines_first_stage_and_its_last(tmp_path):
    save_oracle(QWEN3, tmp_path)
    file = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    models = [load_unfinished(tmp_path, ranks) for ranks in all_ranks(Placement(pp=3))]
    assert torch.equal(models[0]["model.embed_tokens.weight"], file)
    assert torch.equal(models[2]["model.embed_tokens.weight"], file) and "lm_head.weight" not in models[2]
    assert "model.embed_tokens.weight" not in models[1]
    assert [sorted({name.split(".")[2] for name in found if ".layers." in name}) for found in models] == [
        ["0"],
        ["1"],
        ["2"],
    ]


def load_unfinished(folder: Any, ranks: Ranks) -> dict[str, Tensor]:
    """A rank's tensors by their names in the checkpoint, before any is repacked."""
    found: dict[str, Tensor] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaModel, "finish", lambda model: found.update(model.checkpoint_tensors()))
        loaded(folder, ranks)
    return found


@pytest.mark.parametrize("placement", [Placement(tp=2), Placement(tp=2, ep=2), Placement(pp=3)], ids=str)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.1.mlp.shared_expert.up_proj.weight", "1 tensors do not belong to Qwen3Moe.*shared_expert"),
        ("model.layers.3.mlp.gate.weight", "1 tensors do not belong to Qwen3Moe.*layers.3"),
        ("model.layers.2.mlp.experts.8.up_proj.weight", "1 tensors do not belong to Qwen3Moe.*experts.8"),
    ],
)
def test_a_tensor_of_no_rank_is_refused_by_each(placement, name, message, tmp_path):
    save_oracle(MIXTURE, tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), name: torch.ones(2, 2)}, file, {"format": "pt"})
    for ranks in all_ranks(placement):
        with pytest.raises(ModelError, match=message):
            loaded(tmp_path, ranks)


@pytest.mark.parametrize("placement", [Placement(tp=3), Placement(pp=2), Placement(tp=2, ep=2)], ids=str)
def test_sizes_that_do_not_divide_are_told_before_any_weight_is_read(placement, tmp_path, monkeypatch):
    save_oracle(QWEN3, tmp_path)
    monkeypatch.setattr(StoredTensor, "read", None)
    for ranks in all_ranks(placement):
        with pytest.raises(ConfigError):
            loaded(tmp_path, ranks)


@pytest.mark.parametrize("placement", [Placement(tp=2), Placement(pp=4), Placement(tp=2, ep=2)], ids=str)
def test_random_weights_are_those_of_one_device(placement):
    tokens = [token % 320 for token in TEXT]
    (ranks,) = together("dummy:tiny-moe", placement, [tokens])
    wanted = run("dummy:tiny-moe", ONE_DEVICE, tokens)
    torch.testing.assert_close(ranks[0], wanted, rtol=0, atol=FP32_TOLERANCE)


# ------------------------------------------------------------------------------------------ weights in 4 and 8 bits


@pytest.mark.skipif(build.unsupported_reason() is not None, reason=str(build.unsupported_reason()))
@pytest.mark.parametrize("placement", [Placement(tp=2), Placement(tp=2, pp=2)], ids=str)
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_rounded_weights_are_rounded_alike_on_ranks(bits, placement):
    """Each of a group's 32 inputs lies on the same rank, so codes and scales are those of one device."""
    (ranks,) = together("dummy:tiny", placement, [TEXT], quantization=bits)
    wanted = run("dummy:tiny", ONE_DEVICE, TEXT, quantization=bits)
    torch.testing.assert_close(ranks[0], wanted, rtol=0, atol=FP32_TOLERANCE)
    model = loaded("dummy:tiny", all_ranks(Placement(tp=2))[1], quantization=bits)
    layer = model.layers[0]
    packed = layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down, model.lm_head
    assert all(isinstance(linear.method, PackedMethod) for linear in packed)


@pytest.mark.skipif(blocks.unsupported_reason() is not None, reason=str(blocks.unsupported_reason()))
@pytest.mark.parametrize(
    "tied, placement", [(True, Placement(tp=2)), (False, Placement(tp=2)), (True, Placement(tp=2, pp=2))], ids=str
)
def test_a_gguf_files_blocks_are_cut_by_rows_and_by_whole_blocks(tied, placement, tmp_path):
    write_gguf(tmp_path / "m.gguf", kind=Type.Q4_1, tied=tied, **WIDE)
    how = {"cache_dir": tmp_path / "cache", "dtype_asked": False}
    tokens = [token % 40 + 3 for token in TEXT]
    wanted = run(tmp_path / "m.gguf", ONE_DEVICE, tokens, **how)
    (ranks,) = together(tmp_path / "m.gguf", placement, [tokens], **how)
    # The kernel rounds activations to 15 bits: a sum in another order may round otherwise what comes after it.
    assert error_of(ranks[0], wanted) < rounded_inputs(2 * 4 + 1)


@pytest.mark.skipif(blocks.unsupported_reason() is not None, reason=str(blocks.unsupported_reason()))
def test_a_cut_through_a_block_is_refused_in_a_sentence(tmp_path):
    write_gguf(tmp_path / "m.gguf", kind=Type.Q4_K, **WIDE)
    how = {"cache_dir": tmp_path / "cache", "dtype_asked": False}
    with pytest.raises(ModelError, match="keeps 256 of them together. Use fewer devices"):
        loaded(tmp_path / "m.gguf", all_ranks(Placement(tp=2))[0], **how)


@pytest.mark.skipif(blocks.unsupported_reason() is not None, reason=str(blocks.unsupported_reason()))
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape, placement", [("tiny-short", Placement(tp=2)), ("tiny-moe", Placement(tp=2, ep=2))])
def test_packed_words_scales_and_zero_points_are_cut_alike(shape, placement, symmetric, tmp_path):
    """De-quantised, and multiplied in 4 bits."""
    write_checkpoint(folder := tmp_path / "w4a16", shape, symmetric, group_size=16 if "moe" in shape else 32)
    (ranks,), wanted = together(folder, placement, [TEXT]), run(folder, ONE_DEVICE, TEXT)
    torch.testing.assert_close(ranks[0], wanted, rtol=0, atol=FP32_TOLERANCE)
    (ranks,) = together(folder, placement, [TEXT], dtype_asked=False)
    assert error_of(ranks[0], run(folder, ONE_DEVICE, TEXT, dtype_asked=False)) < rounded_inputs(2 * 4 + 1)


# --------------------------------------------------------------------------------------------------------- adapters


def adapted(ranks: Ranks, folder: Any, tokens: list[int]) -> Tensor | None:
    device = Device("dummy:tiny", ranks)
    slots = AdapterSlots(device.model, num_slots=1, max_rank=16, max_rows=1, dtype=torch.float32)
    slots.load("a", str(folder))
    slots.join(0, SimpleNamespace(adapter="a"))
    slots.prepare(np.zeros(1, np.int64), np.array([0, len(tokens)]))
    return device.step(tokens)


@pytest.mark.parametrize("placement", [Placement(tp=2), Placement(tp=4), Placement(tp=2, pp=2)], ids=str)
def test_an_adapter_is_cut_with_its_layers(placement, tmp_path):
    folder = write_adapter(tmp_path, 0)
    plain, wanted = run("dummy:tiny", ONE_DEVICE, TEXT), adapted(ONE_DEVICE, folder, TEXT)
    assert (wanted - plain).abs().max() > 1
    found = [x for x in on_all(all_ranks(placement), lambda own: adapted(own, folder, TEXT)) if x is not None]
    for logits in found:
        torch.testing.assert_close(logits, wanted, rtol=0, atol=FP32_TOLERANCE)


# --------------------------------------------------------------------------------------------------------- encoders


def test_an_encoder_is_cut_by_heads(tmp_path):
    oracle, token_ids = write_bert(tmp_path), random_ids([1, 9, 30])
    files = resolve(str(tmp_path))

    def hidden(own: Ranks) -> Tensor:
        return our_hidden(load(files, torch.float32, CPU, ranks=own).model, token_ids)

    wanted = torch.cat([hidden_of(oracle, ids) for ids in token_ids])
    for size in (2, 4):
        for found in on_all(all_ranks(Placement(tp=size)), hidden):
            torch.testing.assert_close(found, wanted, rtol=0, atol=HIDDEN)
    with pytest.raises(ConfigError, match="pp=3: an encoder is not cut into pipeline stages"):
        BertModel(files.spec, torch.float32, CPU, all_ranks(Placement(pp=3))[0])


# ------------------------------------------------------------------------------------------------------- one device


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_one_device_has_no_layer_that_talks(name):
    model = load_model(f"dummy:{name}", torch.float32, CPU).model
    kinds = {type(module) for module in model.modules() if list(module.parameters(recurse=False)) or module.buffers()}
    assert not {kind.__module__ for kind in kinds} & {sharded.__name__}
    assert type(model.embedding) is embedding.Embedding and type(model.norm) is norm.RMSNorm
    assert type(model.layers[0].attention.o) is linear.Linear and type(model.lm_head) is embedding.LMHead
    assert type(model.layers[0].mlp) is (experts.SparseMLP if name == "tiny-moe" else type(model.layers[1].mlp))


def test_the_fused_stack_is_for_one_device():
    """Its products are called from C++, where nobody adds over the ranks."""
    models = [loaded("dummy:tiny", ranks) for ranks in (ONE_DEVICE, all_ranks(Placement(tp=2))[0])]
    assert "the part of one that a rank has" in unavailable(models[1], CPU)
    assert "rank" not in (unavailable(models[0], CPU) or "")
