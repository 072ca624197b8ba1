"""EAGLE in the engine against EAGLE in plain torch: the published layout, whole prefixes, no cache."""

import json
from collections import defaultdict
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError, ModelError
from minivllm.loading import load_model
from minivllm.models import ModelSpec, RopeSpec
from minivllm.spec_decode.eagle import load_eagle, random_eagle

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
}
SIZES = {
    "embed_tokens.weight": (512, 64),
    "fc.weight": (64, 128),
    "fc.bias": (64,),
    "layers.0.self_attn.q_proj.weight": (64, 64),
    "layers.0.self_attn.k_proj.weight": (32, 64),
    "layers.0.self_attn.v_proj.weight": (32, 64),
    "layers.0.self_attn.o_proj.weight": (64, 64),
    "layers.0.post_attention_layernorm.weight": (64,),
    "layers.0.mlp.gate_proj.weight": (96, 64),
    "layers.0.mlp.up_proj.weight": (96, 64),
    "layers.0.mlp.down_proj.weight": (64, 96),
}
SMALL = {
    "model.path": "dummy:tiny",
    "model.dtype": "float32",
    "kv.num_blocks": 60,
    "kv.block_size": 4,
    "executor.num_threads": 1,
    "debug.check": True,
    "spec_decode.method": "eagle",
    "spec_decode.adaptive": False,
    "spec_decode.k": 3,
}
ADAPTIVE = {"spec_decode.adaptive": True, "debug.check": False}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [(7 * i + n) % 200 for i in range(4 * n + 1)]} for n in range(1, 6)]


@pytest.fixture(scope="module")
def weights():
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(size, generator=generator) * size[-1] ** -0.5 for name, size in SIZES.items()}


@pytest.fixture
def folder(weights, tmp_path):
    return write(tmp_path, weights)


