"""/v1/models with the `anthropic` package, over a real socket."""

from __future__ import annotations

from datetime import UTC, datetime

import anthropic
import httpx
import openai
import pytest

NAMES = [f"model-{i}" for i in range(5)]


@pytest.fixture(scope="module")
def url(serving):
    from serve.conftest import FakeEngine

    with serving(FakeEngine(), names=NAMES) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    return anthropic.Anthropic(base_url=url, api_key="x", max_retries=0, timeout=20)


def test_models_are_listed_as_anthropics_client_reads_them(client, url):
    page = client.models.list()
    assert [model.id for model in page.data] == NAMES and (page.first_id, page.last_id) == (NAMES[0], NAMES[-1])
    assert not page.has_more
    model = client.models.retrieve("model-3")
    assert (model.type, model.display_name, model.max_input_tokens) == ("model", "model-3", 100)
    assert abs((datetime.now(UTC) - model.created_at).total_seconds()) < 3600
    declared = set(anthropic.types.ModelInfo.model_fields)
    assert set(httpx.get(f"{url}/v1/models/model-3", headers={"anthropic-version": "1"}).json()) <= declared
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("claude")


@pytest.mark.parametrize("limit", [1, 2, 5, 20])
def test_pages_follow_each_other_in_both_directions(client, limit):
    assert [model.id for model in client.models.list(limit=limit)] == NAMES
    back = client.models.list(limit=limit, before_id=NAMES[3])
    assert [model.id for model in back.data] == NAMES[max(0, 3 - limit) : 3] and back.has_more == (limit < 3)


def test_a_page_that_cannot_be_is_a_400(client):
    for fields in ({"limit": 0}, {"limit": 1001}, {"after_id": "x"}, {"before_id": "x"}):
        with pytest.raises(anthropic.BadRequestError, match=next(iter(fields))):
            client.models.list(**fields)


def test_everybody_else_gets_openais_form(url):
    models = openai.OpenAI(base_url=f"{url}/v1", api_key="x").models
    assert [model.id for model in models.list()] == NAMES and models.retrieve(NAMES[0]).object == "model"
