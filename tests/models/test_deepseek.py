"""Rules: DeepSeek V2 and V3 compute what transformers does, alone, in an engine whatever else is on, and over ranks;
what they would compute otherwise is refused."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lora.adapters import write_adapter
from models.pairs import (
    SMALL,
    check_in_bf16,
    check_in_fp32,
    greedy_oracle,
    oracle_logits,
    random_tokens,
    save_oracle,
)
from naive_attention import logits_of
from parallel.devices import check_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config

from minivllm import LLM, SamplingParams
from minivllm.errors import AdapterError, ConfigError, ModelError
from minivllm.kernels.cpu import build
from minivllm.loading import load_model
from minivllm.models import read_spec
from minivllm.models.decoder import MLP
from minivllm.models.deepseek import MixtureMLP
from minivllm.parallel.placement import Placement
from minivllm.simulate.shape import read_shape

CPU = torch.device("cpu")
CLOSE = 1e-4  # within FP32_TOLERANCE (pairs.py), of as many products; seen: 1.2e-5
SIZES = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
SIZES |= {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_shared_experts": 2}
SHAPE = SMALL | {"num_key_value_heads": 4} | SIZES
GROUPS = {"n_group": 4, "topk_group": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
V2, V3 = DeepseekV2Config, DeepseekV3Config
CONFIGS = {
    "v2_lite": V2(**SHAPE | {"q_lora_rank": None}, first_k_dense_replace=1),
    "v2": V2(
        **SHAPE | GROUPS,
        topk_method="group_limited_greedy",
        routed_scaling_factor=16.0,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
    ),
    "v2_biases": V2(**SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, first_k_dense_replace=2),
    "v3": V3(**SHAPE | GROUPS, first_k_dense_replace=1, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
    "v3_one_group": V3(**SHAPE, n_group=1, topk_group=1, norm_topk_prob=False, rope_interleave=False),
    "v3_dense": V3(**SHAPE | {"q_lora_rank": None}, first_k_dense_replace=3, attention_bias=True, rope_parameters=YARN),
}


def save(name: str, folder: Any, **how: Any) -> Any:
    """As save_oracle, with random corrections in routers, which are no parameters: large enough to change choices."""
    oracle = save_oracle(CONFIGS[name], folder, **how)
    for buffer_name, buffer in oracle.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.5, 0.5)
    oracle.save_pretrained(folder, **how)
    return oracle


@pytest.fixture(scope="module")
def oracles(tmp_path_factory) -> dict[str, tuple[str, Any]]:
    folders = {name: tmp_path_factory.mktemp(name) for name in CONFIGS}
    return {name: (str(folder), save(name, folder)) for name, folder in folders.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_greedy_tokens_in_fp32_equal_transformers(name, oracles):
    folder, oracle = oracles[name]
    layers, dense = load_model(folder, torch.float32, CPU).model.layers, CONFIGS[name].first_k_dense_replace
    assert [type(layer.mlp) for layer in layers] == [MLP] * dense + [MixtureMLP] * (3 - dense)
    check_in_fp32(folder, oracle, CLOSE)


def test_logits_in_bf16_are_as_near_to_fp32_as_those_of_transformers(oracles):
    """Of a model without experts: which of them a token gets is a jump (test_moe.py)."""
    check_in_bf16(*oracles["v3_dense"])


# ---------------------------------------------------------------- in an engine

ENGINE = {"model.dtype": "float32", "kv.num_blocks": 400, "kv.block_size": 4, "executor.num_threads": 1}
ENGINE |= {"debug.check": True, "engine.core": "inproc", "scheduler.max_num_seqs": 4}
SHARED = random_tokens(2, 40)
PROMPTS = [random_tokens(1, 7), SHARED + random_tokens(7, 6), SHARED[:22] + random_tokens(8, 3)]
AGAIN = [SHARED, SHARED + random_tokens(9, 9)]
WAYS = {
    "chunks": {"scheduler.max_num_batched_tokens": 16},
    "reference": {"runner.attention": "reference", "scheduler.max_num_batched_tokens": 16},
    "rebuilt": {"runner.inputs": "rebuild"},
    "radix": {"runner.inputs": "gather", "kv.prefix": "radix"},
    "pieces": {"runner.forward": "piecewise", "runner.compile": "off"},
    "recorded": {"runner.graphs": "piecewise", "runner.forward": "eager"},
    "overlap": {"engine.overlap": 2},
    "preempted": {"kv.num_blocks": 100, "scheduler.max_num_batched_tokens": 16, "debug.preempt_every": 5},
    "swapped": {"kv.preemption": "swap", "kv.swap_memory": "1MiB", "debug.preempt_every": 5},
    "evicted": {"debug.evict_all": True},
    "look-up": {"spec_decode.method": "ngram", "spec_decode.ngram_min": 1, "spec_decode.adaptive": False},
    "own layers": {"spec_decode.method": "self_draft", "spec_decode.layers": 1, "spec_decode.adaptive": False},
    "one run": {"kv.allocation": "max", "kv.prefix": "none", "model.max_model_len": 120},
    "powers of two": {"kv.allocation": "pow2", "kv.prefix": "none", "model.max_model_len": 120},
    "naive": {"executor.kind": "naive", "kv.prefix": "none"},
}


def tokens_of(llm: LLM, prompts: list[list[int]], num_tokens: int, **more: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False, **more)]


@pytest.fixture(scope="module")
def wanted(oracles) -> dict[str, list[list[int]]]:
    """transformers' 64 tokens behind each of PROMPTS and AGAIN."""
    names = "v2", "v3"
    return {name: [greedy_oracle(oracles[name][1], prompt, 64) for prompt in PROMPTS + AGAIN] for name in names}


