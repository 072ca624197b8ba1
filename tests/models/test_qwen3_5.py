"""Rules: Qwen 3.5's text model, whose layers of linear attention keep recurrent states, computes what transformers
does, alone and in an engine whatever else is on; what a state cannot do is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models.pairs import (
    BF16_TOLERANCE,
    FP32_TOLERANCE,
    SMALL,
    error_of,
    greedy_oracle,
    oracle_logits,
    random_tokens,
    save_oracle,
)
from naive_attention import greedy, logits_of
from parallel.devices import Device, run, together
from parallel.threads import all_ranks
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import Qwen3_5TextConfig, modeling_qwen3_5

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError, ModelError
from minivllm.kv_groups import GatedDelta
from minivllm.loading import load_model
from minivllm.loading.dummy import dummy_spec, write_tokenizer
from minivllm.models import read_spec
from minivllm.parallel.group import ONE_DEVICE
from minivllm.parallel.placement import Placement

CPU = torch.device("cpu")
LINEAR, FULL = "linear_attention", "full_attention"
SHAPE = SMALL | {"num_hidden_layers": 4, "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 24}
SHAPE |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
CONFIGS = {
    "as published": Qwen3_5TextConfig(**SHAPE),  # the fourth layer is attention
    "odd": Qwen3_5TextConfig(
        **SHAPE | {"num_hidden_layers": 5, "linear_num_key_heads": 3, "linear_num_value_heads": 3},
        linear_conv_kernel_dim=2,
        tie_word_embeddings=True,
        attention_bias=True,
        layer_types=[FULL, LINEAR, LINEAR, FULL, LINEAR],
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ),
}


@pytest.fixture(scope="module")
def oracles(tmp_path_factory) -> Iterator[dict[str, tuple[str, Any]]]:
    """Token by token: transformers' products of chunks subtract sums of logarithms in float32, and err by 3e-4 here."""
    folders = {name: tmp_path_factory.mktemp(name.replace(" ", "_")) for name in CONFIGS}
    with pytest.MonkeyPatch.context() as patch:
        one_by_one = modeling_qwen3_5.torch_recurrent_gated_delta_rule
        patch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", one_by_one)
        yield {name: (str(folder), save_oracle(CONFIGS[name], folder)) for name, folder in folders.items()}


@pytest.fixture(params=CONFIGS)
def pair(request, oracles) -> tuple[str, Any]:
    """(folder, transformers' model in fp32)."""
    return oracles[request.param]


def test_logits_and_greedy_tokens_in_fp32_equal_transformers(pair):
    folder, oracle = pair
    ours, token_ids = load_model(folder, torch.float32, CPU).model, random_tokens()
    expected = oracle_logits(oracle, token_ids)
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits_of(ours, token_ids), expected, rtol=0, atol=FP32_TOLERANCE)
    assert greedy(ours, token_ids[:12], 16) == greedy_oracle(oracle, token_ids[:12], 16)


def test_logits_in_bf16_are_as_near_to_fp32_as_those_of_transformers(pair):
    folder, oracle = pair
    token_ids = random_tokens()
    expected = oracle_logits(oracle, token_ids)
    theirs = oracle_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), token_ids)
    error = error_of(logits_of(load_model(folder, torch.bfloat16, CPU).model, token_ids), expected)
    assert error < BF16_TOLERANCE and error < 1.25 * error_of(theirs, expected)


# ---------------------------------------------------------------- in an engine

