"""Medusa heads: both published layouts, against the published formula in plain torch."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from spec_decode.noting import Throttle
from torch import nn

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError, ModelError
from minivllm.spec_decode.medusa import MedusaProposer, load_heads, random_heads

HIDDEN, VOCAB = 64, 512
SMALL = {"model.path": "dummy:tiny", "model.dtype": "float32", "kv.num_blocks": 60, "executor.num_threads": 1}
SMALL |= {"spec_decode.method": "medusa", "spec_decode.adaptive": False, "debug.check": True}
CPU = torch.float32, torch.device("cpu")


class ResBlock(nn.Module):
    """As the paper's training code has it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.act = nn.SiLU()

    def forward(self, x):
        return x + self.act(self.linear(x))


def reference(num_heads: int = 3, num_layers: int = 2) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.Sequential(*(ResBlock() for _ in range(num_layers)), nn.Linear(HIDDEN, VOCAB, bias=False))
        for _ in range(num_heads)
    )


def vllm_names(heads: nn.ModuleList) -> dict[str, torch.Tensor]:
    out = {}
    for i, head in enumerate(heads):
        for j, block in enumerate(head[:-1]):
            out |= {f"blocks.{i}.layers.{j}.{kind}": p for kind, p in block.linear.named_parameters()}
        out[f"lm_heads.{i}.weight"] = head[-1].weight
    return out


LAYOUTS = {
    "paper": lambda heads: heads.state_dict(),
    "prefixed": lambda heads: {f"medusa_head.{name}": t for name, t in heads.state_dict().items()},
    "vllm": vllm_names,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_of_each_layout_give_the_references_logits(layout, tmp_path):
    heads = reference()
    tensors = {name: t.detach().clone() for name, t in LAYOUTS[layout](heads).items()}
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    loaded = load_heads(tmp_path, HIDDEN, VOCAB, *CPU)
    x = torch.randn(5, HIDDEN)
    assert len(loaded) == 3
    for head, expected in zip(loaded, heads, strict=True):
        torch.testing.assert_close(head(x), expected(x))


def test_heads_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ModelError, match="no .safetensors"):
        load_heads(tmp_path, HIDDEN, VOCAB, *CPU)
    tensors = {name: t.detach() for name, t in reference().state_dict().items()}
    save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises(ModelError, match="the model needs"):
        load_heads(tmp_path, HIDDEN, VOCAB + 1, *CPU)
    del tensors["1.2.weight"]
    save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises(ModelError, match="head 1 of 3 is not complete"):
        load_heads(tmp_path, HIDDEN, VOCAB, *CPU)
    save_file({"fc.weight": torch.zeros(2, 2)}, tmp_path / "m.safetensors")
    with pytest.raises(ModelError, match='"fc.weight" is not part'):
        load_heads(tmp_path, HIDDEN, VOCAB, *CPU)


