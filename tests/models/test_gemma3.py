"""Rules: Gemma 3 computes what transformers does, alone, in an engine whatever else is on, over ranks and out of a GGUF
file; what it would compute otherwise is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from loading.gguf_fixture import hf_tensors, write_gguf
from lora.adapters import write_adapter
from models.pairs import (
    BF16_TOLERANCE,
    FP32_TOLERANCE,
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
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig
from transformers.models.gemma3 import modeling_gemma3

from minivllm import LLM, SamplingParams, StructuredParams
from minivllm.errors import ModelError
from minivllm.loading import load_model, resolve
from minivllm.models import read_spec
from minivllm.models.spec import RopeSpec
from minivllm.parallel.placement import Placement
from minivllm.runner.naive_worker import load_transformers

CPU = torch.device("cpu")
SHAPE = SMALL | {"num_hidden_layers": 6, "head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24}
FULL, SLIDING = "full_attention", "sliding_attention"
SCALED = {
    FULL: {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 8.0},
    SLIDING: {"rope_type": "default", "rope_theta": 500.0},
}
CONFIGS = {
    "as published": Gemma3TextConfig(**SHAPE),  # the sixth layer sees everything
    "scaled": Gemma3TextConfig(**SHAPE, rope_parameters=SCALED, layer_types=[FULL, SLIDING, SLIDING] * 2),
    "odd": Gemma3TextConfig(
        **SHAPE | {"num_key_value_heads": 1},
        attention_bias=True,
        tie_word_embeddings=False,
        final_logit_softcapping=3.0,
        layer_types=[SLIDING, FULL] * 3,
    ),
}


@pytest.fixture(scope="module")
def oracles(tmp_path_factory) -> dict[str, tuple[str, Any]]:
    folders = {name: tmp_path_factory.mktemp(name.replace(" ", "_")) for name in CONFIGS}
    return {name: (str(folder), save_oracle(CONFIGS[name], folder)) for name, folder in folders.items()}


@pytest.fixture(params=CONFIGS)
def pair(request, oracles) -> tuple[str, Any]:
    """(folder, transformers' model in fp32)."""
    return oracles[request.param]


def test_logits_and_greedy_tokens_in_fp32_equal_transformers(pair):
    check_in_fp32(*pair)


def test_logits_in_bf16_are_as_near_to_fp32_as_those_of_transformers(pair):
    """Errors add up like a random walk (pairs.py), and these are twice its layers."""
    check_in_bf16(*pair, 2**0.5 * BF16_TOLERANCE)


@pytest.mark.parametrize("attention", ["auto", "reference"])
def test_scores_are_capped_where_the_config_says_so(attention, tmp_path, monkeypatch):
    """transformers' Gemma 3 leaves the field alone; its function of attention is Gemma 2's, and knows the cap."""
    config = Gemma3TextConfig(**SHAPE, attn_logit_softcapping=2.0, attn_implementation="eager")
    oracle = save_oracle(config, tmp_path)
    uncapped, eager = oracle_logits(oracle, random_tokens()), modeling_gemma3.eager_attention_forward
    monkeypatch.setattr(modeling_gemma3, "eager_attention_forward", lambda *a, **k: eager(*a, **k, softcap=2.0))
    expected = oracle_logits(oracle, random_tokens())
    assert not torch.allclose(uncapped, expected, atol=0.1)
    found = prompt_logprobs(str(tmp_path), random_tokens(), **{"runner.attention": attention})
    wanted = expected.log_softmax(-1)[range(47), random_tokens()[1:]]
    # Beside the logit itself the sum over all counts, which errs less.
    torch.testing.assert_close(found, wanted, rtol=0, atol=2 * FP32_TOLERANCE)


def prompt_logprobs(folder: str, prompt: list[int], **options: Any) -> Tensor:
    with LLM(folder, overrides=ENGINE | options) as llm:
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    found = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    return torch.tensor([of[token].logprob for of, token in found])


# ---------------------------------------------------------------- in an engine

ENGINE = {"model.dtype": "float32", "kv.num_blocks": 400, "kv.block_size": 4, "executor.num_threads": 1}
ENGINE |= {"debug.check": True, "engine.core": "inproc", "scheduler.max_num_seqs": 4}
SHARED = random_tokens(2, 40)
PROMPTS = [random_tokens(1, 7), SHARED + random_tokens(7, 6), SHARED[:22] + random_tokens(8, 3)]
AGAIN = [SHARED, SHARED + random_tokens(9, 9)]
WAYS = {
    "chunks": {"runner.attention": "cpu", "scheduler.max_num_batched_tokens": 16},
    "reference": {"runner.attention": "reference", "runner.inputs": "rebuild"},
    "radix": {"runner.attention": "sdpa", "runner.inputs": "gather", "kv.prefix": "radix"},
    "pieces": {"runner.forward": "piecewise", "runner.compile": "off"},
    "recorded": {"runner.graphs": "full+piecewise", "runner.forward": "eager", "runner.attention": "reference"},
    "overlap": {"engine.overlap": 2},
    "preempted": {"kv.num_blocks": 100, "scheduler.max_num_batched_tokens": 16, "debug.preempt_every": 5},
    "swapped": {"kv.preemption": "swap", "kv.swap_memory": "1MiB", "debug.preempt_every": 5},
    "look-up": {"spec_decode.method": "ngram", "spec_decode.ngram_min": 1, "spec_decode.adaptive": False},
    "own layers": {"spec_decode.method": "self_draft", "spec_decode.layers": 2, "spec_decode.adaptive": False},
    "one run": {"kv.allocation": "max", "kv.prefix": "none", "model.max_model_len": 120},
    "powers of two": {"kv.allocation": "pow2", "kv.prefix": "none", "model.max_model_len": 120},
    "invariant": {"model.invariant": True},
    "naive": {"executor.kind": "naive", "kv.prefix": "none"},
}


def tokens_of(llm: LLM, prompts: list[list[int]], num_tokens: int, **more: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False, **more)]


