"""Rules: Granite 4, most of whose layers are Mamba-2, computes what transformers does (in an engine: test_hybrid.py),
with states and without, with experts and without; what would be computed otherwise is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from loading.gguf_fixture import LAYERS, TOKENS, permuted, write_gguf
from lora.adapters import write_adapter
from models.pairs import (
    BF16_TOLERANCE,
    FP32_TOLERANCE,
    SMALL,
    check_in_bf16,
    check_in_fp32,
    error_of,
    greedy_oracle,
    oracle_logits,
    random_tokens,
    save_oracle,
)
from naive_attention import logits_of
from parallel.devices import Device, check_ranks
from parallel.threads import all_ranks
from safetensors.torch import load_file, save_file
from transformers.models.granitemoehybrid import GraniteMoeHybridConfig

from minivllm import LLM, SamplingParams
from minivllm.errors import ModelError
from minivllm.kernels.cpu import build
from minivllm.kv_groups import StateSpec
from minivllm.loading import load_model
from minivllm.loading.dummy import dummy_spec
from minivllm.models import read_spec
from minivllm.models.checkpoint import fuse, load_tensors
from minivllm.models.granite_hybrid import GraniteHybridModel
from minivllm.parallel.placement import Placement

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(build.unsupported_reason() is not None, reason=str(build.unsupported_reason()))
MAMBA, ATTENTION = "mamba", "attention"  # as the published configs say it
SHAPE = SMALL | {"num_hidden_layers": 4, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 2}
SHAPE |= {"shared_intermediate_size": 80, "layer_types": [MAMBA, MAMBA, ATTENTION, MAMBA], "num_local_experts": 0}
SHAPE |= {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 0.5}
CONFIGS = {
    "dense": GraniteMoeHybridConfig(**SHAPE),
    "experts": GraniteMoeHybridConfig(
        **SHAPE | {"num_local_experts": 4, "mamba_n_groups": 1, "layer_types": [ATTENTION, MAMBA, MAMBA, ATTENTION]},
        num_experts_per_tok=2,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        mamba_d_conv=2,
        attention_bias=True,
        tie_word_embeddings=True,
        position_embedding_type="rope",
    ),
    "no states": GraniteMoeHybridConfig(**SHAPE | {"layer_types": [ATTENTION] * 4}, position_embedding_type="rope"),
}


def save_random(config: Any, folder: Path) -> Any:
    """As save_oracle; what transformers makes alike in all heads is random, too."""
    oracle = save_oracle(config, folder)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name.endswith(("A_log", ".D")):
                parameter.uniform_(-1, 1, generator=generator)
    oracle.save_pretrained(folder)
    return oracle


@pytest.fixture(scope="module")
def oracles(tmp_path_factory) -> dict[str, tuple[str, Any]]:
    folders = {name: tmp_path_factory.mktemp(name.replace(" ", "_")) for name in CONFIGS}
    return {name: (str(folder), save_random(CONFIGS[name], folder)) for name, folder in folders.items()}


@pytest.fixture(params=CONFIGS)
def pair(request, oracles) -> tuple[str, Any]:
    """(folder, transformers' model in fp32)."""
    return oracles[request.param]


def test_logits_and_greedy_tokens_in_fp32_equal_transformers(pair):
    check_in_fp32(*pair)


@pytest.mark.parametrize("name", ["dense", "no states"])
def test_logits_in_bf16_are_as_near_to_fp32_as_those_of_transformers(name, oracles):
    """Which experts a token is given to is a jump (test_moe.py): theirs are left out."""
    check_in_bf16(*oracles[name])


def test_experts_under_transformers_new_names_are_read(oracles, tmp_path):
    folder, oracle = oracles["experts"]
    new = {"input_linear.weight": "experts.gate_up_proj", "output_linear.weight": "experts.down_proj"}
    new |= {"router.layer.weight": "router.weight"}
    tensors = load_file(Path(folder) / "model.safetensors")
    for name in [name for name in tensors if ".block_sparse_moe." in name]:
        prefix, _, kind = name.partition("block_sparse_moe.")
        tensors[f"{prefix}block_sparse_moe.{new[kind]}"] = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(folder) / name).read_bytes())
    found = logits_of(load_model(str(tmp_path), torch.float32, CPU).model, random_tokens())
    torch.testing.assert_close(found, oracle_logits(oracle, random_tokens()), rtol=0, atol=FP32_TOLERANCE)


def test_what_is_read_in_parts_is_whole_again_for_transformers(oracles):
    """As a dummy's weights are given to transformers' model (runner/naive_worker.py)."""
    folder, _ = oracles["dense"]
    file = Path(folder) / "model.safetensors"
    model, saved = GraniteHybridModel(load_model(folder, torch.float32, CPU).spec, torch.float32, CPU), load_file(file)
    load_tensors(model, [(name, tensor, file) for name, tensor in saved.items()], file)
    found = fuse(model.checkpoint_tensors(), model.weights.fused)
    assert found.keys() == saved.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, saved[name]), name