ENGINE = {"model.dtype": "float32", "kv.num_blocks": 120, "executor.num_threads": 1, "debug.check": True}
ENGINE |= {"engine.core": "inproc", "scheduler.max_num_seqs": 4, "kv.block_size": 4}
BLOCK = 16  # tokens: what a state of these takes
SHARED = random_tokens(2, 75)  # more than two blocks
PROMPTS = [random_tokens(1, 7), SHARED + random_tokens(7, 6), SHARED[:40] + random_tokens(8, 3)]
AGAIN = [SHARED, SHARED + random_tokens(9, 30)]
WAYS = {
    "chunks": {"runner.attention": "cpu", "scheduler.max_num_batched_tokens": 16},
    "reference": {"runner.attention": "reference", "runner.inputs": "rebuild"},
    "radix": {"runner.attention": "sdpa", "runner.inputs": "gather", "kv.prefix": "radix"},
    "pieces": {"runner.forward": "piecewise", "runner.compile": "off"},
    "graphs": {"runner.graphs": "full+piecewise", "runner.forward": "eager", "runner.attention": "reference"},
    "overlap": {"engine.overlap": 2},
    "preempted": {"scheduler.max_num_batched_tokens": 16, "debug.preempt_every": 5},
    "swapped": {"kv.preemption": "swap", "kv.swap_memory": "4MiB", "debug.preempt_every": 5},
    "preempted and overlap": {"debug.preempt_every": 5, "engine.overlap": 2},
    "phased": {"scheduler.kind": "phased", "scheduler.chunked_prefill": False, "kv.preemption": "swap"},
    "few blocks": {"kv.num_blocks": 50},
    "naive": {"executor.kind": "naive", "kv.prefix": "none"},
}


def tokens_of(llm: LLM, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def wanted(oracles) -> list[list[int]]:
    """transformers' 64 tokens behind each of PROMPTS and AGAIN."""
    return [greedy_oracle(oracles["as published"][1], prompt, 64) for prompt in PROMPTS + AGAIN]


def test_an_engine_gives_64_tokens_of_transformers_and_says_how_it_runs(oracles, wanted):
    with LLM(oracles["as published"][0], overrides=ENGINE) as llm:
        assert tokens_of(llm, PROMPTS, 64) + tokens_of(llm, AGAIN, 64) == wanted
        said = {decision.field: (str(decision.value), decision.reason) for decision in llm.decisions}
        assert llm.config.kv.block_size == BLOCK
    assert said["kv.block_size"][0] == str(BLOCK) and "recurrent state, which takes 7.9 KiB" in said["kv.block_size"][1]
    assert "layers in groups: 1 of all tokens, 1 of a state, 1 of a state, 1 of a state" in said["kv.num_blocks"][1]
    assert "3 of 4 layers have recurrent states" in said["runner.forward"][1]


def test_a_prefix_is_found_where_a_block_ends_and_costs_no_token(oracles, wanted):
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with LLM(oracles["as published"][0], overrides=ENGINE) as llm:
        for prompt, tokens, num_found in ((PROMPTS[1], wanted[1], 0), (AGAIN[1], wanted[4], 64)):
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            assert (output.num_cached_tokens, list(output.outputs[0].token_ids)) == (num_found, tokens[:20])


@pytest.mark.parametrize("way", WAYS)
def test_whatever_else_is_on_the_tokens_are_those_of_transformers(way, oracles, wanted):
    with LLM(oracles["as published"][0], overrides=ENGINE | WAYS[way]) as llm:
        found = tokens_of(llm, PROMPTS, 40) + tokens_of(llm, AGAIN, 40)  # the second time prefixes are found
    assert found == [tokens[:40] for tokens in wanted]


def test_samples_of_one_prompt_that_share_its_blocks_are_those_that_do_not(oracles):
    """V0's fork: a partly filled block, and the states in it, are copied."""
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
    texts = []
    for fork in ("share", "lookup"):
        options = {"scheduler.kind": "phased", "scheduler.chunked_prefill": False, "kv.fork": fork, "kv.prefix": "none"}
        with LLM(oracles["as published"][0], overrides=ENGINE | options) as llm:
            (output,) = llm.generate([PROMPTS[1]], params, use_tqdm=False)
        texts.append([list(each.token_ids) for each in output.outputs])
    assert texts[0] == texts[1] and len({tuple(tokens) for tokens in texts[0]}) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spec_decode.method": "ngram"}, "a recurrent state, which this model's layers keep, cannot go back"),
        ({"kv.allocation": "max", "kv.prefix": "none"}, "kv.allocation=max gives a request one run"),
        ({"model.invariant": True}, "a state takes many tokens by products"),
    ],
)
def test_what_a_state_cannot_do_is_refused(options, message, oracles):
    with pytest.raises(ConfigError, match=message):
        LLM(oracles["as published"][0], overrides=ENGINE | options)