@pytest.fixture(scope="module")
def wanted(oracles) -> list[list[int]]:
    """transformers' 64 tokens behind each of PROMPTS and AGAIN."""
    return [greedy_oracle(oracles["scaled"][1], prompt, 64) for prompt in PROMPTS + AGAIN]


def test_an_engine_gives_64_tokens_of_transformers_and_says_how_it_runs(oracles, wanted):
    with LLM(oracles["scaled"][0], overrides=ENGINE) as llm:
        assert tokens_of(llm, PROMPTS, 64) + tokens_of(llm, AGAIN, 64) == wanted
        said = {decision.field: (str(decision.value), decision.reason) for decision in llm.decisions}
    assert "layers in groups: 2 of all tokens, 2 of 8 tokens, 2 of 8 tokens" in said["kv.num_blocks"][1]
    assert said["runner.forward"][0] == "fused"


@pytest.mark.parametrize("way", WAYS)
def test_whatever_else_is_on_the_tokens_are_those_of_transformers(way, oracles, wanted):
    with LLM(oracles["scaled"][0], overrides=ENGINE | WAYS[way]) as llm:
        found = tokens_of(llm, PROMPTS, 16) + tokens_of(llm, AGAIN, 16)  # the second time prefixes are found
        said = {decision.field: decision.value for decision in llm.decisions}
    assert found == [tokens[:16] for tokens in wanted]
    usual = {"runner.forward": "eager" if way == "naive" else "fused", "runner.graphs": "none"}
    for field, value in usual.items():
        asked = WAYS[way].get(field, value)
        assert said.get(field, asked) == asked


def test_an_answer_follows_its_grammar(oracles):
    params = SamplingParams(max_tokens=8, structured=StructuredParams(regex="[ab]{3}"))
    with LLM(oracles["scaled"][0], overrides=ENGINE) as llm:
        texts = [output.outputs[0].text for output in llm.generate(["hello", "ab"], params, use_tqdm=False)]
    assert all(len(text) == 3 and set(text) <= {"a", "b"} for text in texts), texts


