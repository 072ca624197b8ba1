"""Medusa heads: both published layouts, against the published formula in plain torch."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from minivllm import LLM, SamplingParams
from minivllm.errors import ModelError
from minivllm.spec_decode.medusa import load_heads

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


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_random_heads_change_no_token(temperature):
    prompts = [{"prompt_token_ids": [5, 6, 7] * n} for n in range(1, 6)]
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=20, ignore_eos=True) for i in range(5)]
    got = []
    for method in ("none", "medusa"):
        with LLM(overrides={**SMALL, "spec_decode.method": method, "spec_decode.model": "dummy:medusa"}) as llm:
            got.append([list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)])
    assert got[0] == got[1]
