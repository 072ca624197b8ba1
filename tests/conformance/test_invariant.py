"""model.invariant: a request's log-probabilities are equal to the last bit, whoever runs beside it, however its prompt
is cut, whether it was cached or preempted."""

from __future__ import annotations

import random

import pytest

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError
from minivllm.kernels.cpu import floats

pytestmark = pytest.mark.skipif(floats.unsupported_reason() is not None, reason=str(floats.unsupported_reason()))
TINY = {
    "model.path": "dummy:tiny",
    "model.invariant": True,
    "model.max_model_len": 700,
    "kv.num_blocks": 120,
    "executor.num_threads": 1,
}
FORMS = [
    {"model.dtype": "float32"},
    {"model.dtype": "bfloat16"},
    {"model.dtype": "float16"},
    {"model.dtype": "float32", "runner.forward": "eager"},
    {"model.dtype": "float32", "runner.forward": "piecewise"},
    {"model.dtype": "float32", "model.quantization": "int4"},
    {"model.dtype": "bfloat16", "model.quantization": "int8"},
    {"model.quantization": "int4"},  # the CPU's own dtype
    {"model.quantization": "int4", "quantization.activation_bits": 8},
    {"kv.dtype": "float16", "model.dtype": "float32"},
    {"kv.dtype": "int8"},
]
WAYS = [
    {},  # all at once, as many as fit
    {"scheduler.max_num_batched_tokens": 37},
    {"scheduler.max_num_seqs": 2, "kv.prefix": "radix"},
    {"debug.preempt_every": 3},
    {"kv.num_blocks": 55, "kv.preemption": "swap"},
    {"runner.inputs": "rebuild", "scheduler.kind": "phased", "scheduler.chunked_prefill": False},
]


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    shared = [rng.randrange(500) for _ in range(50)]
    return [shared[: rng.randrange(51)] + [rng.randrange(500) for _ in range(n)] for n in (3, 40, 1, 120, 560, 33, 7)]


def numbers(llm: LLM, texts: list[list[int]]) -> list[list]:
    """What each request's every token was drawn from: ids and log-probabilities of the five likeliest."""
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=5, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
    return [[{t: x.logprob for t, x in step.items()} for step in out.outputs[0].logprobs] for out in outputs]


def alone(options: dict) -> list[list]:
    with LLM(overrides={**TINY, **options, "kv.prefix": "none"}) as llm:
        return [numbers(llm, [text])[0] for text in prompts()]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: ",".join(f"{k.split('.')[1]}={v}" for k, v in form.items()))
def test_no_bit_depends_on_the_schedule(form):
    expected = alone(form)
    for way in WAYS:
        with LLM(overrides={**TINY, **form, **way}) as llm:
            assert numbers(llm, prompts()) == expected, way
            assert numbers(llm, prompts()[::-1]) == expected[::-1], f"again, {way}"  # their beginnings are cached now


def test_the_comparison_sees_bits():
    assert alone({"model.dtype": "float32"}) != alone({"model.dtype": "float32", "kv.dtype": "float16"})


def decision(**options) -> tuple[str, str]:
    with LLM(overrides={"model.path": "dummy:tiny", "kv.num_blocks": 20, **options}) as llm:
        return next((str(d.value), d.reason) for d in llm.decisions if d.field == "model.invariant")


def test_the_start_up_table_says_whether_it_holds():
    assert decision(**{"model.invariant": True}) == ("True", "all numbers are computed by row, in one order")
    free = decision(**{"model.dtype": "float32", "model.quantization": "int4"})
    assert free == ("True", "all numbers are computed by row, in one order, which costs nothing here")
    assert decision(**{"model.dtype": "float32"})[0] == "False"  # a library's products
    assert decision(**{"runner.attention": "sdpa"}) == ("False", "attention sums by its number of queries")
    # in bfloat16 a CPU with AMX has another reason before it
    assert "adapter" in decision(**{"lora.enabled": True, "model.dtype": "float32", "model.quantization": "int4"})[1]
    guesses = {"spec_decode.method": "ngram", "spec_decode.acceptance": "rejection", "model.quantization": "int4"}
    assert "drawn" in decision(**guesses, **{"model.dtype": "float32"})[1]


def test_what_cannot_be_invariant_is_refused():
    with pytest.raises(ConfigError, match="experts"):
        LLM(overrides={"model.path": "dummy:tiny-moe", "model.invariant": True})
    with pytest.raises(ConfigError, match="only attention=cpu sums in one order"):
        LLM(overrides={**TINY, "runner.attention": "sdpa"})
