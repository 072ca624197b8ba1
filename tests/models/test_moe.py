"""Rules: a mixture of experts computes what transformers does, in an engine too, whatever else is on; what cannot reach
its experts says so."""

from __future__ import annotations

import pytest
import torch
from lora.adapters import SHAPES, write_adapter
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
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, Qwen3MoeConfig

from minivllm import LLM, SamplingParams
from minivllm.errors import AdapterError, ModelError
from minivllm.kernels.cpu import build
from minivllm.layers.experts import Router, Routes, SparseMLP
from minivllm.loading import load_model
from minivllm.models.checkpoint import of_all_experts
from minivllm.models.decoder import MLP
from minivllm.spec_decode.eagle import random_eagle

CPU = torch.device("cpu")
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 32}
CONFIGS = {
    "qwen3": Qwen3MoeConfig(**SMALL, **EXPERTS),
    "qwen3_normalised": Qwen3MoeConfig(**SMALL, **EXPERTS, norm_topk_prob=True, attention_bias=True),
    "qwen3_one": Qwen3MoeConfig(**SMALL, **EXPERTS | {"num_experts_per_tok": 1}, mlp_only_layers=[0]),
    "qwen3_every_other": Qwen3MoeConfig(**SMALL, **EXPERTS, decoder_sparse_step=2, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4),
    "mixtral_one_window": MixtralConfig(**SMALL, num_local_experts=5, num_experts_per_tok=1, sliding_window=8),
}
SPARSE = {"qwen3_one": [1, 2], "qwen3_every_other": [1]}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    """(folder, transformers' model in fp32, the layers that have experts)."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_oracle(CONFIGS[request.param], folder), SPARSE.get(request.param, [0, 1, 2])


def test_logits_in_fp32_equal_transformers(pair):
    folder, oracle, sparse = pair
    ours, token_ids = load_model(str(folder), torch.float32, CPU).model, random_tokens()
    assert [i for i, layer in enumerate(ours.layers) if isinstance(layer.mlp, SparseMLP)] == sparse
    expected = oracle_logits(oracle, token_ids)
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits_of(ours, token_ids), expected, rtol=0, atol=FP32_TOLERANCE)


def test_greedy_tokens_in_fp32_equal_transformers(pair):
    folder, oracle, _ = pair
    prompt = random_tokens(length=12)
    ours = load_model(str(folder), torch.float32, CPU).model
    assert greedy(ours, prompt, 16) == greedy_oracle(oracle, prompt, 16)


def test_bf16_given_the_choices_of_fp32_is_near_it(pair, monkeypatch):
    """Which experts a token is given to is a jump: where two shares are nearly equal, bf16 may take the other one, in
    transformers too, and then that token and those that see it differ by far more than roundings. So the choices are
    fp32's, and only what is computed with them is bf16's."""
    folder, oracle, _ = pair
    token_ids, chosen, route = random_tokens(), [], Router.forward

    def record(router, x):
        chosen.append(route(router, x).ids)
        return route(router, x)

    def replay(router, x):
        ids = chosen.pop(0)
        weights = (x.float() @ router.weight.T).softmax(-1).gather(1, ids)
        return Routes(ids, weights / weights.sum(-1, keepdim=True) if router.normalised else weights)

    monkeypatch.setattr(Router, "forward", record)
    logits_of(load_model(str(folder), torch.float32, CPU).model, token_ids)
    monkeypatch.setattr(Router, "forward", replay)
    got = logits_of(load_model(str(folder), torch.bfloat16, CPU).model, token_ids)
    assert not chosen and error_of(got, oracle_logits(oracle, token_ids)) < BF16_TOLERANCE


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("name", ["qwen3_one", "mixtral"])
def test_experts_are_read_one_by_one_or_all_in_one_tensor(name, tmp_path):
    models = []
    for original in (True, False):
        folder = tmp_path / str(original)
        save_oracle(CONFIGS[name], folder, save_original_format=original)
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert any("experts.gate_up_proj" in key for key in file.keys()) != original  # noqa: SIM118
        models.append(load_model(str(folder), torch.float32, CPU).model.state_dict())
    assert all(torch.equal(tensor, models[1][key]) for key, tensor in models[0].items() if tensor is not None)


def test_the_way_back_gives_what_transformers_holds(tmp_path):
    oracle = save_oracle(CONFIGS["qwen3_one"], tmp_path)
    found = of_all_experts(load_model(str(tmp_path), torch.float32, CPU).model.checkpoint_tensors())
    expected = {key: value for key, value in oracle.state_dict().items() if ".mlp." in key and "experts" in key}
    assert len(expected) == 4 and all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"),
            r"1 tensors are missing: .*experts\.3\.up_proj",
        ),
        (lambda t: t.pop("model.layers.0.mlp.gate.weight"), r"1 tensors are missing: .*0\.mlp\.gate\.weight"),
        (lambda t: t.update({"model.layers.0.mlp.shared_expert.up_proj.weight": torch.ones(2, 2)}), "shared_expert"),
        (lambda t: t.update({"model.layers.0.mlp.experts.0.down_proj.weight": torch.ones(2, 2)}), r"shape \[2, 2\]"),
    ],
)
def test_a_checkpoint_with_other_experts_is_refused_by_name(change, message, tmp_path):
    save_oracle(CONFIGS["qwen3"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load_model(str(tmp_path), torch.float32, CPU)


def test_a_dummys_router_spreads_tokens_over_its_experts():
    model = load_model("dummy:tiny-moe", torch.float32, CPU).model
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    for layer in (0, 2, 3):
        assert (model.layers[layer].mlp.router(x).ids.flatten().bincount(minlength=8) > 10).all()


# ---------------------------------------------------------------- in an engine

ENGINE = {"model.dtype": "float32", "kv.num_blocks": 60, "kv.block_size": 8, "executor.num_threads": 1}
ENGINE |= {"debug.check": True}
PROMPTS = [random_tokens(seed, length) for seed, length in enumerate((3, 40, 1, 25, 25, 60))]
PARAMS = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


def generate(model: str = "dummy:tiny-moe", lora_request=None, **options) -> tuple[list[list[int]], dict]:
    """Greedy tokens and {field: (value, reason)} of what was decided."""
    more = {} if lora_request is None else {"lora_request": lora_request}
    with LLM(model, overrides=ENGINE | options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False, **more)
        decided = {d.field: (str(d.value), d.reason) for d in llm.decisions}
    return [list(output.outputs[0].token_ids) for output in outputs], decided


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """One request after the other."""
    return generate(**{"scheduler.max_num_seqs": 1, "kv.prefix": "none", "runner.forward": "eager"})[0]


@pytest.mark.parametrize("name", ["qwen3_one", "mixtral_one_window"])
def test_an_engine_gives_the_tokens_of_transformers(name, tmp_path):
    """Of requests beside each other, their prompts in chunks."""
    oracle = save_oracle(CONFIGS[name], tmp_path)
    expected = [greedy_oracle(oracle, prompt, 10) for prompt in PROMPTS]
    assert generate(str(tmp_path), **{"scheduler.max_num_batched_tokens": 24})[0] == expected


@pytest.mark.parametrize("name", ["qwen3_normalised", "mixtral"])
def test_log_probabilities_of_chunks_and_decodes_equal_transformers(name, tmp_path):
    oracle, params = save_oracle(CONFIGS[name], tmp_path), SamplingParams(max_tokens=5, logprobs=0, prompt_logprobs=0)
    options = ENGINE | {"scheduler.max_num_batched_tokens": 7, "kv.prefix": "none"}
    with LLM(str(tmp_path), overrides=options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = [*prompt, *output.outputs[0].token_ids]
        expected = oracle_logits(oracle, ids).log_softmax(-1)[range(len(ids) - 1), ids[1:]]
        found = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        got = torch.tensor([own[token].logprob for own, token in zip(found, ids[1:], strict=True)])
        # Beside the logit itself the sum over all counts, which errs less.
        torch.testing.assert_close(got, expected, rtol=0, atol=2 * FP32_TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scheduler.max_num_batched_tokens": 7},
        {"debug.preempt_every": 3},
        {"kv.num_blocks": 16},
        {"runner.attention": "reference", "runner.inputs": "rebuild"},
        {"spec_decode.method": "ngram"},
        {"spec_decode.method": "self_draft", "spec_decode.layers": 2, "spec_decode.adaptive": False},
        {"spec_decode.method": "eagle", "spec_decode.model": "dummy:eagle", "spec_decode.adaptive": False},
        {"spec_decode.method": "draft", "spec_decode.model": "dummy:tiny-moe", "spec_decode.adaptive": False},
        {"executor.kind": "naive", "kv.prefix": "none"},
    ],
    ids=str,
)
def test_neighbours_chunks_preemption_and_drafts_change_no_token(options, wanted):
    assert generate(**options)[0] == wanted


def test_a_random_eagle_head_is_one_dense_layer():
    """An EAGLE head has one MLP, whatever its target has; all of its weights are made."""
    spec = load_model("dummy:tiny-moe", torch.float32, CPU).spec
    assert isinstance(random_eagle(spec, torch.float32, CPU, 0).layers[0].mlp, MLP)


@pytest.mark.parametrize("graphs", ["none", "piecewise"])
@pytest.mark.parametrize("forward", ["eager", "piecewise"])
def test_pieces_and_captures_between_experts_change_no_token(forward, graphs, wanted):
    got, decided = generate(**{"runner.forward": forward, "runner.compile": "off", "runner.graphs": graphs})
    assert got == wanted
    assert decided.get("runner.graphs", ("none",))[0] == graphs
    assert decided.get("runner.forward", ("eager",))[0] == forward


def test_compiled_pieces_change_no_token(wanted):
    from minivllm.compile.forms import form_for

    if (why := form_for(CPU).unsupported_reason(CPU)) is not None:
        pytest.skip(why)
    got, decided = generate(**{"runner.forward": "piecewise", "runner.compile": "wait"})
    assert decided["runner.forward"][0] == "piecewise", decided["runner.forward"]
    assert got == wanted


@pytest.mark.parametrize("graphs, used", [("full", "none"), ("full+piecewise", "piecewise")])
def test_no_whole_forward_is_captured_with_torchs_experts(graphs, used, wanted):
    """With Triton's one is: tests/kernels/interpret_serving.py."""
    got, decided = generate(**{"runner.graphs": graphs, "runner.attention": "reference", "runner.forward": "eager"})
    value, reason = decided["runner.graphs"]
    assert got == wanted and value == used and "torch computes its experts" in reason