def write(path, weights, **changes):
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(weights, path / "model.safetensors")
    return path


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, 16], position t in row t."""
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    cos, sin = angles.cos()[:, None].repeat(1, 1, 2), angles.sin()[:, None].repeat(1, 1, 2)
    return x * cos + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin


def reference(w: dict, tokens: list[int], hidden: torch.Tensor, lm_head, k: int) -> list[int]:
    """k greedy drafts behind tokens; hidden [len(tokens) - 1, 64]: the target's, of all but the newest."""
    tokens, hidden = list(tokens), hidden.clone()
    for _ in range(k):
        x = F.linear(torch.cat([w["embed_tokens.weight"][tokens[1:]], hidden], -1), w["fc.weight"], w["fc.bias"])
        q, key, v = (F.linear(x, w[f"layers.0.self_attn.{n}_proj.weight"]).view(len(x), -1, 16) for n in "qkv")
        q, key = rotate(q).transpose(0, 1), rotate(key).repeat_interleave(2, 1).transpose(0, 1)
        v = v.repeat_interleave(2, 1).transpose(0, 1)
        mask = torch.full((len(x), len(x)), float("-inf")).triu(1)
        attended = ((q @ key.transpose(1, 2) / 4 + mask).softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + F.linear(attended, w["layers.0.self_attn.o_proj.weight"])
        normed = x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * w["layers.0.post_attention_layernorm.weight"]
        gate, up = (F.linear(normed, w[f"layers.0.mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, w["layers.0.mlp.down_proj.weight"])
        tokens.append(int(lm_head(x[-1:]).argmax()))
        hidden = torch.cat([hidden, x[-1:]])
    return tokens[-k:]


@pytest.mark.parametrize(
    "overrides", [{}, {"scheduler.max_num_batched_tokens": 7}, {"debug.preempt_every": 3}], ids=str
)
def test_the_engine_drafts_what_the_reference_drafts(overrides, folder, weights):
    how = {**SMALL, "spec_decode.model": str(folder), "kv.prefix": "none", **overrides}
    with LLM(overrides=how) as llm:
        runner = llm._core.executor.worker.runner
        proposer, propose = runner.head.proposer, runner.head.proposer.propose
        states: dict[str, dict[int, torch.Tensor]] = {}
        choose, drawn_at = proposer._choose, defaultdict(list)  # {row: the positions of what was drawn}
        num_compared = 0

        def choosing(logits, rows, positions):
            for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
                drawn_at[row].append(position)
            return choose(logits, rows, positions)

        def checking(plan, batch, tokens, hidden):
            nonlocal num_compared
            for i, req_id in enumerate(batch.req_ids):
                for at in range(batch.query_start[i], batch.query_start[i + 1]):
                    states.setdefault(req_id, {})[int(batch.positions[at])] = hidden[at].clone()
            drawn_at.clear()
            drafts = propose(plan, batch, tokens, hidden)
            for req_id, found in drafts.items():
                text = proposer.text[row := runner.rows.of[req_id]]
                assert drawn_at[row] == [len(text) + i for i in range(len(found))]
                seen = torch.stack([states[req_id][i] for i in range(len(text) - 1)])
                assert found == reference(weights, text, seen, runner.model.logits, len(found))
                num_compared += len(found)
            return drafts

        proposer.propose, proposer._choose = checking, choosing
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert num_compared > 100


@pytest.mark.parametrize("own_embedding", [True, False])
@pytest.mark.parametrize("overrides", [{}, {"spec_decode.acceptance": "rejection"}, {"kv.preemption": "swap"}], ids=str)
def test_no_token_changes(overrides, own_embedding, weights, tmp_path):
    chosen = {f"model.{n}": t for n, t in weights.items() if own_embedding or n != "embed_tokens.weight"}
    how = {**SMALL, "spec_decode.model": str(write(tmp_path, chosen)), "debug.preempt_every": 3, **overrides}
    got = []
    for method in ("none", "eagle"):
        with LLM(overrides={**how, "spec_decode.method": method}) as llm:
            got.append([list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)])
    assert got[0] == got[1] and llm._core.stats.num_drafted > 100


def test_a_head_that_does_not_fit_is_refused(weights, tmp_path):
    with pytest.raises(ModelError, match="hidden_size=128, the model 64"):
        LLM(overrides={**SMALL, "spec_decode.model": str(write(tmp_path, weights, hidden_size=128))})
    with pytest.raises(ModelError, match="1 tensors are missing"):
        del (some := dict(weights))["fc.weight"]
        LLM(overrides={**SMALL, "spec_decode.model": str(write(tmp_path, some))})
    quantised = str(write(tmp_path, weights, quantization_config={"quant_method": "fp8"}))
    with pytest.raises(ModelError, match=f"^{quantised}: an EAGLE head that is quantised is not supported"):
        LLM(overrides={**SMALL, "spec_decode.model": quantised})
    with pytest.raises(ModelError, match=f"^{write(tmp_path, weights, hidden_size='64')}/config.json: "):
        LLM(overrides={**SMALL, "spec_decode.model": str(tmp_path)})
    with pytest.raises(ConfigError, match="^spec_decode.method=eagle needs spec_decode.model: a folder with an EAGLE"):
        LLM(overrides={**SMALL, "spec_decode.model": None})


def test_a_head_is_found_below_home_and_may_call_itself_otherwise(weights, tmp_path, monkeypatch):
    write(tmp_path, weights, architectures=["LlamaForCausalLMEagle"])
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    with LLM(overrides={**SMALL, "spec_decode.model": f"~/{tmp_path.name}"}) as llm:
        head = llm._core.executor.worker.runner.head.proposer.model
        x = torch.randn(3, 128)
        torch.testing.assert_close(head.fc(x), F.linear(x, weights["fc.weight"], weights["fc.bias"]))
        assert not head.training


@pytest.mark.parametrize("method, model", [("eagle", "dummy:eagle"), ("draft", "dummy:tiny")])
def test_a_throttle_knows_what_a_pass_of_the_proposer_takes(method, model):
    with LLM(overrides={**SMALL, "spec_decode.method": method, "spec_decode.model": model}) as llm:
        assert llm._core.executor.worker.runner.head.proposer.throttle.seconds_per_pass == 0
    with LLM(overrides={**SMALL, "spec_decode.method": method, "spec_decode.model": model} | ADAPTIVE) as llm:
        assert llm._core.executor.worker.runner.head.proposer.throttle.seconds_per_pass > 0


def test_a_random_head_is_a_seeds_own_and_of_the_targets_sizes():
    """Of its kind, too, where the target is of the Llama family."""
    spec = load_model("dummy:tiny", torch.float32, torch.device("cpu")).spec
    first, same, other = (random_eagle(spec, torch.float32, torch.device("cpu"), seed) for seed in (1, 1, 2))
    x = torch.randn(3, 128)
    assert torch.equal(first.fc(x), same.fc(x)) and not torch.equal(first.fc(x), other.fc(x))
    assert first.spec.num_layers == len(first.layers) == len(first.attention_layers) == 1
    assert (first.spec.rope, first.spec.rms_eps) == (spec.rope, spec.rms_eps) and not first.training
    assert first.fc.bias is not None
    gemma = load_model("dummy:tiny-gemma3", torch.float32, torch.device("cpu")).spec
    common = {field.name: getattr(gemma, field.name) for field in fields(ModelSpec)}
    beside = random_eagle(ModelSpec(**common), torch.float32, torch.device("cpu"), 1).spec
    assert beside.windows == gemma.windows[:1] and beside.num_layers == 1
    assert (beside.hidden_size, beside.vocab_size) == (gemma.hidden_size, gemma.vocab_size)
    assert (beside.rope, beside.rms_eps) == (RopeSpec(), 1e-6)
    assert not (beside.qkv_bias or beside.o_bias or beside.mlp_bias or beside.qk_norm)


def test_beside_a_target_of_another_family_a_head_takes_the_embeddings_that_the_target_computes_with(weights, tmp_path):
    """Gemma 3 scales the rows of its table."""
    target = load_model("dummy:tiny-gemma3", torch.float32, torch.device("cpu"))
    shared = {name: tensor for name, tensor in weights.items() if name != "embed_tokens.weight"}
    where = torch.float32, torch.device("cpu")
    head = load_eagle(write(tmp_path, shared), target.spec, target.model.embed, *where)
    ids, hidden = torch.tensor([3, 500, 7]), torch.randn(3, 64)
    pairs = torch.cat([8 * target.model.embedding.weight[ids], hidden], -1)  # the root of 64
    torch.testing.assert_close(head.embed(ids, hidden), F.linear(pairs, weights["fc.weight"], weights["fc.bias"]))


@pytest.mark.parametrize("head", ["dummy:eagle", "shared"])
def test_no_token_of_gemma_3_changes(head, weights, tmp_path):
    shared = {name: tensor for name, tensor in weights.items() if name != "embed_tokens.weight"}
    path = head if head.startswith("dummy:") else str(write(tmp_path, shared))
    how, got = {**SMALL, "kv.num_blocks": 240, "model.path": "dummy:tiny-gemma3", "spec_decode.model": path}, []
    for method in ("none", "eagle"):
        with LLM(overrides={**how, "spec_decode.method": method}) as llm:
            got.append([list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)])
    assert got[0] == got[1] and llm._core.stats.num_drafted > 100
