"""llm, Simon Willison's command and library, with a model of its extra-openai-models.yaml."""

from __future__ import annotations

import gc
import importlib
import json

import pytest
from clients.suites.common import ENDLESS, GREEDY, HOT, QUESTION, Report, weather

llm = pytest.importorskip("llm")


@pytest.fixture
def model(served, tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    known = {"model_id": "here", "model_name": served.model, "api_base": f"{served.url}/v1"}
    known |= {"supports_tools": True, "supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([known]))  # JSON is YAML
    return llm.get_model("here")


@pytest.fixture
def command(model):
    """What the command prints."""
    from click.testing import CliRunner

    def command(*args):
        done = CliRunner().invoke(importlib.import_module("llm.cli").cli, args, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    return command


def options(fields):
    return [part for name, value in fields.items() for part in ("-o", name, str(value))]


@pytest.mark.shows("call")
def test_the_command_prints_what_the_library_gives(model, command):
    said = model.prompt(QUESTION, stream=False, **GREEDY).text()
    assert said and command("-m", "here", "--no-stream", *options(GREEDY), QUESTION).strip() == said.strip()


@pytest.mark.shows("stream")
def test_the_pieces_of_a_stream_are_the_whole_answer(model, command):
    pieces = list(model.prompt(QUESTION, **GREEDY))
    assert "".join(pieces) == model.prompt(QUESTION, stream=False, **GREEDY).text() and len(pieces) > 3
    assert command("-m", "here", *options(GREEDY), QUESTION).strip() == "".join(pieces).strip()


@pytest.mark.shows("structured")
def test_a_schema_is_followed(model, command):
    Report.model_validate_json(model.prompt(QUESTION, schema=Report, **HOT).text())
    schema = json.dumps(Report.model_json_schema())
    Report.model_validate_json(command("-m", "here", "--schema", schema, *options(HOT), QUESTION))


@pytest.fixture
def forced(model, monkeypatch):
    """llm has no tool_choice: the requests until the second result force a call all the same."""
    plain = type(model).build_kwargs

    def build_kwargs(self, prompt, stream):
        fields = plain(self, prompt, stream)
        if "tools" in fields:
            fields |= {"tool_choice": "required" if not called[1:] else "none", "parallel_tool_calls": False}
        return fields

    called = []
    monkeypatch.setattr(type(model), "build_kwargs", build_kwargs)
    return called


def look(called):
    def look(city: str) -> str:
        """The weather in a city."""
        called.append(city)
        return weather(city)

    parameters = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    return llm.Tool(name="look", description="The weather.", input_schema=parameters, implementation=look)


@pytest.mark.shows("tool loop")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_two_calls_and_their_results_make_a_conversation(model, forced, stream):
    chain = model.chain(QUESTION, tools=[look(forced)], options=HOT, stream=stream)
    assert chain.text() and len(forced) == 2 and len(list(chain._responses)) == 3


@pytest.mark.shows("both")
@pytest.mark.parametrize("num_before", [0, 2])
def test_beside_tools_it_calls_or_follows_the_schema(model, forced, num_before):
    forced += ["Oslo"] * num_before  # so that it may not, or has to
    response = model.prompt(QUESTION, tools=[look(forced)], schema=Report, **HOT)
    assert bool(response.tool_calls()) == (num_before == 0)
    assert response.tool_calls() or Report.model_validate_json(response.text())


@pytest.mark.shows("both")
def test_a_model_that_may_choose_calls_or_follows_the_schema(model):
    response = model.prompt(QUESTION, tools=[look([])], schema=Report, **HOT)
    assert response.tool_calls() or Report.model_validate_json(response.text())


@pytest.mark.shows("abort")
def test_a_stream_that_is_left_ends_at_the_server(served, model):
    with served.one_aborted():
        pieces = iter(model.prompt(QUESTION, **ENDLESS))
        next(pieces)
        del pieces
        gc.collect()
