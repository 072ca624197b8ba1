"""Rule: an adapter in a batch computes what PEFT computes with it alone, and what the merged weights compute."""

from __future__ import annotations

import pytest
import torch

from minivllm import LLM, LoRARequest, SamplingParams
from minivllm.loading.dummy import write_tokenizer

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "q_only": {"r": 8, "target_modules": ["q_proj"]},
    "v_and_up": {"r": 8, "target_modules": ["v_proj", "up_proj"], "lora_alpha": 32},
    "rank_8": {"r": 8, "target_modules": ALL},
    "rank_16_rslora": {"r": 16, "target_modules": ALL, "lora_alpha": 8, "use_rslora": True},
    "rank_64": {"r": 64, "target_modules": ALL},
    "rank_256": {"r": 256, "target_modules": ["k_proj", "gate_proj", "o_proj"], "lora_alpha": 64},
    "one_layer": {"r": 8, "target_modules": ALL, "layers_to_transform": [1]},
    "by_pattern": {
        "r": 8,
        "target_modules": r".*\.(q|down)_proj",
        "rank_pattern": {"layers.0.self_attn.q_proj": 4, "down_proj": 12},
        "alpha_pattern": {"down_proj": 24},
    },
    "all_linear": {"r": 4, "target_modules": "all-linear", "exclude_modules": ["o_proj"]},
}
OPTIONS = {"model.dtype": "float32", "kv.num_blocks": 300, "kv.block_size": 8, "executor.num_threads": 1}
OPTIONS |= {"lora.enabled": True, "lora.max_rank": 256, "lora.max_loras": 3, "debug.check": True}
# As in tests/models (60 products on 3 layers, 1.6e-4 with logits of a few units), and an adapter adds two products to
# each; log-probabilities have twice the error of a logit. Seen: under 4e-5.
TOLERANCE = 4e-4
PROMPT = [(37 * i + 11) % 320 for i in range(40)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(folder of a model, {adapter: folder}, {adapter, "" for none: PEFT's log-probabilities [40, vocab]})."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder, SMALL["vocab_size"])
    folders, wanted = {}, {"": logprobs_of(model)}
    for name, options in ADAPTERS.items():
        fresh = transformers.AutoModelForCausalLM.from_pretrained(folder)
        with_adapter = peft.get_peft_model(fresh, peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
        with torch.no_grad():
            for parameter_name, parameter in with_adapter.named_parameters():
                if "lora_B" in parameter_name:  # PEFT starts with B = 0, which changes nothing
                    parameter.normal_(0, 0.05)
        folders[name] = str(tmp_path_factory.mktemp(name))
        with_adapter.save_pretrained(folders[name])
        wanted[name] = logprobs_of(with_adapter)
        merged = tmp_path_factory.mktemp(f"merged-{name}")
        with_adapter.merge_and_unload().save_pretrained(merged)
        write_tokenizer(merged, SMALL["vocab_size"])
        folders[f"merged {name}"] = str(merged)
    return str(folder), folders, wanted


def logprobs_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)


def requests(folders, names=tuple(ADAPTERS)):
    return [LoRARequest(name, 1 + i, folders[name]) for i, name in enumerate(ADAPTERS) if name in names]


def reported(output) -> torch.Tensor:
    """[39]: of each prompt token but the first."""
    return torch.tensor([at[token].logprob for token, at in zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True)])


@pytest.fixture(scope="module")
def llm(base):
    with LLM(base[0], overrides=OPTIONS) as llm:
        yield llm


def test_log_probabilities_of_a_mixed_batch_equal_peft(base, llm):
    """All adapters and the bare model in one call, three slots: some wait, some are evicted and come back."""
    _, folders, wanted = base
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([PROMPT] * 10, params, lora_request=[None, *requests(folders)], use_tqdm=False)
    for name, output in zip(["", *ADAPTERS], outputs, strict=True):
        expected = wanted[name][torch.arange(39), torch.tensor(PROMPT[1:])]
        assert (reported(output) - expected).abs().max() < TOLERANCE, name
        if name:
            assert (expected - wanted[""][torch.arange(39), torch.tensor(PROMPT[1:])]).abs().max() > 0.1, "no change?"


@pytest.mark.parametrize("name", ["v_and_up", "rank_16_rslora", "rank_256"])
def test_greedy_tokens_equal_those_of_the_merged_weights(base, llm, name):
    _, folders, _ = base
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
    got = llm.generate(PROMPT, params, lora_request=requests(folders, (name,))[0], use_tqdm=False)[0].outputs[0]
    with LLM(folders[f"merged {name}"], overrides=OPTIONS) as merged:
        wanted = merged.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
    assert got.token_ids == wanted.token_ids
    assert abs(got.cumulative_logprob - wanted.cumulative_logprob) < 24 * TOLERANCE
