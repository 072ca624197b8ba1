"""Rule: a text's vector is what transformers' model and sentence-transformers' recipe make of it, in any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pooling.tiny import TEXTS, hidden_of, randomise, write_bert, write_decoder, write_modules
from tolerances import EMBEDDING, HIDDEN
from transformers import AutoModel, AutoTokenizer, LlamaConfig, MistralConfig, Qwen3Config

from minivllm import LLM, trace
from minivllm.errors import BadRequest, ConfigError, MinivllmError, ModelError, NeverFits
from minivllm.loading import load_model, sources
from minivllm.loading.dummy import write_tokenizer
from minivllm.pooling import task
from minivllm.request import BeamSearchParams, PoolingParams

ONE = {"executor.num_threads": 1, "debug.check": True}
SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
DECODERS = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=32),
    "mistral": MistralConfig(**SMALL, sliding_window=8),
}

LONG = "the sea is singing " * 20


def vectors(llm, prompts, **options) -> np.ndarray:
    return np.array([o.outputs.embedding for o in llm.embed(prompts, use_tqdm=False, **options)])


def pooled(hidden: torch.Tensor, kind: str, normalize: bool = True) -> np.ndarray:
    vector = {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[kind].double().numpy()
    return vector / np.linalg.norm(vector) if normalize else vector


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bert")


@pytest.fixture(scope="module")
def oracle(folder):
    return write_bert(folder)


@pytest.fixture(scope="module")
def llm(folder, oracle):
    return LLM(str(folder), overrides=ONE)


def expected(llm, oracle, texts, kind="mean", normalize=True):
    return np.array([pooled(hidden_of(oracle, llm.tokenizer.encode(text)), kind, normalize) for text in texts])


def test_a_model_that_embeds_is_known_by_its_task(llm):
    assert type(llm) is LLM and llm.task == "embed"


def test_vectors_equal_transformers(llm, oracle):
    found = vectors(llm, TEXTS)
    np.testing.assert_allclose(found, expected(llm, oracle, TEXTS), rtol=0, atol=EMBEDDING)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("kind", ["mean", "last", "cls"])
@pytest.mark.parametrize("normalize", [True, False])
def test_every_rule_of_pooling_equals_transformers(tmp_path, kind, normalize):
    oracle = write_bert(tmp_path)
    switch = {"mean": "mean_tokens", "last": "lasttoken", "cls": "cls_token"}[kind]
    steps = ("Transformer", "Pooling", "Normalize")[: 2 + normalize]
    write_modules(tmp_path, *steps, **{f"pooling_mode_{switch}": True})
    llm = LLM(str(tmp_path), overrides=ONE)
    tolerance, wanted = EMBEDDING if normalize else HIDDEN, expected(llm, oracle, TEXTS, kind, normalize)
    np.testing.assert_allclose(vectors(llm, TEXTS), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("budget", [64, 70, 4096])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 128])
def test_what_else_is_in_the_batch_does_not_change_a_vector(folder, llm, budget, max_num_seqs):
    other = LLM(str(folder), max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, overrides=ONE)
    texts = [TEXTS[i * 5 % len(TEXTS)] + "s" * (i % 7) for i in range(17)]
    alone = np.concatenate([vectors(llm, [text]) for text in texts])
    np.testing.assert_allclose(vectors(other, texts), alone, rtol=0, atol=EMBEDDING)
    assert max_num_seqs > 1 or other.stats.num_steps == len(texts)


@pytest.mark.parametrize(
    "options",
    [
        {"engine.overlap": 2},
        {"engine.core": "process"},
        {"engine.core": "process", "engine.replicas": 2},
        {"engine.core": "process", "engine.replicas": 2, "engine.overlap": 2, "scheduler.policy": "fair"},
        {"scheduler.policy": "priority"},
    ],
    ids=str,
)
def test_how_the_engine_runs_does_not_change_a_vector(folder, llm, options):
    texts = [TEXTS[i * 5 % len(TEXTS)] + "s" * (i % 7) for i in range(23)]
    with LLM(str(folder), max_num_seqs=3, overrides={**ONE, **options}) as other:
        np.testing.assert_allclose(vectors(other, texts), vectors(llm, texts), rtol=0, atol=EMBEDDING)
        assert other.stats.prompt_tokens == sum(len(llm.tokenizer.encode(text)) for text in texts)
        assert len(other.stats.parts) == options.get("engine.replicas", 1)
        assert all(part.num_steps > 0 for part in other.stats.parts)
        scores = [output.outputs.score for output in other.score("a", ["b", "a"], use_tqdm=False)]
    np.testing.assert_allclose(scores[1], 1, atol=1e-6)


def test_a_recorded_run_replays_to_the_same_vectors(folder, llm, tmp_path):
    path = tmp_path / "run.jsonl"
    with LLM(str(folder), max_num_seqs=3, overrides={**ONE, "debug.trace": str(path)}) as recorded:
        wanted = vectors(recorded, TEXTS)
    report = trace.replay(path)
    assert report.divergence is None and report.num_tokens == wanted.size
    pooled = [numbers for step in trace.read(path).steps() for numbers in step.get("pooled", {}).values()]
    assert {tuple(numbers) for numbers in pooled} == {tuple(numbers) for numbers in wanted.tolist()}


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("config", DECODERS.values(), ids=DECODERS)
def test_a_decoders_vectors_equal_transformers(tmp_path, config, pooling):
    oracle = write_decoder(tmp_path, config)
    llm = LLM(str(tmp_path), task="embed", dtype="float32", pooling=pooling, overrides=ONE)
    found = vectors(llm, TEXTS)
    np.testing.assert_allclose(found, expected(llm, oracle, TEXTS, pooling), rtol=0, atol=EMBEDDING)
    alone = np.concatenate([vectors(llm, [text]) for text in TEXTS])
    np.testing.assert_allclose(found, alone, rtol=0, atol=EMBEDDING)


def test_a_decoder_pools_its_last_token_unless_told_otherwise(tmp_path):
    oracle = write_decoder(tmp_path, DECODERS["llama"])
    llm = LLM(str(tmp_path), task="embed", dtype="float32", overrides=ONE)
    np.testing.assert_allclose(vectors(llm, TEXTS), expected(llm, oracle, TEXTS, "last"), rtol=0, atol=EMBEDDING)


@pytest.mark.parametrize("config", [DECODERS["llama"], DECODERS["qwen3"]], ids=["llama", "qwen3"])
def test_a_decoder_that_was_saved_without_its_head_embeds(tmp_path, config):
    """As sentence-transformers saves it: a LlamaModel, whose tensors' names lack their first part."""
    oracle = randomise(AutoModel.from_config(config))
    oracle.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, config.vocab_size)
    llm = LLM(str(tmp_path), overrides=ONE)
    assert llm.task == "embed" and "without an LM head" in llm.decisions[0].reason
    np.testing.assert_allclose(vectors(llm, TEXTS), expected(llm, oracle, TEXTS, "last"), rtol=0, atol=EMBEDDING)
    with pytest.raises(ConfigError, match="it can embed"):
        LLM(str(tmp_path), task="generate")
    with pytest.raises(ModelError, match="without its LM head reads texts"):
        load_model(str(tmp_path), torch.float32, "cpu")


