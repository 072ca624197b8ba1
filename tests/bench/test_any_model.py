"""Rules: the page of transformers' classes is what the committed record says, and a run of some leaves the others."""

from __future__ import annotations

import json

import pytest

from bench import any_model


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads(any_model.RESULT.read_text())


def test_the_page_is_made_of_the_record(record):
    assert any_model.DOCS_PAGE.read_text() == any_model.page_of(record)


def test_the_record_names_classes_of_transformers_and_for_each_that_is_not_equal_the_reason(record):
    import transformers

    classes = record["results"]["classes"]
    if record["versions"]["transformers"] == transformers.__version__:
        assert set(classes) <= set(any_model.class_names()) and len(classes) > 150
    assert all(of["outcome"] == "equal" or of["why"] for of in classes.values())
    assert not [name for name, of in classes.items() if of["outcome"] in ("different", "failed")]


def test_a_run_of_some_classes_keeps_what_was_found_of_the_others(tmp_path):
    any_model.write(tmp_path / "r.json", {"B": {"outcome": "equal", "error": 1e-6}})
    any_model.write(tmp_path / "r.json", {"A": {"outcome": "refused", "why": "it has `sinks` | more"}})
    found = json.loads((tmp_path / "r.json").read_text())
    assert list(found["results"]["classes"]) == ["A", "B"] and found["results"]["counts"] == {"refused": 1, "equal": 1}
    page = any_model.page_of(found)
    assert "2 were tried, and 1 give" in page and "| `A` | `it has 'sinks' / more` |" in page
    assert "## Equal: 1\n\n`B`\n" in page


def test_a_class_is_equal_or_refused_by_what_the_engine_makes_of_it():
    assert any_model.in_a_process("PhiForCausalLM")["outcome"] == "equal"
    refused = any_model.in_a_process("BloomForCausalLM")
    assert refused["outcome"] == "refused" and "of 4 layers 0 gave their attention" in refused["why"]