def test_the_fused_forward_says_why_it_is_not_for_experts(wanted):
    got, decided = generate(**{"runner.forward": "fused"})
    assert got == wanted and decided["runner.forward"][0] == "eager" and "experts" in decided["runner.forward"][1]


def test_experts_are_not_packed_and_the_decision_says_so(wanted):
    if build.unsupported_reason() is not None:
        pytest.skip(build.unsupported_reason())
    options = {"model.quantization": "int8"}
    got, decided = generate(**options)
    value, reason = decided["model.quantization"]
    assert value == "int8" and "the matrices of experts are multiplied in float32" in reason
    assert got != wanted  # attention's weights, the head's and the dense layer's are rounded
    assert got == generate(**options, **{"scheduler.max_num_batched_tokens": 7})[0]
    plain, packed = (
        load_model("dummy:tiny-moe", torch.float32, CPU, quantization=kind).model.layers[0].mlp.experts
        for kind in ("none", "int8")
    )
    assert torch.equal(plain.gate_up.weight, packed.gate_up.weight) and torch.equal(
        plain.down.weight, packed.down.weight
    )


# ---------------------------------------------------------------- adapters

ATTENTION = {name: shape for name, shape in SHAPES.items() if name.startswith("self_attn")}


def with_adapter(folder, **options):
    adapters = {"lora.enabled": True, "lora.adapters": {"a": str(folder)}}
    return generate(lora_request=["a", None] * 3, **adapters, **options)[0]