def test_a_decoder_with_modules_json_embeds_unless_told_to_generate(tmp_path):
    oracle = write_decoder(tmp_path, DECODERS["llama"])
    write_modules(tmp_path, "Transformer", "Pooling", "Normalize", limit=32, pooling_mode_mean_tokens=True)
    llm = LLM(str(tmp_path), dtype="float32", overrides=ONE)
    assert (llm.task, llm.max_model_len) == ("embed", 32)
    short = TEXTS[:3]
    np.testing.assert_allclose(vectors(llm, short), expected(llm, oracle, short, "mean"), rtol=0, atol=EMBEDDING)
    with LLM(str(tmp_path), task="generate", overrides={"kv.num_blocks": 20, **ONE}) as llm:
        assert llm.task == "generate"


def test_prompts_may_be_token_ids_and_keep_their_order(llm):
    ids = [llm.tokenizer.encode(text) for text in TEXTS]
    wanted = vectors(llm, TEXTS)
    np.testing.assert_allclose(vectors(llm, ids), wanted, atol=1e-6)
    as_dicts = [{"prompt_token_ids": ids[2]}, {"prompt": TEXTS[0]}]
    np.testing.assert_allclose(vectors(llm, as_dicts), wanted[[2, 0]], atol=1e-6)
    assert [o.prompt_token_ids for o in llm.embed(TEXTS, use_tqdm=False)] == ids
    np.testing.assert_allclose(vectors(llm, TEXTS[1]), wanted[1:2], atol=1e-6)  # one text


