"""Rules: each decoder of GPT-2's kin computes what transformers does: alone, in an engine that cuts its prompts, finds
prefixes and preempts, over ranks, from a folder; what it would compute otherwise is refused by name.

A family is a row of CONFIGS, or several where its config has switches.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from loading.gguf_fixture import LAYERS, TOKENS, write_gguf
from models.pairs import FP32_TOLERANCE, oracle_logits, random_tokens, save_oracle
from naive_attention import logits_of
from parallel.devices import check_ranks
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    FalconConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    OPTConfig,
    PhiConfig,
    Starcoder2Config,
)
from transformers.pytorch_utils import Conv1D

from minivllm import LLM, SamplingParams
from minivllm.errors import ModelError
from minivllm.loading import load_model
from minivllm.models import read_spec
from minivllm.parallel.placement import Placement

CPU = torch.device("cpu")
TOLERANCE = FP32_TOLERANCE / 2  # 1e-4
WIDE: dict[str, Any] = {"vocab_size": 320, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2}
GPT = WIDE | {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}
TIED: dict[str, Any] = {"tie_word_embeddings": True}
USUAL = WIDE | {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 256}
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}

OPT = USUAL | {"ffn_dim": 96, "init_std": 0.2}
CONFIGS: dict[str, Any] = {
    "gpt2": GPT2Config(**GPT),
    "gpt2 scaled": GPT2Config(**GPT | UNTIED, n_inner=96, scale_attn_by_inverse_layer_idx=True),
    "gpt2 unscaled": GPT2Config(**GPT, scale_attn_weights=False, activation_function="relu"),
    "gpt_neox": GPTNeoXConfig(**USUAL, intermediate_size=96),
    "gpt_neox in turn": GPTNeoXConfig(
        **USUAL | TIED,
        intermediate_size=96,
        use_parallel_residual=False,
        attention_bias=False,
        hidden_act="gelu_fast",
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ),
    "phi": PhiConfig(**USUAL, intermediate_size=96),
    "phi shared": PhiConfig(**USUAL, intermediate_size=96, num_key_value_heads=2),
    "starcoder2": Starcoder2Config(**USUAL, intermediate_size=96),
    "starcoder2 window": Starcoder2Config(**USUAL | UNTIED, intermediate_size=96, sliding_window=8, use_bias=False),
    "opt": OPTConfig(**OPT),
    "opt behind": OPTConfig(**OPT | UNTIED, do_layer_norm_before=False, word_embed_proj_dim=32),
    "opt plain": OPTConfig(**OPT, enable_bias=False, _remove_final_layer_norm=True),
    "falcon": FalconConfig(**USUAL),
    "falcon grouped": FalconConfig(**USUAL | UNTIED, new_decoder_architecture=True, num_kv_heads=2, bias=True),
    "falcon one norm": FalconConfig(
        **USUAL, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, ffn_hidden_size=96
    ),
    "falcon rw": FalconConfig(**USUAL, alibi=True, parallel_attn=False, multi_query=False, bias=True),
    "bloom": BloomConfig(**USUAL),
    "bloom of normed": BloomConfig(**USUAL | UNTIED, apply_residual_connection_post_layernorm=True),
    "bloom of 6": BloomConfig(**USUAL | {"hidden_size": 96, "num_attention_heads": 6}),
    "gptj": GPTJConfig(**GPT, rotary_dim=8),
    "gptj wide": GPTJConfig(**GPT, rotary_dim=16, n_inner=96),
}
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "phi": "PhiForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "opt": "OPTForCausalLM",
    "falcon": "FalconForCausalLM",
    "bloom": "BloomForCausalLM",
    "gptj": "GPTJForCausalLM",
}
ENGINE = {"model.dtype": "float32", "kv.num_blocks": 120, "kv.block_size": 4, "executor.num_threads": 1}
ENGINE |= {"debug.check": True, "engine.core": "inproc", "scheduler.max_num_seqs": 4, "debug.preempt_every": 7}
ENGINE |= {"scheduler.max_num_batched_tokens": 16}
SHARED = random_tokens(2, 30)
PROMPTS = [random_tokens(1, 7), SHARED + random_tokens(7, 6)]
AGAIN = [SHARED, SHARED[:22] + random_tokens(9, 9)]
Made = Callable[[str], tuple[str, Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    """Of a name of CONFIGS: (folder, transformers' model in fp32), made when it is first asked for."""
    oracles: dict[str, tuple[str, Any]] = {}

    def make(name: str) -> tuple[str, Any]:
        if name not in oracles:
            folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
            oracles[name] = str(folder), save_oracle(CONFIGS[name], folder)
        return oracles[name]

    return make


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_in_fp32_equal_transformers(name: str, made: Made):
    folder, oracle = made(name)
    expected = oracle_logits(oracle, random_tokens())
    assert expected.abs().max() > 1
    ours = load_model(folder, torch.float32, CPU).model
    torch.testing.assert_close(logits_of(ours, random_tokens()), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_engine_gives_64_tokens_of_transformers_and_says_how_it_runs(name: str, made: Made):
    """In chunks, preempted, and the second time with prefixes that are found."""
    folder, oracle = made(name)
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=0)
    with LLM(folder, overrides=ENGINE) as llm:
        outputs = [llm.generate(prompts, params, use_tqdm=False) for prompts in (PROMPTS, AGAIN)]
        said = {decision.field: (str(decision.value), decision.reason) for decision in llm.decisions}
    for prompt, output in zip(PROMPTS + AGAIN, sum(outputs, []), strict=True):
        assert_greedy(oracle, prompt, output.outputs[0])
    assert any(output.num_cached_tokens for output in outputs[1])
    assert said["runner.forward"][0] == "eager" and "LayerNorm" in said["runner.forward"][1]


def assert_greedy(oracle: Any, prompt: list[int], answer: Any) -> None:
    """Each token is transformers' likeliest one behind all before it, and as likely as there: tiny models repeat
    themselves, so that tokens alone would show little."""
    tokens = list(answer.token_ids)
    logits = oracle_logits(oracle, prompt + tokens)[len(prompt) - 1 : -1]
    assert tokens == logits.argmax(-1).tolist() and len(tokens) == 64
    found = torch.tensor([of[token].logprob for of, token in zip(answer.logprobs, tokens, strict=True)])
    wanted = logits.log_softmax(-1).amax(-1)  # beside the logit itself the sum over all counts, which errs less
    torch.testing.assert_close(found, wanted, rtol=0, atol=2 * TOLERANCE)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("placement", [Placement(tp=2), Placement(pp=3)], ids=str)
def test_ranks_give_the_logits_of_one_device(name: str, placement: Placement, made: Made):
    check_ranks(placement, made(name)[0])


WAYS = {
    "gathered": {"runner.attention": "sdpa", "runner.inputs": "gather", "kv.prefix": "radix"},
    "pieces": {"runner.forward": "piecewise", "runner.compile": "off"},
    "recorded": {"runner.graphs": "full+piecewise", "runner.forward": "eager", "runner.attention": "reference"},
    "own layers": {"spec_decode.method": "self_draft", "spec_decode.layers": 2, "spec_decode.adaptive": False},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gpt2", "bloom", "gptj"])  # of learnt positions, of slopes, of pairs of neighbours
def test_whatever_else_is_on_the_tokens_are_those_of_transformers(name: str, way: str, made: Made):
    folder, oracle = made(name)
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=0)
    with LLM(folder, overrides=ENGINE | WAYS[way]) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_greedy(oracle, prompt, output.outputs[0])


def write_adapter_of_all(oracle: Any, folder: Path) -> Any:
    """A LoRA adapter of every linear module of a layer; -> the oracle with it merged."""
    merged, tensors, rank = copy.deepcopy(oracle), {}, 4
    for name, module in merged.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and any(part.isdigit() for part in name.split(".")):
            weight = module.weight.T if isinstance(module, Conv1D) else module.weight  # [n_out, n_in]
            a, b = torch.randn(rank, weight.shape[1]) / 8, torch.randn(weight.shape[0], rank) / 8
            weight.data += 2 * b @ a
            start = f"base_model.model.{name}"
            tensors |= {f"{start}.lora_A.weight": a, f"{start}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors")
    names = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": names, "fan_in_fan_out": True}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged


@pytest.mark.parametrize("name", [*ARCHITECTURES, "falcon grouped"])
def test_an_adapter_is_the_model_with_merged_weights(name: str, made: Made, tmp_path: Path):
    """Under the files' names: of q, k and v as one matrix, A is of all and B has the rows of each."""
    torch.manual_seed(1)
    folder, oracle = made(name)
    merged = write_adapter_of_all(oracle, tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=0)
    lora = {"lora.enabled": True, "lora.adapters": {"a": str(tmp_path)}}
    with LLM(folder, overrides=ENGINE | lora) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=["a", None])
    assert_greedy(merged, PROMPTS[0], outputs[0].outputs[0])
    assert_greedy(oracle, PROMPTS[1], outputs[1].outputs[0])