LINEAR = {"self_attn.q_proj": (128, 64), "self_attn.k_proj": (64, 64), "self_attn.v_proj": (64, 64)}
LINEAR |= {"self_attn.o_proj": (64, 128), "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96)}


def test_an_adapter_is_the_model_with_merged_weights(oracles, wanted, tmp_path):
    folder, oracle = oracles["scaled"]
    adapter = load_file(write_adapter(tmp_path, 0, shapes=LINEAR, num_layers=6) / "adapter_model.safetensors")
    merged, start = copy.deepcopy(oracle), "base_model.model."
    for name in (name for name in adapter if name.endswith("lora_A.weight")):
        change = 2.0 * adapter[name.replace("lora_A", "lora_B")] @ adapter[name]
        merged.get_submodule(name.removeprefix(start).removesuffix(".lora_A.weight")).weight.data += change
    expected = [greedy_oracle(merged, PROMPTS[0], 12), wanted[1][:12], greedy_oracle(merged, PROMPTS[2], 12)]
    lora = {"lora.enabled": True, "lora.adapters": {"a": str(tmp_path)}}
    with LLM(folder, overrides=ENGINE | lora) as llm:
        assert tokens_of(llm, PROMPTS, 12, lora_request=["a", None, "a"]) == expected


# ---------------------------------------------------------------- over ranks


@pytest.mark.parametrize(
    "name, placement",
    [
        ("scaled", Placement(tp=2)),
        ("odd", Placement(tp=2)),
        ("odd", Placement(tp=4)),
        ("scaled", Placement(pp=3)),
        ("scaled", Placement(tp=2, pp=2, stages=(2, 4))),
    ],
    ids=str,
)
def test_ranks_give_the_logits_of_one_device_and_of_transformers(name, placement, oracles):
    check_ranks(placement, *oracles[name])


# ---------------------------------------------------------------- GGUF

SCALING = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
SCALING |= {"gemma3.attention.sliding_window_pattern": 2, "gemma3.rope.freq_base_swa": 500.0}
WINDOW = {"gemma3.attention.sliding_window": 8}


def write_gemma(path: Path, head_size: int = 32, extra: dict[str, Any] | None = None) -> None:
    tensors = hf_tensors("qwen3", True, head_size)  # with QK-norm; all norms are about 1, as in Gemma's files
    post = {f"blk.{i}.{name}.weight": f"blk.{i}.attn_norm.weight" for i in (0, 1) for name in POST_NORMS}
    tensors |= {name: tensors[like][::-1].copy() for name, like in post.items()}
    write_gguf(path, "gemma3", head_size=head_size, tensors=tensors, extra=WINDOW | (extra or {}))


POST_NORMS = ("post_attention_norm", "post_ffw_norm")


def test_a_gguf_file_is_read_as_by_transformers_own_loader(tmp_path):
    """transformers knows nothing of the scale of scores, and takes that of heads of 256; nor of a pattern."""
    write_gemma(tmp_path / "m.gguf", head_size=256)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    ours = load_model(str(tmp_path / "m.gguf"), torch.float32, CPU, cache_dir=tmp_path / "cache").model
    ids = list(range(3, 43))
    torch.testing.assert_close(logits_of(ours, ids), oracle_logits(oracle, ids), rtol=0, atol=FP32_TOLERANCE)


def test_a_gguf_files_pattern_bases_and_norms_are_those_of_the_config_made_of_it(tmp_path):
    write_gemma(tmp_path / "m.gguf", extra=SCALING)
    files = resolve(str(tmp_path / "m.gguf"), tmp_path / "cache")
    assert files.spec.windows == (8, None) and files.spec.scale == 32**-0.5
    assert (files.spec.rope, files.spec.local_rope) == (RopeSpec("linear", 1e4, 8.0), RopeSpec("default", 500.0))
    ours = load_model(str(tmp_path / "m.gguf"), torch.float32, CPU, cache_dir=tmp_path / "cache").model
    oracle = load_transformers(files, torch.float32, CPU, 0)
    ids = list(range(3, 43))
    torch.testing.assert_close(logits_of(ours, ids), oracle_logits(oracle, ids), rtol=0, atol=FP32_TOLERANCE)


def test_a_gguf_file_without_a_window_sees_everything(tmp_path):
    write_gemma(tmp_path / "m.gguf", extra={"gemma3.attention.sliding_window": 0})
    assert resolve(str(tmp_path / "m.gguf"), tmp_path / "cache").spec.windows == (None, None)


# ---------------------------------------------------------------- configs

BASE = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 64, "vocab_size": 100}
BASE |= {"num_hidden_layers": 7, "num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 128}


def test_older_configs_mean_what_newer_ones_say():
    older = {"rope_theta": 5e4, "rope_local_base_freq": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert read_spec(BASE | older) == read_spec(BASE | {"rope_parameters": SCALED})
    assert read_spec(BASE | {"architectures": None}) == read_spec(BASE)


def test_what_a_config_leaves_out_is_what_transformers_takes():
    assert read_spec(BASE) == read_spec(BASE | Gemma3TextConfig(**BASE).to_dict())
    assert read_spec(BASE).windows == (4096,) * 5 + (None, 4096)
    assert read_spec(BASE | {"sliding_window_pattern": 2}).windows[:3] == (4096, None, 4096)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "gelu"}, 'hidden_activation "gelu" is not supported'),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, '"Gemma3ForConditionalGeneration" is not supported'),
        ({"architectures": ["Gemma3TextModel"]}, '"Gemma3TextModel" is not supported'),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters must be by kind of layer"),
        ({"layer_types": ["sliding_attention"]}, "layer_types must name"),
        ({"sliding_window": None}, '"sliding_window" must be a positive int'),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ({"final_logit_softcapping": 0.0}, '"final_logit_softcapping" must be a positive'),
        ({"query_pre_attn_scalar": "256"}, '"query_pre_attn_scalar" must be a positive'),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes, message):
    with pytest.raises(ModelError, match=message):
        read_spec(BASE | changes)


def test_float16_is_refused(oracles):
    with pytest.raises(ModelError, match="do not fit float16"):
        load_model(oracles["scaled"][0], torch.float16, CPU)