def test_dimensions_cut_and_normalise_again(llm):
    whole, short = vectors(llm, TEXTS), vectors(llm, TEXTS, dimensions=7)
    assert short.shape == (len(TEXTS), 7)
    np.testing.assert_allclose(short, whole[:, :7] / np.linalg.norm(whole[:, :7], axis=1)[:, None], atol=1e-6)
    assert np.array_equal(vectors(llm, TEXTS, dimensions=48), whole)
    for wrong in (0, -1, 49):
        with pytest.raises(BadRequest, match="between 1 and 48"):
            llm.embed(TEXTS, dimensions=wrong)


def test_a_text_too_long_is_refused_or_cut_on_request(llm):
    long = "the sea " * 100
    with pytest.raises(NeverFits, match="202 tokens; this model takes 64"):
        llm.embed(long)
    (cut,) = llm.embed(long, truncate_prompt_tokens=-1, use_tqdm=False)
    ids = llm.tokenizer.encode(long)
    assert cut.prompt_token_ids == [*ids[:63], ids[-1]]  # [SEP] stays
    (cut,) = llm.embed(long, truncate_prompt_tokens=10, use_tqdm=False)
    assert cut.prompt_token_ids == [*ids[:9], ids[-1]]
    (whole,) = llm.embed("a", truncate_prompt_tokens=10, use_tqdm=False)
    assert whole.prompt_token_ids == llm.tokenizer.encode("a")
    (cut,) = llm.embed([ids], truncate_prompt_tokens=10, use_tqdm=False)
    assert cut.prompt_token_ids == ids[:10]  # token ids are taken as they are
    left = {"truncation_side": "left", "use_tqdm": False}
    (cut,) = llm.embed(long, truncate_prompt_tokens=10, **left)
    assert cut.prompt_token_ids == [ids[0], *ids[-9:]]
    (cut,) = llm.embed([ids], truncate_prompt_tokens=10, **left)
    assert cut.prompt_token_ids == ids[-10:]
    with pytest.raises(BadRequest, match='truncation_side must be left or right, got "Left"'):
        llm.embed(long, truncate_prompt_tokens=10, truncation_side="Left")
    for wrong in (0, -2):
        with pytest.raises(BadRequest, match="truncate_prompt_tokens must be -1"):
            llm.embed(long, truncate_prompt_tokens=wrong)
    with pytest.raises(BadRequest, match="no room for a text"):
        llm.embed(long, truncate_prompt_tokens=2)


def test_a_prompt_of_the_models_goes_before_a_text(tmp_path):
    write_bert(tmp_path)
    asks = {"prompts": {"query": "is ", "sea": "the sea "}, "default": "sea", "pooling_mode_mean_tokens": True}
    write_modules(tmp_path, "Transformer", "Pooling", "Normalize", **asks)
    with LLM(str(tmp_path), overrides=ONE) as llm:
        for name, prompt in (("query", "is "), ("sea", "the sea "), (None, "the sea ")):
            (found,) = llm.embed("singing", prompt_name=name, use_tqdm=False)
            assert found.prompt_token_ids == llm.tokenizer.encode(prompt + "singing")
        (found,) = llm.embed([[2, 50, 3]], use_tqdm=False)
        assert found.prompt_token_ids == [2, 50, 3]
        with pytest.raises(BadRequest, match="these are token ids"):
            llm.embed([[2, 50, 3]], prompt_name="query")
        with pytest.raises(BadRequest, match='no prompt of the name "passage"'):
            llm.embed("singing", prompt_name="passage")
        (scored,) = llm.score("singing", "singing", use_tqdm=False)
        assert scored.prompt_token_ids == llm.tokenizer.encode("the sea singing")


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "empty"),
        ([[]], "no tokens"),
        ([[5, 10**6]], "1000000 is not in the vocabulary"),
        ([[5, -1]], "-1 is not in the vocabulary"),
        ([3.5], "got float"),
        ([{"text": "a"}], "dictionary"),
    ],
)
def test_what_is_no_text_is_refused_before_anything_runs(llm, prompts, message):
    steps = llm.stats.num_steps
    with pytest.raises(BadRequest, match=message):
        llm.embed(prompts)
    assert llm.stats.num_steps == steps


