"""Speculation in a whole engine on a tiny model: more tokens a step, the same tokens in the end."""

import pytest

from minivllm import LLM, SamplingParams
from minivllm.engine.metrics import Metrics
from minivllm.errors import ConfigError
from minivllm.trace import TraceRecorder, read, replay

SMALL = {"model.path": "dummy:tiny", "model.dtype": "float32", "kv.num_blocks": 60, "kv.block_size": 8}
SMALL |= {"executor.num_threads": 1, "debug.check": True, "spec_decode.model": "dummy:tiny"}
METHODS = ("ngram", "suffix", "draft", "self_draft")
PROMPTS = [[5, 6, 7, 8, 9] * 6, [11, 12] * 9 + [3], list(range(40)), [5, 6, 7, 8, 9] * 3 + [1, 2]]
# A bias this strong makes the tiny model repeat a few tokens, so that drafts are often right.
FEW = {t: 8.0 for t in range(20, 26)}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PARAMS = {
    "greedy": [GREEDY] * 4,
    "processors": [
        GREEDY.replace(logit_bias=FEW, presence_penalty=0.3),
        GREEDY.replace(logit_bias=FEW, repetition_penalty=1.02, temperature=0.7, seed=1),
        GREEDY.replace(bad_words_token_ids=((20, 21), (22,)), begin_suppress_tokens=(23, 24, 25), logit_bias=FEW),
        GREEDY.replace(ignore_eos=False, min_tokens=9, stop_token_ids=(20, 21), logit_bias=FEW),
    ],
    "sampled": [GREEDY.replace(temperature=0.4 + 0.2 * i, seed=i, allowed_token_ids=list(range(9))) for i in range(4)],
    "logprobs": [GREEDY.replace(logprobs=3, temperature=0.5 * (i % 2), seed=i, logit_bias=FEW) for i in range(4)],
}


def generate(params, **overrides):
    with LLM(overrides={**SMALL, **overrides}) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
        return [o.outputs[0] for o in outputs], llm._core.stats


@pytest.fixture(scope="module")
def wanted():
    return {kind: generate(params)[0] for kind, params in PARAMS.items()}


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("method", METHODS)
def test_the_same_tokens_as_without(method, kind, wanted):
    got, stats = generate(PARAMS[kind], **{"spec_decode.method": method, "spec_decode.adaptive": False})
    for a, b in zip(got, wanted[kind], strict=True):
        assert list(a.token_ids) == list(b.token_ids) and a.finish_reason == b.finish_reason
        if b.logprobs is not None:
            assert len(a.logprobs) == len(b.logprobs)
            for x, y in zip(a.logprobs, b.logprobs, strict=True):
                assert x.keys() == y.keys()
                assert [x[t].logprob for t in x] == pytest.approx([y[t].logprob for t in y], abs=1e-4)
    if method == "draft" and kind == "greedy":  # the same weights; elsewhere it does not see the processors
        assert 0 < stats.num_accepted == stats.num_drafted
    elif method != "self_draft":  # two random layers of four guess nothing right
        assert 0 < stats.num_accepted < stats.num_drafted


@pytest.mark.parametrize(
    "options",
    [{"debug.preempt_every": 2}, {"spec_decode.method": "ngram"}, {"scheduler.max_num_batched_tokens": 5}],
    ids=["preempted", "drafts", "chunks"],
)
def test_what_may_not_begin_an_output_may_follow_whatever_the_schedule(options):
    params = GREEDY.replace(temperature=0.8, seed=3, n=3, logit_bias=FEW, begin_suppress_tokens=tuple(range(20, 24)))
    with LLM(overrides=SMALL) as llm, LLM(overrides={**SMALL, **options}) as other:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        both = [
            [o.token_ids for r in each.generate(prompts, params, use_tqdm=False) for o in r.outputs]
            for each in (llm, other)
        ]
    assert both[0] == both[1]
    first, later = {ids[0] for ids in both[0]}, {token for ids in both[0] for token in ids[1:]}
    assert not first & set(range(20, 24)) and later >= set(range(20, 24))