# Modules of newer files -> of older ones, and buffers that older ones have.
OLDER = {
    "gpt2": ({"transformer.": ""}, ("h.1.attn.bias", "h.1.attn.masked_bias")),
    "gpt_neox": ({"lm_head.": "embed_out."}, ("gpt_neox.layers.1.attention.masked_bias",)),
    "opt": ({"model.decoder.": "decoder."}, ()),
    "bloom": ({"transformer.": ""}, ()),
    "gptj": ({}, ("transformer.h.1.attn.bias",)),
}


@pytest.mark.parametrize("name", OLDER)
def test_a_file_with_older_names_is_the_same_model(name: str, made: Made, tmp_path):
    folder, oracle = made(name)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors, (names, buffers) = load_file(tmp_path / "model.safetensors"), OLDER[name]
    for newer, older in names.items():
        tensors = {key.replace(newer, older, 1): tensor for key, tensor in tensors.items()}
    save_file(tensors | {key: torch.ones(1) for key in buffers}, tmp_path / "model.safetensors")
    ours = load_model(str(tmp_path), torch.float32, CPU).model
    expected = oracle_logits(oracle, random_tokens())
    torch.testing.assert_close(logits_of(ours, random_tokens()), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_a_config_leaves_out_is_what_transformers_takes(name: str):
    least = {"architectures": [ARCHITECTURES[name]]}
    assert read_spec(least) == read_spec({**type(CONFIGS[name])().to_dict(), **least})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2", {"activation_function": "silu"}, 'activation "silu" is not supported'),
        ("gpt2", {"n_head": 5}, "5 heads do not divide the hidden size of 64"),
        ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 0.07}}, "asks to rotate 1 of 16 elements"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm is not supported"),
        ("phi", {"tie_word_embeddings": True}, "tie_word_embeddings is not supported beside"),
        ("starcoder2", {"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine=false is not supported"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2 is not supported"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn=false is not supported"),
        ("gptj", {"rotary_dim": 20}, "asks to rotate 20 of 16 elements"),
        ("gptj", {"rotary_dim": None}, '"rotary_dim" must be a positive int'),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is not supported"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(name: str, changes: dict[str, Any], message: str):
    base = {**CONFIGS[name].to_dict(), "architectures": [ARCHITECTURES[name]]}
    with pytest.raises(ModelError, match=message):
        read_spec(base | changes)


# ---------------------------------------------------------------- GGUF

FILED = USUAL | {"vocab_size": len(TOKENS), "num_hidden_layers": LAYERS, "num_key_value_heads": 2}
FILED |= {"intermediate_size": 96}
GGUF_FILES = {
    "starcoder2": (Starcoder2Config(**FILED), {}),
    "phi2": (PhiConfig(**FILED), {"rope.dimension_count": 8}),
}


@pytest.mark.parametrize("arch", GGUF_FILES)
def test_a_gguf_file_is_the_folder_that_it_was_made_of(arch: str, tmp_path: Path):
    config, keys = GGUF_FILES[arch]
    oracle = save_oracle(config, tmp_path)
    names, tensors = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], LAYERS), {}
    for theirs, tensor in oracle.state_dict().items():
        module, _, kind = theirs.rpartition(".")
        if module != "lm_head" or not config.tie_word_embeddings:
            tensors[f"{names.get_name(module)}.{kind}"] = tensor.numpy()
    extra = {f"{arch}.{key}": value for key, value in {"attention.layer_norm_epsilon": 1e-5, **keys}.items()}
    path = tmp_path / "m.gguf"
    write_gguf(path, arch, gguf.GGMLQuantizationType.F32, head_size=16, tensors=tensors, extra=extra, decode=False)
    ours = load_model(str(path), torch.float32, CPU, cache_dir=tmp_path / "cache").model
    ids = [token % len(TOKENS) for token in random_tokens()]
    torch.testing.assert_close(logits_of(ours, ids), oracle_logits(oracle, ids), rtol=0, atol=TOLERANCE)