@pytest.mark.parametrize("normalize", [True, False])
def test_a_request_may_leave_the_last_step_out_or_ask_for_it(tmp_path, normalize):
    oracle = write_bert(tmp_path)
    write_modules(tmp_path, *("Transformer", "Pooling", "Normalize")[: 2 + normalize], pooling_mode="mean")
    llm = LLM(str(tmp_path), overrides=ONE)
    raw = expected(llm, oracle, TEXTS, normalize=False)
    unit = raw / np.linalg.norm(raw, axis=1)[:, None]
    for asked, wanted in ((None, unit if normalize else raw), (True, unit), (False, raw)):
        np.testing.assert_allclose(vectors(llm, TEXTS, use_activation=asked), wanted, rtol=0, atol=HIDDEN)
    (short,) = vectors(llm, TEXTS[:1], use_activation=False, dimensions=5)
    np.testing.assert_allclose(short, raw[0, :5], rtol=0, atol=HIDDEN)

    # In one step, whose rows are then of both kinds.
    asks = [None, False, True]
    for i, asked in enumerate(asks):
        text, params = llm.texts.text(TEXTS[0]), PoolingParams(use_activation=asked)
        llm._client.add(llm.texts.pooling_requests([text], f"r{i}", params)[0])
    found, steps = {}, llm.stats.num_steps
    while len(found) < len(asks):
        for output in llm._front.process(llm._client.poll(None))[0]:
            (found[output.request_id],) = output.all_vectors()
    assert llm.stats.num_steps == steps + 1
    wanted = [unit[0] if normalize else raw[0], raw[0], unit[0]]
    np.testing.assert_allclose([found[f"r{i}"] for i in range(3)], wanted, rtol=0, atol=HIDDEN)


def test_scores_are_cosines_of_vectors(llm):
    query, *documents = TEXTS
    whole = vectors(llm, TEXTS)
    found = llm.score(query, documents, use_tqdm=False)
    np.testing.assert_allclose([o.outputs.score for o in found], whole[1:] @ whole[0], atol=1e-6)
    assert [o.prompt_token_ids for o in found] == [llm.tokenizer.encode(text) for text in documents]
    pairs = llm.score(documents, documents, use_tqdm=False)
    np.testing.assert_allclose([o.outputs.score for o in pairs], 1, atol=1e-6)
    with pytest.raises(BadRequest, match="2 queries, but 3 documents"):
        llm.score(["a", "b"], ["a", "b", "c"])
    with pytest.raises(BadRequest, match="nothing to score"):
        llm.score("a", [])


@pytest.mark.parametrize("activation", ["Sigmoid", "Identity"])
def test_a_cross_encoder_scores_pairs_as_transformers_does(tmp_path, activation):
    extra = {"sentence_transformers": {"activation_fn": f"torch.nn.modules.{activation}"}}
    oracle = write_bert(tmp_path, num_labels=1, **extra)
    llm = LLM(str(tmp_path), overrides=ONE)
    query, *documents = TEXTS
    wanted = []
    for document in documents:
        encoding = llm.tokenizer._tokenizer.encode(query, document)
        with torch.inference_mode():
            logit = oracle(torch.tensor([encoding.ids]), token_type_ids=torch.tensor([encoding.type_ids])).logits
        wanted.append(float(logit.sigmoid() if activation == "Sigmoid" else logit))
    found = [o.outputs.score for o in llm.score(query, documents, use_tqdm=False)]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=HIDDEN)
    raw = np.array([o.outputs.score for o in llm.score(query, documents, use_activation=False, use_tqdm=False)])
    np.testing.assert_allclose(1 / (1 + np.exp(-raw)) if activation == "Sigmoid" else raw, wanted, rtol=0, atol=HIDDEN)
    with pytest.raises(BadRequest, match="scores pairs and embeds nothing"):
        llm.embed("a")


