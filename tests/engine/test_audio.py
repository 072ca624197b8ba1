"""Rule: what is written of a recording is what transformers writes, whatever the engine does meanwhile."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from models.speech import START, greedy_oracle, recording, save_whisper

from minivllm import LLM, BeamSearchParams, SamplingParams
from minivllm.engine.audio import RATE, resampled
from minivllm.engine.speech import Speech
from minivllm.errors import BadRequest, ModelError

OPTIONS = {"model.dtype": "float32", "kv.num_blocks": 40, "kv.block_size": 8, "executor.num_threads": 1}
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
RECORDINGS = [recording(0), recording(1, 9_000), recording(2, 400)]
PROMPTS = [[START, 7, 8], [START, *range(20, 50)], [START]]
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one at a time": {"scheduler.max_num_seqs": 1},
    "in chunks, preempted": {"scheduler.max_num_batched_tokens": 16, "debug.preempt_every": 3},
    "swapped": {"debug.preempt_every": 3, "kv.preemption": "swap", "kv.swap_memory": "16MiB"},
    "V0": {},
    "reference": {"runner.attention": "reference", "runner.inputs": "rebuild", "kv.prefix": "radix"},
    "compiled": {"runner.forward": "piecewise"},
    "captured": {"runner.graphs": "full+piecewise", "runner.inputs": "gather"},
    "two steps in flight": {"engine.overlap": 2},
    "drafts": {"spec_decode.method": "ngram"},
    "in one run": {"kv.allocation": "max", "kv.prefix": "none"},
    "in a process": {"engine.core": "process"},
    "two replicas": {"engine.core": "process", "engine.replicas": 2},
}


def asked(prompt: list[int], samples: Any, **more: Any) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "multi_modal_data": {"audio": samples}, **more}


ASKED = [asked(prompt, samples) for prompt, samples in zip(PROMPTS, RECORDINGS, strict=True)]


@pytest.fixture(scope="module")
def whisper(tmp_path_factory) -> tuple[str, Any]:
    folder = tmp_path_factory.mktemp("whisper")
    return str(folder), save_whisper(folder)


@pytest.fixture(scope="module")
def expected(whisper) -> list[list[int]]:
    given = zip(RECORDINGS, PROMPTS, strict=True)
    found = [greedy_oracle(whisper[1], samples, prompt, NUM_TOKENS) for samples, prompt in given]
    others = greedy_oracle(whisper[1], RECORDINGS[1], PROMPTS[0], NUM_TOKENS)
    assert found[0] != others  # it hears
    return found


@pytest.fixture(scope="module")
def llm(whisper):
    with LLM(whisper[0], overrides={**OPTIONS, "engine.core": "inproc", "debug.check": True}) as llm:
        yield llm


def answers(llm: LLM, prompts: list[Any], params: Any = GREEDY) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_is_what_transformers_writes(way, whisper, expected):
    options = {"engine.core": "inproc", "debug.check": True} | OPTIONS | WAYS[way]
    with LLM(whisper[0], preset="v0" if way == "V0" else "v1", overrides=options) as llm:
        for _ in range(2):  # once more, from what is cached
            assert answers(llm, ASKED) == expected


def test_more_recordings_than_requests_at_once_take_turns(whisper):
    samples = [recording(seed, 800 * (1 + seed % 7)) for seed in range(9)]
    expected = [greedy_oracle(whisper[1], own, [START], NUM_TOKENS) for own in samples]
    options = {"scheduler.max_num_seqs": 2, "engine.core": "inproc", "debug.check": True, "debug.preempt_every": 5}
    with LLM(whisper[0], overrides=OPTIONS | options) as llm:
        assert answers(llm, [asked([START], own) for own in samples]) == expected
        state = llm._core.executor.worker.runner.model_state
        answers(llm, [asked([START], samples[0])])  # its first plan tells that the last ones have left
        assert len(state._slots) == 1 and len(state._free) == 1


def test_the_prefix_cache_finds_a_prompt_of_the_same_recording_and_no_other(llm):
    def cached(samples: np.ndarray, **more: Any) -> int:
        (output,) = llm.generate([asked([START, *range(50, 70)], samples, **more)], GREEDY, use_tqdm=False)
        return output.num_cached_tokens

    first, other = recording(3), recording(4)
    assert [cached(first), cached(first), cached(other), cached(first, cache_salt="s")] == [0, 16, 0, 0]
    assert cached(torch.tensor(first)) == cached((first.astype(np.float64), RATE)) == cached(first.tolist()) == 16


def test_samples_and_beams_of_one_recording_share_what_was_encoded(llm, whisper):
    state, plans = llm._core.executor.worker.runner.model_state, []
    encode = state.encode
    state.encode = lambda plan: plans.append(plan) or encode(plan)
    try:
        prompt = asked([START, 9], recording(5))
        llm.generate([prompt, prompt], SamplingParams(n=3, seed=1, max_tokens=5), use_tqdm=False)
        beams = llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=4))
        answers(llm, ASKED[:1])
    finally:
        del state.encode
    assert sum(len(plan.encode) for plan in plans) == 2  # of the samples and of the beams behind them, of the last
    assert len(beams[0].outputs) == 2


def test_text_prompts_get_no_special_tokens_but_those_that_are_written(llm):
    text = "abc"
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    given = {"prompt": text, "multi_modal_data": {"audio": recording(0)}}
    (output,) = llm.generate(given, GREEDY, use_tqdm=False)
    assert list(output.prompt_token_ids) == ids


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        ([START], "this model writes what it hears"),
        ("text", "this model writes what it hears"),
        ({"prompt": "text"}, "this model writes what it hears"),
        ({"prompt": "text", "multi_modal_data": None}, "this model writes what it hears"),
        ({"prompt": "text", "multi_modal_data": {"image": 1}}, "takes no other kind"),
        ({"prompt": "text", "multi_modal_data": recording(0)}, "takes no other kind"),
        ({"prompt": "text", "prompt_embeds": torch.zeros(2, 64)}, "this model writes what it hears"),
        (asked([], recording(0)), "the prompt has no tokens"),
        (asked([START], "text"), "floating-point samples"),
        (asked([START], [0, 1]), "floating-point samples"),
        (asked([START], np.zeros(100, np.int16)), "floating-point samples"),
        (asked([START], np.zeros((2, 100), np.float32)), r"one channel, of shape \[length\], got \[2, 100\]"),
        (asked([START], []), r"got \[0\]"),
        (asked([START], np.full(100, np.nan, np.float32)), "no numbers"),
        (asked([START], np.full(100, np.inf, np.float32)), "infinite"),
        (asked([START], (recording(0), 0)), "1,000 to 384,000 samples a second, got 0"),
        (asked([START], (recording(0), 16e3)), "samples a second, got 16000.0"),
        (asked([START], (recording(0), True)), "samples a second, got True"),
        (asked([START], np.zeros(RATE + 160, np.float32)), "1.0 seconds long, and the model hears 1 at once"),
        (asked([START], (np.zeros(9_000, np.float32), 8_000)), "1.1 seconds long"),
    ],
)
def test_what_is_no_recording_is_refused(llm, prompt, what):
    with pytest.raises(BadRequest, match=what):
        llm.generate(prompt, GREEDY, use_tqdm=False)


def test_models_of_text_take_none():
    options = {"model.path": "dummy:tiny", "kv.num_blocks": 20, "engine.core": "inproc"}
    with LLM(overrides=options) as llm, pytest.raises(BadRequest, match="takes text alone"):
        llm.generate(asked([5], recording(0)), GREEDY, use_tqdm=False)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_a_tone_is_the_same_tone_at_any_rate(rate):
    def tone(at: int) -> np.ndarray:
        return np.sin(2 * np.pi * 1_000 * np.arange(at // 2) / at).astype(np.float32)  # half a second

    found = resampled(tone(rate), rate)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, tone(RATE), rtol=0, atol=1e-5)


def test_what_a_lower_rate_cannot_hold_is_left_out():
    high = np.sin(2 * np.pi * 12_000 * np.arange(48_000) / 48_000).astype(np.float32)
    assert np.abs(resampled(high, 48_000)).max() < 1e-5
    assert resampled(np.ones(1, np.float32), 48_000).shape == (1,)


def test_how_many_languages_a_model_knows_is_told_by_its_file_or_its_size(tmp_path, llm):
    """Of the model: its tokenizer may lack the last tokens, which are times."""
    assert not Speech(llm.tokenizer, tmp_path, 51_864).is_multilingual  # tiny.en
    assert Speech(llm.tokenizer, tmp_path, 51_865).is_multilingual  # tiny
    (tmp_path / "generation_config.json").write_text('{"is_multilingual": false, "suppress_tokens": [5, 51865, -1]}')
    assert not Speech(llm.tokenizer, tmp_path, 51_865).is_multilingual
    assert Speech(llm.tokenizer, tmp_path, 51_865).unsaid == [5]


def test_an_older_folder_says_in_its_config_what_no_transcript_has(tmp_path, llm):
    (tmp_path / "config.json").write_text('{"suppress_tokens": [5], "begin_suppress_tokens": [6, 7]}')
    speech = Speech(llm.tokenizer, tmp_path, 51_865)
    assert (speech.unsaid, speech.unsaid_first) == ([5], [6, 7])
    (tmp_path / "generation_config.json").write_text('{"begin_suppress_tokens": [8]}')
    speech = Speech(llm.tokenizer, tmp_path, 51_865)
    assert (speech.unsaid, speech.unsaid_first) == ([], [8])


@pytest.mark.parametrize("field", ["suppress_tokens", "begin_suppress_tokens"])
def test_what_is_no_list_of_token_ids_is_refused_by_its_field(tmp_path, llm, field):
    for value in (7, "ab", [1, "2"], {"1": 2}):
        (tmp_path / "generation_config.json").write_text(json.dumps({field: value}))
        with pytest.raises(ModelError, match=f'generation_config.json: field "{field}" must be a list of token ids'):
            Speech(llm.tokenizer, tmp_path, 51_865)


def test_a_tokenizer_that_is_no_whispers_is_told_so(llm, tmp_path):
    with pytest.raises(ModelError, match=r"has no <\|startoftranscript\|>: it is not a Whisper's"):
        Speech(llm.tokenizer, tmp_path, 51_865).start("", 9)
