"""Rule: a ModelSpec says exactly what the config says, and refuses what would be computed otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minivllm.errors import ModelError
from minivllm.models import FILES, GGUF_FILES, MODEL_FILES, MODELS, ModelFile, read_gguf_names, read_spec
from minivllm.models.llama_config import FAMILIES
from minivllm.models.spec import ConfigReader, ExpertsSpec, ModelSpec

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}

QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE |= {"moe_intermediate_size": 48}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}


def spec(**changes) -> ModelSpec:
    return read_spec({k: v for k, v in (BASE | changes).items() if v is not None})


def test_every_row_leads_to_a_network_a_reader_and_its_gguf_names():
    for file in MODEL_FILES:
        assert callable(file.read_config) and callable(file.get(file.network))
        assert all(MODELS.get(name) is file.get(file.network) for name in file.architectures)
    assert all(read_gguf_names(name).layer for name in GGUF_FILES)
    assert set(FAMILIES) == {name for name, file in FILES.items() if file.network == "LlamaModel"}


def test_another_model_is_its_file_and_one_row(monkeypatch):
    """What names an architecture reads the rows: nothing else has to be told of it."""
    import sys
    from types import SimpleNamespace

    from minivllm import models

    def read_config(reader: ConfigReader, architecture: str) -> ModelSpec:
        return replace(llama, architecture=architecture, max_position=reader.need("n_positions"))

    llama = spec()
    row = ModelFile("mine", "Network", {"MineForCausalLM": "mine"})
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(read_config=read_config))
    monkeypatch.setitem(models.FILES, "MineForCausalLM", row)
    monkeypatch.setattr(models, "MODEL_FILES", (*MODEL_FILES, row))
    assert read_spec({"architectures": ["MineForCausalLM"], "n_positions": 7}).max_position == 7
    assert read_spec({"model_type": "mine", "n_positions": 7}).architecture == "MineForCausalLM"
    with pytest.raises(ModelError, match='"n_positions" must be a positive int'):
        read_spec({"architectures": ["MineModel"]})


def test_old_and_new_rope_fields_mean_the_same():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = spec(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling})
    new = spec(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert old.rope == new.rope
    assert (old.rope.theta, old.rope.kind, old.rope.original_max_position) == (5e5, "llama3", 64)


def test_the_type_field_of_the_oldest_configs_is_read():
    assert spec(rope_scaling={"type": "linear", "factor": 2.0}).rope.kind == "linear"


def test_head_size_is_taken_from_the_config_the_family_or_the_quotient():
    assert spec(head_dim=24).head_size == 24
    assert spec().head_size == 16
    assert spec(architectures=["Qwen3ForCausalLM"]).head_size == 128


def test_biases_follow_family_and_config():
    qwen2, llama = spec(architectures=["Qwen2ForCausalLM"]), spec(attention_bias=True, mlp_bias=True)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (True, False, False)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, (8, 8, 8, 8)),
        ({"architectures": ["MistralForCausalLM"]}, (4096,) * 4),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}, (None,) * 4),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 3,
            },
            (None, None, None, 8),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
        ({"sliding_window": 8}, (None,) * 4),  # Llama has none
    ],
)
def test_each_layer_has_the_window_of_its_family(changes, expected):
    assert spec(**changes).windows == expected


def test_a_window_that_is_null_is_none():
    config = BASE | {"architectures": ["MistralForCausalLM"], "sliding_window": None}
    assert read_spec(config).windows == (None,) * 4


def test_eos_ids_are_the_union_of_both_files():
    made = read_spec(BASE | {"eos_token_id": 2}, {"eos_token_id": [5, 2]})
    assert made.eos_token_ids == (5, 2)


def test_yarn_extends_the_longest_position():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert spec(rope_parameters=yarn).max_position == 512


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (QWEN3_MOE, ExpertsSpec(8, 2, 48, False, (True,) * 4)),
        (QWEN3_MOE | {"norm_topk_prob": True, "mlp_only_layers": []}, ExpertsSpec(8, 2, 48, True, (True,) * 4)),
        (QWEN3_MOE | {"num_experts": None, "num_local_experts": 8}, ExpertsSpec(8, 2, 48, False, (True,) * 4)),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, ExpertsSpec(8, 2, 48, False, (False, True) * 2)),
        (QWEN3_MOE | {"mlp_only_layers": [0, 3]}, ExpertsSpec(8, 2, 48, False, (False, True, True, False))),
        (MIXTRAL | {"router_jitter_noise": 0.1}, ExpertsSpec(8, 2, 96, True, (True,) * 4)),
        ({}, None),
    ],
)
def test_each_layer_has_the_experts_that_the_config_says(changes, expected):
    assert spec(**changes).experts == expected


def test_mixtrals_defaults_are_its_own():
    made = spec(**MIXTRAL)
    assert (made.rope.theta, made.rms_eps, made.windows) == (1e6, 1e-5, (None,) * 4)
    assert spec(**MIXTRAL, sliding_window=8, rope_theta=1e4).windows == (8,) * 4


def test_every_expert_counts_as_parameters():
    """Two sparse layers of 8 experts, of three matrices each and a row of the router, and two dense ones."""
    dense, sparse = 3 * 64 * 96, 8 * (3 * 64 * 48 + 64)
    moe = spec(**QWEN3_MOE, decoder_sparse_step=2, head_dim=16).num_parameters
    assert moe - spec().num_parameters == 2 * (sparse - dense)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["T5Model"]}, '"T5Model" is not supported.*LlamaForCausalLM'),
        ({"architectures": None, "model_type": "mamba"}, "model_type 'mamba'"),
        ({"hidden_size": None}, '"hidden_size" must be a positive int, got None'),
        ({"vocab_size": "many"}, '"vocab_size"'),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu"'),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, 'rope type "longrope" is not supported'),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs the field 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ({"torch_dtype": "float8_e4m3fn"}, 'dtype "float8_e4m3fn"'),
        ({"head_dim": "16"}, '"head_dim" must be a positive int'),
        ({"rope_scaling": {"rope_type": "linear", "factor": "much"}}, "wrong kind"),
        ({"rope_scaling": 8}, "wrong kind"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types"),
        (QWEN3_MOE | {"num_experts": None}, '"num_experts" must be a positive int'),
        (QWEN3_MOE | {"num_local_experts": 4}, "num_experts and num_local_experts differ"),
        (QWEN3_MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, and there are 8 experts"),
        (QWEN3_MOE | {"moe_intermediate_size": None}, '"moe_intermediate_size" must be'),
        (QWEN3_MOE | {"mlp_only_layers": [4]}, r"layers that are not there: \[4\]"),
        (QWEN3_MOE | {"mlp_only_layers": 4}, "wrong kind"),
        (QWEN3_MOE | {"shared_expert_intermediate_size": 64}, "=64: shared experts are not supported"),
        (QWEN3_MOE | {"n_group": 2}, "groups of experts are not supported"),
        (QWEN3_MOE | {"scoring_func": "sigmoid"}, "'sigmoid': scores that are no softmax"),
        (QWEN3_MOE | {"use_sliding_window": True}, "sliding windows beside experts"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes, message):
    with pytest.raises(ModelError, match=message):
        spec(**changes)