@pytest.mark.parametrize("name", ["v2", "v3"])
def test_an_engine_gives_64_tokens_of_transformers_and_says_how_it_runs(name, oracles, wanted):
    with LLM(oracles[name][0], overrides=ENGINE) as llm:
        assert tokens_of(llm, PROMPTS, 64) + tokens_of(llm, AGAIN, 64) == wanted[name]
        said = {decision.field: (str(decision.value), decision.reason) for decision in llm.decisions}
    assert said["runner.attention"][0] == ("cpu" if build.unsupported_reason() is None else "reference")
    assert said["runner.forward"][0] == "eager" and "3 layers have attention of their own" in said["runner.forward"][1]


@pytest.mark.parametrize("way", WAYS)
def test_whatever_else_is_on_the_tokens_are_those_of_transformers(way, oracles, wanted):
    with LLM(oracles["v3"][0], overrides=ENGINE | WAYS[way]) as llm:
        found = tokens_of(llm, PROMPTS, 16) + tokens_of(llm, AGAIN, 16)  # the second time prefixes are found
    assert found == [tokens[:16] for tokens in wanted["v3"]]


def test_whole_decodes_can_be_recorded_where_no_layer_has_experts(oracles):
    folder, oracle = oracles["v3_dense"]
    recorded = {"runner.graphs": "full", "runner.forward": "eager", "runner.attention": "reference"}
    with LLM(folder, overrides=ENGINE | recorded) as llm:
        assert tokens_of(llm, PROMPTS, 12) == [greedy_oracle(oracle, prompt, 12) for prompt in PROMPTS]
        said = {decision.field: (decision.value, decision.reason) for decision in llm.decisions}
    assert said["runner.graphs"][0] == "full" and "whole decodes" in said["runner.graphs"][1]


def test_a_token_takes_one_vector_a_layer_of_the_pool(oracles):
    options = ENGINE | {"kv.num_blocks": None, "kv.memory": "100KiB"}
    for name in ("v3", "v2_lite"):
        with LLM(oracles[name][0], overrides=options) as llm:
            blocks = next(d.value for d in llm.decisions if d.field == "kv.num_blocks")
            assert len(tokens_of(llm, PROMPTS[:1], 4)[0]) == 4
        a_token = 3 * (24 + 8) * 4  # layers, numbers, bytes: what the simulator counts too
        assert blocks == 100 * 1024 // (4 * a_token)
        assert read_shape(CONFIGS[name].to_dict()).kv_bytes_per_token(4) == a_token


