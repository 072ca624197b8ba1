import pytest
import torch

from minivllm import LLM, BeamSearchParams, SamplingParams
from minivllm.errors import BadRequest
from minivllm.scheduler.beam_search import BeamSearch

SMALL = {"kv.num_blocks": 200, "kv.block_size": 4, "executor.num_threads": 1, "model.dtype": "float32"}
SMALL |= {"kv.swap_memory": "1MiB"}  # debug.check counts a pool's blocks in every step
PROMPTS = [[5, 9, 2, 7, 11], [100, 3], [42, 17, 42, 17, 42, 17, 8, 300, 21]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random Llama, with a tokenizer, saved by transformers; sharp enough for its beams to differ."""
    from tiny_tokenizers import byte_level, save
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=3,
        tie_word_embeddings=False, initializer_range=0.4,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("beam") / "tiny"
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data[3] *= 2.5  # the end of the sequence is at times likely
    model.save_pretrained(path)
    save(byte_level(), path)
    return path


def transformers_beams(folder, prompt, params: BeamSearchParams):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=None if params.ignore_eos else 3,
            pad_token_id=0,
            do_sample=False,
        )
    beams = []
    for row in out[:, len(prompt) :].tolist():
        beams.append(row[: row.index(3) + 1] if not params.ignore_eos and 3 in row else row)
    return beams


@pytest.mark.parametrize("preset, fork", [("v0", "share"), ("v1", "lookup"), ("v1", "share"), ("static", "lookup")])
@pytest.mark.parametrize(
    "params",
    [
        BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True),
        BeamSearchParams(beam_width=4, max_tokens=12, ignore_eos=True),
        BeamSearchParams(beam_width=3, max_tokens=20),
        BeamSearchParams(beam_width=3, max_tokens=20, length_penalty=2.0),
        BeamSearchParams(beam_width=3, max_tokens=20, length_penalty=0.0, early_stopping=True),
    ],
    ids=str,
)
def test_beams_equal_transformers_in_fp32(folder, params, preset, fork):
    with LLM(str(folder), preset=preset, overrides={**SMALL, "kv.fork": fork, "debug.check": True}) as llm:
        outputs = llm.beam_search(PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert [c.token_ids for c in output.outputs] == transformers_beams(folder, prompt, params)


def test_some_beam_of_the_cases_above_ends_early(folder):
    """Else they would not test the rules for the end of a sequence."""
    with LLM(str(folder), overrides=SMALL) as llm:
        outputs = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=20), use_tqdm=False)
        assert {c.finish_reason for o in outputs for c in o.outputs} == {"stop", "length"}
        assert llm.stats.prefix_hits > 0.5 * llm.stats.prefix_queries
        (text,) = llm.beam_search("hello", BeamSearchParams(beam_width=2, max_tokens=3), use_tqdm=False)
        assert text.prompt == "hello" and len(text.outputs) == 2


@pytest.mark.parametrize("preset", ["v0", "v1"])
def test_greedy_sampled_and_beam_requests_in_one_batch_equal_each_alone(folder, preset):
    params = [
        SamplingParams(temperature=0, max_tokens=9),
        BeamSearchParams(beam_width=3, max_tokens=9),
        SamplingParams(temperature=0.9, seed=4, n=2, max_tokens=9),
    ]
    with LLM(str(folder), preset=preset, overrides={**SMALL, "debug.check": True}) as llm:

        def answers(prompts, params):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [[c.token_ids for c in output.outputs] for output in outputs]

        alone = [answers([prompt], [one])[0] for prompt, one in zip(PROMPTS, params, strict=True)]
        assert answers(PROMPTS, params) == alone and [len(choices) for choices in alone] == [1, 3, 2]


def test_a_beam_reports_each_of_its_tokens(folder):
    with LLM(str(folder), overrides=SMALL) as llm:
        (output,) = llm.beam_search(PROMPTS[:1], BeamSearchParams(beam_width=2, max_tokens=5), use_tqdm=False)
    for choice in output.outputs:
        reported = [next(iter(position.items())) for position in choice.logprobs]
        assert [token for token, _ in reported] == choice.token_ids
        assert choice.cumulative_logprob == pytest.approx(sum(logprob.logprob for _, logprob in reported))


def test_beam_width_and_length_are_checked():
    with pytest.raises(BadRequest, match="beam_width must be at least 1 and at most 10, got 11"):
        BeamSearchParams(beam_width=11, max_tokens=4)
    with pytest.raises(BadRequest, match="max_tokens"):
        BeamSearchParams(beam_width=2, max_tokens=0)


def test_an_ending_below_the_best_width_does_not_count():
    search = BeamSearch(BeamSearchParams(beam_width=1, max_tokens=5), eos_token_ids=(0,), max_tokens=5)
    search.advance([[(7, -0.1, 1), (0, -0.2, 2)]])
    assert not search.finished and [beam.token_ids for beam in search.running] == [(7,)]
    search.advance([[(0, -0.1, 1), (7, -3.0, 2)]])
    assert search.done and search.finished[0].beam.token_ids == (7, 0)