def test_a_repeating_request_takes_fewer_steps():
    params = [GREEDY.replace(allowed_token_ids=[20], max_tokens=42)] * 4
    _, plain = generate(params)
    for method in ("ngram", "suffix"):
        got, stats = generate(
            params, **{"spec_decode.method": method, "spec_decode.k": 6, "spec_decode.adaptive": False}
        )
        assert all(list(o.token_ids) == [20] * 42 for o in got)
        assert stats.num_steps < plain.num_steps / 3
        assert stats.generation_tokens == plain.generation_tokens


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_rejection_sampling_gives_other_tokens_and_the_same_greedy_ones(method, wanted):
    how = {"spec_decode.method": method, "spec_decode.acceptance": "rejection", "spec_decode.adaptive": False}
    assert [list(o.token_ids) for o in generate(PARAMS["greedy"], **how)[0]] == [
        list(o.token_ids) for o in wanted["greedy"]
    ]
    sampled, stats = generate(PARAMS["sampled"], **how)
    assert stats.num_accepted and [list(o.token_ids) for o in sampled] != [list(o.token_ids) for o in wanted["sampled"]]


def test_vllms_dictionary_is_understood():
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5, "prompt_lookup_min": 2}
    with LLM("dummy:tiny", speculative_config=config, overrides={"kv.num_blocks": 20}) as llm:
        asked = llm.config.spec_decode
        assert (asked.method, asked.k, asked.ngram_min, asked.ngram_max) == ("ngram", 3, 2, 5)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"method": "ngrm"}, 'Did you mean "ngram"'),
        ({"num_spec_tokens": 3}, 'no key "num_spec_tokens"'),
        ({"num_speculative_tokens": 0}, "spec_decode.k must be at least 1"),
        ("{", "no JSON"),
        ({"method": "ngram", "prompt_lookup_min": 9}, "spec_decode.ngram_min must be at least 1 and at most 4"),
    ],
)
def test_a_wrong_dictionary_is_refused_with_the_reason(given, message):
    with pytest.raises(ConfigError, match=message):
        LLM("dummy:tiny", speculative_config=given)


def test_acceptance_is_counted_in_the_metrics():
    metrics = Metrics()
    with LLM(overrides={**SMALL, "spec_decode.method": "ngram", "spec_decode.adaptive": False}) as llm:
        metrics.stats = llm._core.stats
        params = GREEDY.replace(allowed_token_ids=[20])
        llm.generate([{"prompt_token_ids": PROMPTS[0]}], params, use_tqdm=False)
        text = metrics.render().decode()
    accepted = llm._core.stats.num_accepted
    assert accepted > 10
    assert f'minivllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name=""}} {accepted}.0' in text
    assert "minivllm:spec_decode_num_draft_tokens_total" in text


def smollm2_says(method: str) -> tuple[list[str], int]:
    """Its texts, and how many drafts it accepted."""
    prompts = [
        'Repeat this exactly: {"name": "Ann", "age": 31, "city": "Rome"}, {"name": "Bob", "age": 32, "city": "Rome"}',
        "The three laws of motion are",
    ]
    params = [SamplingParams(temperature=0, max_tokens=32), SamplingParams(temperature=0.8, seed=4, max_tokens=32)]
    overrides = {"spec_decode.method": method, "spec_decode.adaptive": False, "kv.num_blocks": 200}
    with LLM(dtype="float32", overrides=overrides) as llm:
        texts = [o.outputs[0].text for o in llm.generate(prompts, params, use_tqdm=False)]
        return texts, llm._core.stats.num_accepted


@pytest.fixture(scope="module")
def smollm2_undrafted() -> list[str]:
    return smollm2_says("none")[0]


@pytest.mark.model
@pytest.mark.parametrize("method", ["ngram", "suffix", "self_draft"])
def test_smollm2_says_the_same(method, smollm2_undrafted):
    texts, num_accepted = smollm2_says(method)
    assert texts == smollm2_undrafted and num_accepted


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_a_recorded_run_with_drafts_replays(method, tmp_path):
    path = tmp_path / "run.jsonl"
    overrides = {**SMALL, "spec_decode.method": method, "spec_decode.adaptive": False, "debug.preempt_every": 4}
    with LLM(overrides=overrides, observers=[TraceRecorder(path)]) as llm:
        llm.generate([{"prompt_token_ids": p} for p in PROMPTS], PARAMS["greedy"], use_tqdm=False)
        assert llm._core.stats.num_accepted
    assert any(record.get("drafts") for record in read(path).steps())
    report = replay(path)
    assert report.divergence is None and report.num_tokens == 4 * 24


def test_stop_strings_inside_accepted_drafts_end_the_text_where_they_would(wanted):
    params = [GREEDY.replace(stop=[o.text[9:12]]) for o in wanted["greedy"]]
    plain, _ = generate(params)
    for method in METHODS:
        got, _ = generate(params, **{"spec_decode.method": method, "spec_decode.adaptive": False})
        assert [(o.text, o.finish_reason, o.stop_reason) for o in got] == [
            (o.text, o.finish_reason, o.stop_reason) for o in plain
        ]