def test_half_the_numbers_bytes_hold_twice_the_tokens(oracles, wanted):
    with LLM(oracles["v3"][0], overrides=ENGINE | {"kv.dtype": "float16"}) as llm:
        assert tokens_of(llm, PROMPTS[:1], 1) == [wanted["v3"][0][:1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runner.attention": "sdpa"}, r"runner.attention=sdpa cannot run here: it keeps K and V of each head, and"),
        ({"runner.attention": "flex,reference"}, r"flex,reference cannot run here: it keeps K and V of each head"),
        ({"kv.dtype": "int8"}, r"reference off: it cannot keep K and V in int8. Choose kv.dtype=auto"),
        ({"spec_decode.method": "eagle", "spec_decode.model": "dummy:eagle"}, "the model and its draft model cannot"),
    ],
)
def test_what_cannot_serve_latent_layers_says_so(options, message, oracles):
    with pytest.raises(ConfigError, match=message):
        LLM(oracles["v3"][0], overrides=ENGINE | options)


@pytest.mark.parametrize(
    "name, why", [("v3", "a layer of experts"), ("v3_dense", "latent attention .MLA. has two forms")]
)
def test_the_same_bits_whatever_runs_beside_are_not_promised(name, why, oracles):
    with pytest.raises(ConfigError, match=f"model.invariant=true: {why}"):
        LLM(oracles[name][0], overrides=ENGINE | {"model.invariant": True})


def test_a_draft_model_of_the_same_kind_shares_the_backend(oracles, wanted):
    drafts = {"spec_decode.method": "draft", "spec_decode.model": oracles["v2_lite"][0], "spec_decode.adaptive": False}
    with LLM(oracles["v3"][0], overrides=ENGINE | drafts) as llm:
        assert tokens_of(llm, PROMPTS, 12) == [tokens[:12] for tokens in wanted["v3"][:3]]


LINEAR = {"self_attn.q_a_proj": (20, 64), "self_attn.q_b_proj": (96, 20), "self_attn.o_proj": (64, 48)}
LINEAR |= {"self_attn.kv_a_proj_with_mqa": (32, 64)}


def test_an_adapter_is_the_model_with_merged_weights(oracles, wanted, tmp_path):
    folder, oracle = oracles["v3"]
    targets = [name.partition(".")[2] for name in LINEAR]
    write_adapter(tmp_path, 0, targets=targets, shapes=LINEAR, num_layers=3)
    adapter, merged, start = (
        load_file(tmp_path / "adapter_model.safetensors"),
        copy.deepcopy(oracle),
        "base_model.model.",
    )
    for name in (name for name in adapter if name.endswith("lora_A.weight")):
        change = 2.0 * adapter[name.replace("lora_A", "lora_B")] @ adapter[name]
        merged.get_submodule(name.removeprefix(start).removesuffix(".lora_A.weight")).weight.data += change
    expected = [greedy_oracle(merged, PROMPTS[0], 12), wanted["v3"][1][:12], greedy_oracle(merged, PROMPTS[2], 12)]
    with LLM(folder, overrides=ENGINE | {"lora.enabled": True, "lora.adapters": {"a": str(tmp_path)}}) as llm:
        assert tokens_of(llm, PROMPTS, 12, lora_request=["a", None, "a"]) == expected


def test_an_adapter_of_what_no_layer_multiplies_whole_is_refused_by_name(oracles, tmp_path):
    shapes = {"self_attn.kv_b_proj": (112, 24)}
    write_adapter(tmp_path, 0, targets=["kv_b_proj"], shapes=shapes, num_layers=3)
    with pytest.raises(AdapterError, match="kv_b_proj"):
        LLM(oracles["v3"][0], overrides=ENGINE | {"lora.enabled": True, "lora.adapters": {"a": str(tmp_path)}})


# ---------------------------------------------------------------- over ranks


@pytest.mark.parametrize(
    "name, placement",
    [
        ("v3", Placement(tp=2)),
        ("v3", Placement(tp=2, ep=2)),
        ("v2_biases", Placement(tp=4)),
        ("v2_lite", Placement(pp=3)),
    ],
    ids=str,
)
def test_ranks_give_the_logits_of_one_device_and_of_transformers(name, placement, oracles):
    check_ranks(placement, *oracles[name])


# ---------------------------------------------------------------- checkpoints and configs