def test_a_pair_too_long_is_cut_as_sentence_transformers_cuts_it(tmp_path):
    """ "longest_first", by transformers' own tokenizer."""
    write_bert(tmp_path, num_labels=1)
    pairs = [("the sea", LONG), (LONG, "the sea"), (LONG, LONG + " is"), (LONG, LONG), ("is " * 30, LONG)]
    with LLM(str(tmp_path), overrides=ONE) as llm:
        for side in ("right", "left"):
            theirs = AutoTokenizer.from_pretrained(tmp_path, truncation_side=side)
            for pair in pairs:
                for most in (64, 33, 10, 5):
                    (found,) = llm.score(*pair, truncate_prompt_tokens=most, truncation_side=side, use_tqdm=False)
                    wanted = theirs(*pair, truncation="longest_first", max_length=most)["input_ids"]
                    assert found.prompt_token_ids == wanted, (side, most, pair)
        (found,) = llm.score(*pairs[0], truncate_prompt_tokens=-1, use_tqdm=False)
        assert len(found.prompt_token_ids) == 64
        with pytest.raises(NeverFits):
            llm.score(*pairs[0])
        with pytest.raises(BadRequest, match="no room for two texts: 3 are special"):
            llm.score(*pairs[0], truncate_prompt_tokens=4)


def test_numbers_that_are_not_finite_are_an_error_and_no_vector(tmp_path):
    from safetensors.torch import load_file, save_file

    write_bert(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"][5] = float("nan")  # "a"
    save_file(tensors, tmp_path / "model.safetensors")
    llm = LLM(str(tmp_path), overrides=ONE)
    with pytest.raises(MinivllmError, match="text 1: .*not finite"):
        llm.embed(["the sea", "a"], use_tqdm=False)
    assert np.isfinite(vectors(llm, ["the sea"])).all()


def test_a_model_that_embeds_generates_nothing(llm):
    search = BeamSearchParams(beam_width=2, max_tokens=2)
    chat = [{"role": "user", "content": "x"}]
    for ask in (lambda: llm.generate("x"), lambda: llm.chat(chat), lambda: llm.beam_search("x", search)):
        with pytest.raises(BadRequest, match="has embed.. and score.., and generates nothing"):
            ask()
    with pytest.raises(BadRequest, match="LoRA is off"):
        llm.load_lora("x", "folder")


def test_an_llm_that_generates_embeds_nothing():
    with LLM("dummy:tiny", overrides={"kv.num_blocks": 20, **ONE}) as llm:
        for ask in (lambda: llm.embed("x"), lambda: llm.score("x", "y")):
            with pytest.raises(BadRequest, match='LLM.model, task="embed"'):
                ask()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overrides": {"kv.prefix": "none"}}, "kv.prefix: model.task=embed has no KV cache"),
        ({"overrides": {"model.invariant": True}}, "model.invariant: model.task=embed"),
        ({"preset": "v0"}, "scheduler.kind"),
        ({"overrides": {"spec_decode.method": "ngram"}}, "spec_decode.method"),
        ({"enable_lora": True}, "lora.enabled"),
        ({"task": "generate"}, "is a BertModel: it can embed"),
        ({"task": "score"}, "a BertModel: it can embed; .* classification head of one label scores"),
        ({"max_model_len": 65}, "64 positions"),
        ({"max_model_len": 60, "max_num_batched_tokens": 50}, "max_num_batched_tokens"),
        ({"pooling": "max"}, "pooling"),
    ],
)
def test_an_option_that_would_do_nothing_or_cannot_be_is_refused(folder, oracle, options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(str(folder), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"task": "score"}, "classification head"), ({"pooling": "mean"}, "needs model.task=embed")],
)
def test_a_decoder_does_not_score_and_pools_only_when_it_embeds(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM("dummy:tiny", **options)


def test_a_step_that_is_smaller_than_the_model_limits_a_text(folder, oracle):
    llm = LLM(str(folder), max_num_batched_tokens=20, overrides=ONE)
    assert llm.max_model_len == 20
    assert any(d.field == "model.max_model_len" and "max_num_batched_tokens=20" in d.reason for d in llm.decisions)


def test_the_aliases_that_embed_are_the_loaders():
    folders = {name for name, model in sources.ALIASES.items() if model.member.endswith("/")}
    assert folders - {"whisper-tiny.en"} == set(task.ALIASES)