def test_an_adapter_on_fused_matrices_is_the_model_with_merged_weights(oracles, tmp_path):
    folder, oracle = oracles["dense"]
    shapes = {"mamba.in_proj": (128 + 160 + 4, 64), "mamba.out_proj": (64, 128), "shared_mlp.input_linear": (160, 64)}
    names = [name.rpartition(".")[2] for name in shapes]
    file = write_adapter(tmp_path, 0, targets=names, shapes=shapes, num_layers=4) / "adapter_model.safetensors"
    adapter = {name: tensor for name, tensor in load_file(file).items() if ".layers.2.mamba." not in name}
    save_file(adapter, file)
    merged, start = copy.deepcopy(oracle), "base_model.model."
    for name in (name for name in adapter if name.endswith("lora_A.weight")):
        change = 2.0 * adapter[name.replace("lora_A", "lora_B")] @ adapter[name]
        merged.get_submodule(name.removeprefix(start).removesuffix(".lora_A.weight")).weight.data += change
    prompts = [random_tokens(length=12), random_tokens(2, 9)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = [greedy_oracle(merged, prompts[0], 12), greedy_oracle(oracle, prompts[1], 12)]
    options = {"lora.enabled": True, "lora.adapters": {"a": str(tmp_path)}, "engine.core": "inproc"}
    with LLM(folder, overrides=options | {"model.dtype": "float32", "kv.num_blocks": 60}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=["a", None])
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


# ---------------------------------------------------------------- over ranks


@pytest.mark.parametrize(("name", "placement"), [("experts", Placement(pp=2)), ("no states", Placement(tp=2))], ids=str)
def test_ranks_give_the_logits_of_one_device_and_of_transformers(name, placement, oracles):
    check_ranks(placement, *oracles[name])


def test_states_are_not_cut(oracles):
    with pytest.raises(ModelError, match="tp must be 1"):
        Device(oracles["dense"][0], all_ranks(Placement(tp=2))[0])


# ---------------------------------------------------------------- configs

BASE = {"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "vocab_size": 100}
BASE |= {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
BASE |= {"max_position_embeddings": 128, "layer_types": [MAMBA, ATTENTION, MAMBA]}


def test_what_a_config_leaves_out_is_what_transformers_takes():
    said = BASE | GraniteMoeHybridConfig(**BASE).to_dict()
    assert said["layer_types"] == ["linear_attention", "full_attention", "linear_attention"]
    assert read_spec(BASE) == read_spec(said | {"layer_types": BASE["layer_types"]}) == read_spec(said)
    assert read_spec(BASE).linear == (True, False, True) and read_spec(BASE).rotated == (False,) * 3
    assert read_spec(BASE).state == StateSpec(1, 128, 256, 1, 4, "ssd")
    assert read_spec(BASE).experts.num_experts == 8 and read_spec(BASE).intermediate_size == 1024
    assert read_spec(BASE | {"num_local_experts": 0}).experts is None
    assert read_spec(BASE | {"position_embedding_type": "rope"}).rotated == (True,) * 3


def test_ibms_smallest_has_as_many_parameters_as_its_card_says():
    assert dummy_spec("granite-4.0-h-350m").num_parameters == pytest.approx(340e6, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, 'hidden_act "gelu" is not supported'),
        ({"layer_types": [MAMBA]}, "layer_types must name linear_attention or full_attention for 3"),
        ({"layer_types": [MAMBA] * 3}, "a model of states alone is not supported"),
        ({"layer_types": None}, "a model of states alone is not supported"),
        ({"mamba_n_heads": 3}, "3 heads of 42 in 1 groups do not make 128 channels"),
        ({"mamba_n_heads": 4, "mamba_d_head": 16}, "4 heads of 16 in 1 groups do not make 128 channels"),
        ({"mamba_n_groups": 3}, "128 heads of 1 in 3 groups do not make 128 channels"),
        ({"mamba_d_conv": 0}, '"mamba_d_conv" must be a positive int'),
        ({"time_step_limit": [0.001, 0.1]}, r"time_step_limit \[0.001, 0.1\] is not supported"),
        ({"time_step_limit": [0.0, {"__float__": "100"}]}, "time_step_limit"),
        ({"position_embedding_type": "alibi"}, 'position_embedding_type "alibi" is not supported'),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, and there are 8 experts"),
        ({"residual_multiplier": 0.0}, '"residual_multiplier" must be a positive'),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        read_spec(BASE | changes)


# ---------------------------------------------------------------- GGUF


def filed(oracle: Any) -> dict[str, np.ndarray]:
    """{GGUF name: tensor}, as llama.cpp's converter lays them out (conversion/granite.py and mamba.py there)."""
    names, found = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GRANITE_HYBRID, LAYERS), {}
    for theirs, tensor in oracle.state_dict().items():
        module, _, kind = theirs.rpartition(".")
        value = tensor.numpy()
        if kind == "dt_bias":
            found[f"{names.get_name(f'{module}.dt_proj')}.bias"] = value
        elif kind in ("A_log", "D"):
            found[names.get_name(theirs)] = (-np.exp(value) if kind == "A_log" else value)[:, None]
        elif module.endswith("shared_mlp.input_linear"):
            for name, part in zip(("gate", "up"), np.split(value, 2), strict=True):
                found[f"blk.{module.split('.')[2]}.ffn_{name}.weight"] = part
        elif module.endswith("shared_mlp.output_linear"):
            found[f"blk.{module.split('.')[2]}.ffn_down.weight"] = value
        elif module.endswith("mamba.norm"):
            found[f"{names.get_name(module)}.weight"] = value.reshape(2, -1)
        elif module.endswith("mamba.conv1d"):
            found[f"{names.get_name(module)}.{kind}"] = value.squeeze()
        else:
            name = f"{names.get_name(module)}.{kind}"
            found[name] = permuted(name, value)
    return found


@pytest.fixture(scope="module")
def in_gguf(tmp_path_factory) -> tuple[dict[str, np.ndarray], dict[str, Any], Any]:
    """(tensors, metadata, transformers' model)"""
    shape = SHAPE | {"vocab_size": len(TOKENS), "num_hidden_layers": LAYERS, "layer_types": [MAMBA, ATTENTION]}
    config = GraniteMoeHybridConfig(**shape | {"rms_norm_eps": 1e-5, "shared_intermediate_size": 96})
    oracle = save_random(config, tmp_path_factory.mktemp("filed"))
    keys = {"attention.scale": 0.2, "embedding_scale": 2.0, "residual_scale": 0.5, "logit_scale": 0.5}
    keys |= {"attention.head_count_kv": [0, 2], "ssm.conv_kernel": 4, "ssm.state_size": 8}
    keys |= {"ssm.group_count": 2, "ssm.inner_size": 128, "ssm.time_step_rank": 4, "rope.scaling.finetuned": False}
    return filed(oracle), {f"granitehybrid.{key}": value for key, value in keys.items()}, oracle


def test_a_gguf_file_is_the_folder_that_it_was_made_of(in_gguf, tmp_path):
    tensors, keys, oracle = in_gguf
    path = tmp_path / "m.gguf"
    write_gguf(path, "granitehybrid", Type.F32, head_size=16, tensors=tensors, extra=keys, decode=False)
    ours = load_model(str(path), torch.float32, CPU, cache_dir=tmp_path / "cache").model
    assert ours.spec.linear == (True, False) and ours.spec.rotated == (False, False)
    ids = [token % len(TOKENS) for token in random_tokens()]
    torch.testing.assert_close(logits_of(ours, ids), oracle_logits(oracle, ids), rtol=0, atol=FP32_TOLERANCE)


@needs_compiler
def test_what_a_gguf_file_has_in_blocks_stays_in_them(in_gguf, tmp_path):
    tensors, keys, _ = in_gguf
    path, cache = tmp_path / "m.gguf", tmp_path / "cache"
    matrices = ("attn_", "ffn_", "ssm_in", "ssm_out", "token_embd", "output")

    def kind(name: str) -> Type:
        return Type.Q8_0 if any(part in name for part in matrices) else Type.F32

    write_gguf(path, "granitehybrid", kind, head_size=16, tensors=tensors, extra=keys, decode=False)
    exact = load_model(str(path), torch.float32, CPU, cache_dir=cache)
    kept = load_model(str(path), torch.bfloat16, CPU, cache_dir=cache)
    parts = 1 + 1 + 3 + 1 + 2 * 3 + 1  # of Mamba's two products, attention's, two MLPs' and the head
    assert exact.quantised is None and kept.linear[1] == f"{parts} in Q8_0"
    ids = [token % len(TOKENS) for token in random_tokens()]
    assert error_of(logits_of(kept.model, ids), logits_of(exact.model, ids)) < BF16_TOLERANCE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.head_count_kv": [2, 2, 2]}, "layer_types must name"),
        ({"attention.head_count_kv": [0, 0]}, "a model of states alone is not supported"),
        ({"ssm.inner_size": 96}, "do not make"),
        ({"ssm.time_step_rank": 0}, '"granitehybrid.ssm.time_step_rank" is missing or 0'),
        ({"expert_count": 4}, "a mixture of experts is not read from GGUF"),
    ],
)
def test_a_gguf_file_that_is_no_such_model_is_refused(changes, message, in_gguf, tmp_path):
    tensors, keys, _ = in_gguf
    keys = keys | {f"granitehybrid.{key}": value for key, value in changes.items()}
    write_gguf(tmp_path / "m.gguf", "granitehybrid", Type.F32, head_size=16, tensors=tensors, extra=keys, decode=False)
    with pytest.raises(ModelError, match=message):
        load_model(str(tmp_path / "m.gguf"), torch.float32, CPU, cache_dir=tmp_path / "cache")
