"""EleutherAI's lm-eval, with a task of three questions that needs no download."""

from __future__ import annotations

import json
import os

import pytest

lm_eval = pytest.importorskip("lm_eval")
QUESTIONS = [("Two and two are", "four"), ("The sea is", "blue"), ("Snow is", "white")]


@pytest.fixture
def task(tmp_path):
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer in QUESTIONS]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))

    def task(output_type, **more):
        return {
            "task": "three_questions",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}},
            "test_split": "test",
            "output_type": output_type,
            "doc_to_text": "{{question}}",
            "metadata": {"version": 1},
            **more,
        }

    return task


@pytest.fixture
def evaluate(served):
    def evaluate(kind, path, task, tokenizer="tokenizer_backend=None", **more):
        where = f"model={served.model},base_url={served.url}{path},num_concurrent=2,max_retries=1,{tokenizer}"
        found = lm_eval.simple_evaluate(model=kind, model_args=where, tasks=[task], log_samples=True, **more)
        return found["samples"]["three_questions"]

    return evaluate


@pytest.mark.shows("call")
@pytest.mark.parametrize("kind", ["local-chat-completions", "local-completions"])
def test_each_question_is_answered(evaluate, task, kind):
    chats = kind == "local-chat-completions"
    generation = {"until": ["\n\n"], "max_gen_toks": 16, "temperature": 0}
    asked = task("generate_until", doc_to_target="{{answer}}", generation_kwargs=generation)
    path = "/v1/chat/completions" if chats else "/v1/completions"
    samples = evaluate(kind, path, asked, apply_chat_template=chats)
    assert len(samples) == 3 and all(isinstance(sample["resps"][0][0], str) for sample in samples)


@pytest.mark.shows("call")
def test_a_choice_is_made_by_its_likelihood(evaluate, task):
    """With `echo` and `logprobs`: the prompt is scored."""
    if not (folder := os.environ.get("CLIENTS_TOKENIZER")):
        pytest.skip("a dummy has no folder with a tokenizer, which lm-eval reads itself")
    choices = ["four", "blue", "white"]
    asked = task("multiple_choice", doc_to_choice=choices, doc_to_target="{{answer}}")
    tokenizer = f"tokenizer_backend=huggingface,tokenizer={folder}"
    samples = evaluate("local-completions", "/v1/completions", asked, tokenizer)
    scores = [[float(response[0][0]) for response in sample["resps"]] for sample in samples]
    assert choices[scores[1].index(max(scores[1]))] == "blue" and all(score < 0 for each in scores for score in each)