def test_layers_behind_the_last_are_left_in_the_file_and_others_refused(tmp_path):
    oracle = save("v3_dense", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    guessing = {"model.layers.3.eh_proj.weight": torch.ones(64, 128), "model.layers.3.enorm.weight": torch.ones(64)}
    save_file(tensors | guessing, tmp_path / "model.safetensors", {"format": "pt"})
    ours, token_ids = load_model(str(tmp_path), torch.float32, CPU).model, random_tokens()
    torch.testing.assert_close(logits_of(ours, token_ids), oracle_logits(oracle, token_ids), rtol=0, atol=CLOSE)
    save_file(tensors | {"model.layers.4.x.weight": torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.4\.x"):
        load_model(str(tmp_path), torch.float32, CPU)


BLOCK = 16
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def in_fp8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight [n_out, n_in] -> its codes, their scales, and what both are."""
    n_out, n_in = weight.shape
    pads = F.pad(weight, (0, -n_in % BLOCK, 0, -n_out % BLOCK)).unfold(0, BLOCK, BLOCK).unfold(1, BLOCK, BLOCK)
    scales = pads.abs().amax((2, 3)) / 448  # [blocks, blocks]
    spread = scales.repeat_interleave(BLOCK, 0)[:n_out].repeat_interleave(BLOCK, 1)[:, :n_in]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * spread


def test_v3_is_read_from_the_format_that_it_is_published_in(tmp_path):
    """The matrix that expands latent vectors, and experts', are de-quantised as every other is."""
    oracle, stored, plain = save("v3", tmp_path), {}, {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        stored[name] = plain[name] = tensor
        if tensor.dim() == 2 and "proj" in name:
            stored[name], stored[f"{name}_scale_inv"], plain[name] = in_fp8(tensor)
    expected = oracle_logits(oracle, random_tokens())
    save_file(plain, tmp_path / "model.safetensors", {"format": "pt"})
    rounded = logits_of(load_model(str(tmp_path), torch.float32, CPU).model, random_tokens())
    assert (rounded - expected).abs().max() > 0.01
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": FP8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = logits_of(load_model(str(tmp_path), torch.float32, CPU).model, random_tokens())
    torch.testing.assert_close(found, rounded, rtol=0, atol=1e-5)


def test_the_parameters_are_counted_but_for_norms_and_biases(oracles):
    for name in ("v2_lite", "v2", "v3"):
        own = oracles[name][1].parameters()
        assert read_spec(CONFIGS[name].to_dict() | NAMED[name]).num_parameters == sum(
            p.numel() for p in own if p.dim() > 1
        )


NAMED = {name: {"architectures": [f"Deepseek{name[:2].upper()}ForCausalLM"]} for name in CONFIGS}
BASE = {**SHAPE, **GROUPS, "first_k_dense_replace": 1, "rope_parameters": {"rope_theta": 1e4}}
BASE = {2: BASE | NAMED["v2"], 3: BASE | NAMED["v3"]}


def test_scores_are_sharpened_as_far_as_rope_is_stretched():
    plain, older = 24**-0.5, {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.5}}
    stretched = BASE[3] | older | {"rope_parameters": None, "max_position_embeddings": 4096 * 40}
    assert read_spec(BASE[3]).scale == plain
    assert read_spec(stretched).scale == pytest.approx(plain * (0.05 * math.log(40) + 1) ** 2)
    assert read_spec(stretched).rope.attention_factor == pytest.approx(
        (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)
    )


@pytest.mark.parametrize(
    ("version", "changes", "message"),
    [
        (2, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        (2, {"norm_topk_prob": True}, "norm_topk_prob=True is not supported, only False"),
        (2, {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not supported, only 'softmax'"),
        (2, {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported"),
        (3, {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported, only 'sigmoid'"),
        (3, {"topk_method": "greedy"}, "topk_method='greedy' is not supported"),
        (3, {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        (3, {"num_key_value_heads": 2}, "num_key_value_heads is 2, and K and V are made for each of 4 heads"),
        (3, {"n_group": 3}, "3 of 8 experts cannot be chosen out of 2 of 3 groups"),
        (3, {"topk_group": 1}, "3 of 8 experts cannot be chosen out of 1 of 4 groups"),
        (3, {"n_group": 8, "topk_group": 8}, "a group must have two experts at least"),
        (3, {"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
        (3, {"kv_lora_rank": 0}, '"kv_lora_rank" must be a positive int'),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(version, changes, message):
    with pytest.raises(ModelError, match=message):
        read_spec(BASE[version] | changes)
