"""Rule: every log-probability that is reported is transformers' fp32 log-softmax at that position, however the engine
came to compute it: in chunks, beside a prefix hit, after a preemption, for one of n choices, in a stream."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from minivllm import LLM, SamplingParams
from minivllm.engine.async_llm import AsyncLLM
from minivllm.loading.dummy import write_tokenizer

VOCAB = 320
# fp32: tests/models/test_llama.py derives 2e-4 for the logits of such a model; the log-sum-exp, whose derivative by the
# logits is a weighted mean, errs no more.
TOLERANCE = 4e-4
SMALL = {"kv.num_blocks": 24, "kv.block_size": 8, "executor.num_threads": 1, "debug.check": True}
WHOLE = {"scheduler.chunked_prefill": False, "scheduler.max_num_batched_tokens": 256}
CONFIGS = {
    "v1": {},
    "chunks of 7": {"scheduler.max_num_batched_tokens": 7},
    "chunks of 1": {"scheduler.max_num_batched_tokens": 1},
    "radix": {"kv.prefix": "radix"},
    "no prefix": {"kv.prefix": "none"},
    "preempted": {"debug.preempt_every": 3},
    "preempted, chunks of 5": {"debug.preempt_every": 3, "scheduler.max_num_batched_tokens": 5},
    "preempted, swapped": {"debug.preempt_every": 3, "kv.preemption": "swap"},
    "phased": {"scheduler.kind": "phased", **WHOLE},
    "phased, swapped": {"scheduler.kind": "phased", "kv.preemption": "swap", "debug.preempt_every": 3, **WHOLE},
    "static": {"scheduler.kind": "static", **WHOLE},
    "contiguous": {"kv.allocation": "max", "kv.prefix": "none", "kv.num_blocks": 96},
    "rebuilt inputs, reference attention": {"runner.inputs": "rebuild", "runner.attention": "reference"},
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """(folder, {token ids: log-softmax of each position, double [n, V]})."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCAB)

    def log_softmax(token_ids):
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0].double().log_softmax(-1)

    return folder, log_softmax


def check(positions, tokens, expected, num_top):
    """positions: as reported; expected [n, V]: the oracle's rows for the same positions."""
    assert len(positions) == len(tokens) == len(expected)
    for position, token, row in zip(positions, tokens, expected, strict=True):
        assert next(iter(position)) == token
        best = row.sort(descending=True).values
        # The token taken comes first, and once: it may be among the likeliest, which are best first.
        likeliest = [lp for t, lp in position.items() if t != token or lp.rank <= num_top]
        assert num_top <= len(position) <= num_top + 1
        ranked = sorted((lp.logprob for lp in likeliest), reverse=True)[:num_top]
        assert ranked == pytest.approx(best[:num_top].tolist(), abs=TOLERANCE)
        for t, lp in position.items():
            assert lp.logprob == pytest.approx(row[t].item(), abs=TOLERANCE)
            # Exact where no other token lies within the tolerance of this one.
            assert (row > row[t] + 2 * TOLERANCE).sum() < lp.rank <= (row >= row[t] - 2 * TOLERANCE).sum()


def check_output(output, log_softmax, num_top, num_prompt_top):
    prompt = output.prompt_token_ids
    if num_prompt_top is not None:
        assert output.prompt_logprobs[0] is None
        check(output.prompt_logprobs[1:], prompt[1:], log_softmax(prompt)[:-1], num_prompt_top)
    for out in output.outputs:
        expected = log_softmax(prompt + out.token_ids)[len(prompt) - 1 : -1]
        check(out.logprobs, out.token_ids, expected, num_top)
        total = sum(expected[i, token].item() for i, token in enumerate(out.token_ids))
        assert out.cumulative_logprob == pytest.approx(total, abs=len(out.token_ids) * TOLERANCE)