@pytest.mark.parametrize("placement", [Placement(pp=2, stages=(3, 2)), Placement(pp=2, stages=(2, 3))], ids=str)
def test_ranks_give_the_logits_of_one_device_and_of_transformers(placement, oracles):
    folder, oracle = oracles["odd"]
    text = random_tokens(length=24)
    expected, alone = oracle_logits(oracle, text), run(folder, ONE_DEVICE, text)
    for logits in together(folder, placement, [text])[0]:
        torch.testing.assert_close(logits, alone, rtol=0, atol=FP32_TOLERANCE)
        torch.testing.assert_close(logits, expected, rtol=0, atol=FP32_TOLERANCE)


@pytest.mark.parametrize(
    ("placement", "message"),
    [(Placement(tp=2), "tp must be 1"), (Placement(pp=2), "each stage must have a layer of attention")],
    ids=str,
)
def test_what_has_no_place_over_ranks_is_refused(placement, message, oracles):
    with pytest.raises(ModelError, match=message):
        Device(oracles["as published"][0], all_ranks(placement)[0])


# ---------------------------------------------------------------- files


def test_of_a_model_that_sees_the_text_decoder_is_read(oracles, tmp_path):
    """Qwen's own files: names below model.language_model, beside them what it sees with and what guesses tokens."""
    folder, oracle = oracles["as published"]
    tensors = load_file(Path(folder) / "model.safetensors")
    whole = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    for name in ("model.visual.patch_embed.proj.weight", "mtp.layers.0.input_layernorm.weight"):
        whole[name] = torch.zeros(3)
    save_file(whole, tmp_path / "model.safetensors")
    text = json.loads((Path(folder) / "config.json").read_text())
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vision_config": {}, "tie_word_embeddings": False}))
    write_tokenizer(tmp_path, SHAPE["vocab_size"])
    ids = random_tokens(length=20)
    found = logits_of(load_model(str(tmp_path), torch.float32, CPU).model, ids)
    torch.testing.assert_close(found, oracle_logits(oracle, ids), rtol=0, atol=FP32_TOLERANCE)


# ---------------------------------------------------------------- configs

BASE = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 64, "vocab_size": 100}
BASE |= {"num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 128}


def test_what_a_config_leaves_out_is_what_transformers_takes():
    assert read_spec(BASE) == read_spec(BASE | Qwen3_5TextConfig(**BASE).to_dict())
    assert read_spec(BASE).linear == (True, True, True, False) * 2
    assert read_spec(BASE | {"full_attention_interval": 2}).linear == (True, False) * 4
    assert read_spec(BASE).state == GatedDelta(16, 32, 128, 128, 4) and read_spec(BASE).rotary_size == 64
    assert read_spec(BASE | {"architectures": None}) == read_spec(BASE)


def test_qwens_smallest_has_as_many_parameters_as_its_name_says():
    """0.75 billion in the text decoder; what it sees with has the rest."""
    assert dummy_spec("qwen3.5-0.8b").num_parameters == pytest.approx(0.75e9, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, 'hidden_act "gelu" is not supported'),
        ({"layer_types": ["linear_attention"]}, "layer_types must name linear_attention or full_attention for 8"),
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types must name"),
        ({"layer_types": ["linear_attention"] * 8}, "a model of states alone is not supported"),
        ({"linear_num_key_heads": 3}, "32 value heads cannot share 3 key heads"),
        ({"linear_conv_kernel_dim": 0}, '"linear_conv_kernel_dim" must be a positive int'),
        ({"architectures": ["Qwen3_5ForConditionalGeneration"]}, "text_config is missing"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        read_spec(BASE | changes)
