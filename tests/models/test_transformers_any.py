"""Rules: transformers' own code in the engine computes what transformers does, alone and whatever else is on; what it
would compute otherwise is refused in a sentence before anything is served."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from lora.adapters import write_adapter
from models.pairs import FP32_TOLERANCE, SMALL, greedy_oracle, oracle_logits, random_tokens, save_oracle
from naive_attention import logits_of
from safetensors.torch import load_file

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError, ModelError
from minivllm.loading import load_model, resolve
from minivllm.models import read_spec
from minivllm.parallel.placement import Placement

CPU = torch.device("cpu")
EXPERTS = {"num_experts": 12, "num_experts_per_tok": 2, "norm_topk_prob": True}  # 12: names do not sort by number
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32}
GROUPS |= {"num_experts_per_tok": 2}
GPT2 = {"vocab_size": 320, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "initializer_range": 0.2}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "part of a head rotated": ("PhiForCausalLM", SMALL),
    "learned positions": ("GPT2LMHeadModel", GPT2),
    "windows and soft caps": ("Gemma2ForCausalLM", SMALL | {"head_dim": 16, "sliding_window": 8}),
    "experts by number": ("OlmoeForCausalLM", SMALL | EXPERTS),
    "values shorter than keys": ("DeepseekV3ForCausalLM", SMALL | MLA | GROUPS | {"num_key_value_heads": 4}),
}


def tiny(name: str, sizes: dict[str, Any]) -> Any:
    return getattr(transformers, name).config_class(**sizes)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict[str, tuple[str, Any]]:
    """{what: (folder, transformers' model in fp32)}, made as they are asked for."""

    class Pairs(dict):
        def __missing__(self, what: str) -> tuple[str, Any]:
            folder: Path = tmp_path_factory.mktemp("model")
            self[what] = str(folder), save_oracle(tiny(*CONFIGS[what]), folder)
            return self[what]

    return Pairs()


ENGINE = {"model.dtype": "float32", "kv.num_blocks": 400, "kv.block_size": 4, "executor.num_threads": 1}
ENGINE |= {"debug.check": True, "engine.core": "inproc", "scheduler.max_num_seqs": 4}
ENGINE |= {"scheduler.max_num_batched_tokens": 16, "model.network": "transformers"}
PROMPTS = [random_tokens(1, 7), random_tokens(2, 40), random_tokens(2, 40)[:22] + random_tokens(3, 4)]


def tokens_of(llm: LLM, num_tokens: int, **more: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return [list(out.outputs[0].token_ids) for out in llm.generate(PROMPTS, params, use_tqdm=False, **more)]


@pytest.mark.parametrize("what", CONFIGS)
def test_logits_and_greedy_tokens_are_those_of_transformers(what, pairs):
    folder, oracle = pairs[what]
    text, ours = random_tokens(), load_model(folder, torch.float32, CPU, network="transformers").model
    expected = oracle_logits(oracle, text)
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits_of(ours, text), expected, rtol=0, atol=FP32_TOLERANCE)
    wanted = [greedy_oracle(oracle, prompt, 12) for prompt in PROMPTS]
    with LLM(folder, overrides=ENGINE) as llm:
        assert tokens_of(llm, 12) == wanted and tokens_of(llm, 12) == wanted  # the second time prefixes are found
        said = {decision.field: (str(decision.value), decision.reason) for decision in llm.decisions}
    assert said["model.network"][0] == "transformers" and "attentions" in said["model.network"][1]


WAYS = {
    "preempted": {"kv.num_blocks": 60, "debug.preempt_every": 5},
    "swapped": {"kv.preemption": "swap", "kv.swap_memory": "1MiB", "debug.preempt_every": 5},
    "look-up": {"spec_decode.method": "ngram", "spec_decode.ngram_min": 1, "spec_decode.adaptive": False},
    "overlap": {"engine.overlap": 2},
    "gathered": {"runner.attention": "sdpa", "runner.inputs": "gather", "kv.prefix": "radix"},
}


@pytest.mark.parametrize("way", WAYS)
def test_whatever_else_is_on_the_tokens_are_those_of_transformers(way, pairs):
    folder, oracle = pairs["windows and soft caps"]
    with LLM(folder, overrides=ENGINE | WAYS[way]) as llm:
        assert tokens_of(llm, 12) == [greedy_oracle(oracle, prompt, 12) for prompt in PROMPTS]


def test_windows_and_caps_are_measured_where_the_network_asks_for_them(pairs):
    layers = load_model(pairs["windows and soft caps"][0], torch.float32, CPU, network="transformers")
    assert [layer.sliding_window for layer in layers.model.attention_layers] == [8, None, 8]
    assert {layer.soft_cap for layer in layers.model.attention_layers} == {50.0}


def test_an_architecture_with_a_file_here_runs_both_ways(tmp_path):
    oracle = save_oracle(tiny("LlamaForCausalLM", SMALL), tmp_path)
    text = random_tokens()
    own, theirs = (load_model(str(tmp_path), torch.float32, CPU, network=n) for n in ("auto", "transformers"))
    assert own.network is None and type(own.model).__name__ == "LlamaModel"
    assert theirs.network is not None
    for loaded in (own, theirs):
        torch.testing.assert_close(logits_of(loaded.model, text), oracle_logits(oracle, text), rtol=0, atol=2e-4)


def test_weights_in_8_bits_go_through_the_engines_linear_layers(pairs):
    folder, oracle = pairs["part of a head rotated"]
    loaded = load_model(folder, torch.float32, CPU, quantization="int8", network="transformers")
    assert loaded.quantised is not None and len(loaded.quantised.layers) == 19
    expected, text = oracle_logits(oracle, random_tokens()), random_tokens()
    apart = (logits_of(loaded.model, text) - expected).norm() / expected.norm()
    assert 0 < apart < 0.05  # a step of 8 bits of a group's largest weight is 1/127 of it


def test_an_adapter_is_the_model_with_merged_weights(pairs, tmp_path):
    folder, oracle = pairs["part of a head rotated"]
    shapes = {"self_attn.q_proj": (64, 64), "self_attn.dense": (64, 64), "mlp.fc1": (96, 64), "mlp.fc2": (64, 96)}
    targets = [name.rpartition(".")[2] for name in shapes]
    made = write_adapter(tmp_path, 0, targets=targets, shapes=shapes, num_layers=3)
    adapter = load_file(made / "adapter_model.safetensors")
    merged, start = copy.deepcopy(oracle), "base_model.model."
    for name in (name for name in adapter if name.endswith("lora_A.weight")):
        change = 2.0 * adapter[name.replace("lora_A", "lora_B")] @ adapter[name]
        merged.get_submodule(name.removeprefix(start).removesuffix(".lora_A.weight")).weight.data += change
    expected = [greedy_oracle(of, prompt, 8) for of, prompt in zip((merged, oracle, merged), PROMPTS, strict=True)]
    with LLM(folder, overrides=ENGINE | {"lora.enabled": True, "lora.adapters": {"a": str(tmp_path)}}) as llm:
        assert tokens_of(llm, 8, lora_request=["a", None, "a"]) == expected


# ------------------------------------------------------------------------------------------------------- refusals

STATE = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
REFUSED = {
    "BloomForCausalLM": ({"vocab_size": 320, "hidden_size": 64, "n_layer": 3, "n_head": 4}, "of 3 layers 0 gave"),
    "FalconForCausalLM": (SMALL, "chooses its attention from a table of its own"),
    "GptOssForCausalLM": (SMALL | {"head_dim": 16, "num_local_experts": 4}, "its attention has sinks"),
    "FalconH1ForCausalLM": (SMALL | STATE, "its layers keep a state"),
    "BertLMHeadModel": (SMALL, "its (mask|attention) is n"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_is_refused_before_anything_is_served(name, tmp_path):
    sizes, message = REFUSED[name]
    save_oracle(tiny(name, sizes), tmp_path)
    with pytest.raises(ModelError, match=message) as error:
        load_model(str(tmp_path), torch.float32, CPU, network="transformers")
    assert name in str(error.value) and "\n" not in str(error.value)


def test_attention_that_does_not_come_to_the_engine_is_counted(pairs, monkeypatch):
    """One layer of three attends by itself."""
    from transformers.models.phi import modeling_phi

    usual = modeling_phi.PhiAttention.forward

    def by_itself(self, *args, **kwargs):
        if self.layer_idx == 1:
            return args[0] if args else kwargs["hidden_states"], None
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(modeling_phi.PhiAttention, "forward", by_itself)
    with pytest.raises(ModelError, match="of 3 layers 2 gave their attention to the engine"):
        load_model(pairs["part of a head rotated"][0], torch.float32, CPU, network="transformers")


def test_what_is_kept_of_a_request_beside_k_and_v_shows_in_a_batch(pairs, monkeypatch):
    """Each token is given a part of the one before it in the batch, whosever that is."""
    from transformers.models.phi import modeling_phi

    usual = modeling_phi.PhiMLP.forward
    monkeypatch.setattr(
        modeling_phi.PhiMLP, "forward", lambda self, x: usual(self, x + 0.1 * x.roll(1, 1) * (x.shape[1] > 7))
    )
    with pytest.raises(ModelError, match="of two requests in one batch are"):
        load_model(pairs["part of a head rotated"][0], torch.float32, CPU, network="transformers")


def test_what_is_kept_between_two_steps_shows_in_a_trial(pairs, monkeypatch):
    """A token is given a part of what came before it in the request; requests of the batch are told apart."""
    from transformers.models.phi import modeling_phi

    from minivllm.models.transformers_any import LENGTHS

    usual, ends = modeling_phi.PhiMLP.forward, (LENGTHS[0], sum(LENGTHS))

    def with_the_last(self, x):
        before = x.roll(1, 1)
        before[:, 0] = 0
        if x.shape[1] == ends[1]:
            before[:, ends[0]] = 0
        return usual(self, x + 0.1 * before)

    monkeypatch.setattr(modeling_phi.PhiMLP, "forward", with_the_last)
    with pytest.raises(ModelError, match="of a request in two steps are"):
        load_model(pairs["part of a head rotated"][0], torch.float32, CPU, network="transformers")


def test_many_devices_are_refused(pairs):
    with pytest.raises(ModelError, match="is not spread over devices"):
        load_model(
            pairs["part of a head rotated"][0],
            torch.float32,
            CPU,
            ranks=SimpleNamespace(placement=Placement(tp=2)),
            network="transformers",
        )


def test_what_has_no_code_there_or_no_folder_is_refused_by_name(pairs):
    with pytest.raises(ModelError, match="is for a folder of safetensors"):
        resolve("dummy:tiny", network="transformers")
    with pytest.raises(ModelError, match='"NobodysForCausalLM" is not supported'):
        read_spec({"architectures": ["NobodysForCausalLM"]})
    with pytest.raises(ModelError, match='"OlmoeForCausalLM" is not supported'):
        read_spec({"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe"}, network="own")
    with pytest.raises(ConfigError, match="model.invariant=true: transformers' own code"):
        LLM(pairs["part of a head rotated"][0], overrides=ENGINE | {"model.invariant": True})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "layers of the kind linear_attention keep more"),
        ({"vocab_size": 0}, '"vocab_size" must be a positive int'),
        ({"is_encoder_decoder": True}, "is run for decoders alone"),
    ],
)
def test_a_config_that_cannot_be_is_refused_before_weights_are_read(changes, message):
    config = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", **SMALL, "num_hidden_layers": 2}
    with pytest.raises(ModelError, match=message):
        read_spec(config | changes)


def test_a_rope_that_depends_on_the_longest_request_is_served_as_far_as_it_does_not():
    config = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", **SMALL, "max_position_embeddings": 512}
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_parameters": long | {"original_max_position_embeddings": 128}, "pad_token_id": 0}
    assert read_spec(config | {"pad_token_id": 0}, network="transformers").max_position == 512
    assert (
        read_spec(config | rope | {"original_max_position_embeddings": 128}, network="transformers").max_position == 128
    )