def make_requests():
    rng = random.Random(3)
    shared = [rng.randrange(3, VOCAB) for _ in range(24)]
    prompts = [shared[: rng.choice([0, 8, 20, 24])] + [rng.randrange(3, VOCAB) for _ in range(n)] for n in range(1, 11)]
    prompts.append(list(shared))
    common = {"max_tokens": 6, "ignore_eos": True, "logprobs": 3}
    kinds = [
        {"temperature": 0.0, "prompt_logprobs": 4},
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.5, "seed": 1},  # of the raw logits
        {"temperature": 1.0, "n": 2, "seed": 2, "prompt_logprobs": 0},
    ]
    return prompts, [SamplingParams(**common, **kinds[i % 3]) for i in range(len(prompts))]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_logprob_is_the_models_however_it_was_computed(name, oracle):
    folder, log_softmax = oracle
    prompts, params = make_requests()
    with LLM(str(folder), dtype="float32", max_num_seqs=6, overrides={**SMALL, **CONFIGS[name]}) as llm:
        for _ in range(2):  # the second time, prefixes are found in the cache
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for output, asked in zip(outputs, params, strict=True):
                check_output(output, log_softmax, 3, asked.prompt_logprobs)
        if "preempted" in name:
            assert llm.stats.num_preempted > 10
        if name == "v1":
            hits = [o.num_cached_tokens for o in outputs]
            assert any(hits) and not any(h for h, p in zip(hits, params, strict=True) if p.n == 1 and p.prompt_logprobs)


def test_the_choices_after_the_first_take_the_prompt_from_the_cache(oracle):
    """prompt_logprobs are of the request, not of each choice: one choice computes them."""
    folder, log_softmax = oracle
    prompt = list(range(10, 50))
    asked = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=3, ignore_eos=True, prompt_logprobs=2, logprobs=1)
    with LLM(str(folder), dtype="float32", overrides=SMALL, max_num_batched_tokens=40) as llm:
        for _ in range(2):
            (output,) = llm.generate(prompt, asked, use_tqdm=False)
            check_output(output, log_softmax, 1, 2)
        assert llm.stats.prefix_hits >= 2 * 32


@pytest.mark.parametrize("budget", [5, 256])
def test_the_deltas_of_a_stream_add_up_to_the_whole(oracle, budget):
    folder, log_softmax = oracle
    prompt = list(range(40, 60))
    asked = SamplingParams(
        n=3, temperature=1.0, seed=7, max_tokens=9, ignore_eos=True, logprobs=5, prompt_logprobs=2
    )  # fmt: skip
    engine = AsyncLLM(str(folder), dtype="float32", overrides=SMALL, max_num_batched_tokens=budget)

    async def collect(kind):
        return [output async for output in engine.generate(prompt, asked, kind, output_kind=kind)]

    async def both():
        return await collect("delta"), await collect("final")

    deltas, (final,) = asyncio.run(both())
    engine.close()
    check_output(final, log_softmax, 5, 2)
    prompt_logprobs = [o.prompt_logprobs for o in deltas if o.prompt_logprobs is not None]
    assert len(prompt_logprobs) == 1, "the prompt's come once"
    check(prompt_logprobs[0][1:], prompt[1:], log_softmax(prompt)[:-1], 2)
    for choice in final.outputs:
        parts = [out for output in deltas for out in output.outputs if out.index == choice.index]
        assert [t for out in parts for t in out.token_ids] == choice.token_ids
        positions = [position for out in parts for position in out.logprobs]
        check(positions, choice.token_ids, log_softmax(prompt + choice.token_ids)[len(prompt) - 1 : -1], 5)
        assert parts[-1].cumulative_logprob == pytest.approx(choice.cumulative_logprob, abs=9 * TOLERANCE)


def test_tokens_cut_by_a_stop_string_take_their_logprobs_with_them(oracle):
    folder, log_softmax = oracle
    prompt = list(range(100, 110))
    with LLM(str(folder), dtype="float32", overrides=SMALL) as llm:
        free = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
        text = llm.generate(prompt, free, use_tqdm=False)[0].outputs[0].text
        (output,) = llm.generate(prompt, free.replace(stop=text[3:5]), use_tqdm=False)
        assert output.outputs[0].finish_reason == "stop"
        check_output(output, log_softmax, 2, None)