def test_a_head_sees_the_hidden_state_that_gave_the_newest_token():
    """Heads that are the model's own output layer guess what was said there: the newest token again, also behind
    drafts that were accepted or refused, and beside prompts that are computed in chunks."""
    prompts = [{"prompt_token_ids": [5, 6, 7, 8, 9] * n} for n in range(1, 5)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    how = {"spec_decode.model": "dummy:medusa", "scheduler.max_num_batched_tokens": 12}
    with LLM(overrides={**SMALL, **how}) as llm:
        runner = llm._core.executor.worker.runner
        proposer, propose = runner.head.proposer, runner.head.proposer.propose
        proposer.heads = [runner.model.logits] * 3
        checked = []

        def checking(plan, batch, tokens, hidden):
            drafts = propose(plan, batch, tokens, hidden)
            assert drafts == {req_id: [new[-1]] * 3 for req_id, new in tokens.items()}
            checked.extend(len(new) for new in tokens.values())
            return drafts

        proposer.propose = checking
        llm.generate(prompts, params, use_tqdm=False)
    assert {1, 2} <= set(checked), "some drafts were accepted and some refused"


def test_a_folder_of_heads_is_found_below_home_and_drafts(tmp_path, monkeypatch):
    tensors = {name: t.detach() for name, t in reference().state_dict().items()}
    save_file(tensors, tmp_path / "m.safetensors")
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    with LLM(overrides={**SMALL, "spec_decode.model": f"~/{tmp_path.name}"}) as llm:
        heads = llm._core.executor.worker.runner.head.proposer.heads
        x = torch.randn(5, HIDDEN)
        for head, expected in zip(heads, reference(), strict=True):
            torch.testing.assert_close(head(x), expected(x))
    with pytest.raises(ConfigError, match="^spec_decode.method=medusa needs spec_decode.model: a folder with heads"):
        LLM(overrides={**SMALL, "spec_decode.model": None})


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_random_heads_change_no_token(temperature):
    prompts = [{"prompt_token_ids": [5, 6, 7] * n} for n in range(1, 6)]
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=20, ignore_eos=True) for i in range(5)]
    got = []
    for method in ("none", "medusa"):
        with LLM(overrides={**SMALL, "spec_decode.method": method, "spec_decode.model": "dummy:medusa"}) as llm:
            got.append([list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)])
    assert got[0] == got[1]


def test_a_file_without_heads_is_refused_and_heads_take_the_models_type(tmp_path):
    save_file({}, tmp_path / "m.safetensors")
    with pytest.raises(ModelError, match="^no Medusa head found$"):
        load_heads(tmp_path, HIDDEN, VOCAB, *CPU)
    save_file({name: t.detach() for name, t in reference().state_dict().items()}, tmp_path / "m.safetensors")
    loaded = load_heads(tmp_path, HIDDEN, VOCAB, torch.bfloat16, CPU[1])
    assert loaded[2](torch.ones(1, HIDDEN, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_random_heads_are_a_seeds_own_and_of_a_size_that_keeps_their_inputs_scale():
    first, again, other = (random_heads(2, HIDDEN, VOCAB, *CPU, seed) for seed in (1, 1, 2))
    x = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(0))
    assert torch.equal(first[1](x), again[1](x)) and not torch.equal(first[1](x), other[1](x))
    assert not torch.equal(first[0](x), first[1](x))
    # The inner layer adds SiLU of N(0, 1), whose mean square is 0.36, to N(0, 1); the outer one keeps the variance.
    assert first[0](x).std().item() == pytest.approx(1.36**0.5, abs=0.2)


def test_what_heads_propose_is_cut_by_the_throttle_which_learns_what_was_accepted():
    """Three requests of 3, 1 and 2 tokens: the first had two drafts of which one was right, the second says nothing yet
    (its prompt goes on), the third had none."""
    throttle = Throttle([1, 3])
    heads = [lambda states, i=i: torch.nn.functional.one_hot(states[:, 0].long() + i, 100) for i in range(4)]
    config = SimpleNamespace(spec_decode=SimpleNamespace(k=3))
    proposer = MedusaProposer(SimpleNamespace(config=config, throttle=throttle), heads)
    proposer.join(7, None)
    plan = SimpleNamespace(drafts={"a": [1, 2]})
    batch = SimpleNamespace(req_ids=["a", "b", "c"], rows=np.array([7, 5, 9]), query_start=np.array([0, 3, 4, 6]))
    hidden = torch.arange(10.0, 16.0)[:, None]  # by its row: 10, 11, ...
    assert proposer.propose(plan, batch, {"a": [1, 8], "c": [4]}, hidden) == {"a": [11], "c": [15, 16, 17]}
    assert throttle.told == [("reset", 7), ("learn", 7, 0, 2, 1), ("cut", [7, 9], [0, 0], [3, 3], 2)]
    for counts, expected in (([0, 2], {"c": [15, 16]}), ([0, 0], {})):
        throttle.counts = counts
        assert proposer.propose(plan, batch, {"a": [1, 8], "c": [4]}, hidden) == expected
    assert proposer.propose(plan, batch, {}, hidden) == {}