def test_an_adapter_on_attention_changes_its_own_requests(tmp_path, wanted):
    folder = write_adapter(tmp_path / "a", 0, targets=[name.partition(".")[2] for name in ATTENTION], shapes=ATTENTION)
    got = with_adapter(folder)
    assert got[1::2] == wanted[1::2] and all(a != b for a, b in zip(got[::2], wanted[::2], strict=True))
    assert with_adapter(folder, **{"scheduler.max_num_seqs": 1}) == got
    graphs = {"runner.forward": "eager", "runner.graphs": "piecewise"}
    assert with_adapter(folder, **graphs) == got


@pytest.mark.parametrize(
    ("shapes", "targets", "message"),
    [
        ({"mlp.experts.0.up_proj": (48, 64)}, ["q_proj", "experts.0.up_proj"], '"experts.0.up_proj" is not supported'),
        ({"mlp.experts.0.up_proj": (48, 64)}, ["q_proj", "up_proj"], "an adapter on experts is not supported"),
        ({"mlp.gate": (8, 64)}, ["q_proj", "gate"], '"gate" is not supported on this model'),
        ({"mlp.gate": (8, 64)}, ["all-linear"], "an adapter on a router is not supported"),
    ],
)
def test_an_adapter_on_experts_or_on_the_router_is_refused(shapes, targets, message, tmp_path):
    names = [*targets, "up_proj", "gate"]
    folder = write_adapter(tmp_path / "a", 0, targets=names, shapes=ATTENTION | shapes, target_modules=targets)
    if targets == ["all-linear"]:
        write_adapter(tmp_path / "a", 0, targets=names, shapes=ATTENTION | shapes, target_modules="all-linear")
    with pytest.raises(AdapterError, match=message):
        with_adapter(folder)
