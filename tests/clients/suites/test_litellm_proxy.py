"""LiteLLM's proxy between the packages of OpenAI and Anthropic and this server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec

import pytest
from clients.suites.common import CHOICES, ENDLESS, GREEDY, HOT, QUESTION, WEATHER, WEATHER_TOOL, Report

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")
if find_spec("litellm") is None or find_spec("apscheduler") is None:
    pytest.skip("litellm[proxy] is not installed", allow_module_level=True)
ASKED = [{"role": "user", "content": QUESTION}]
ANTHROPICS = {"name": WEATHER["name"], "input_schema": WEATHER["parameters"]}
START_SECONDS = 120
KEY = "sk-of-this-test"


@pytest.fixture(scope="module")
def proxy(served, tmp_path_factory):
    """Its URL."""
    folder = tmp_path_factory.mktemp("proxy")
    parameters = {"model": f"hosted_vllm/{served.model}", "api_base": f"{served.url}/v1", "api_key": "none"}
    config = {"model_list": [{"model_name": "here", "litellm_params": parameters}]}
    config["general_settings"] = {"master_key": KEY}  # it does not start without one
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = os.path.join(os.path.dirname(sys.executable), "litellm")
    command = [sys.executable, script, "--config", "config.yaml"]
    with open(folder / "log", "w") as log:
        address = ["--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen([*command, *address], cwd=folder, stdout=log, stderr=log)
    try:
        deadline, url = time.monotonic() + START_SECONDS, f"http://127.0.0.1:{port}"
        while not answers(f"{url}/health/liveliness"):
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def answers(url):
    try:
        with urllib.request.urlopen(url):
            return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def client(proxy):
    return openai.OpenAI(base_url=proxy, api_key=KEY, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def anthropics(proxy):
    return anthropic.Anthropic(base_url=proxy, api_key=KEY, max_retries=0, timeout=120)


@pytest.fixture
def ask(client):
    return lambda **fields: client.chat.completions.create(**{"model": "here", "messages": ASKED, **fields})


@pytest.mark.shows("call")
def test_each_endpoint_answers(client, anthropics, ask):
    said = ask(**GREEDY).choices[0].message.content
    assert said
    assert client.responses.create(model="here", input=QUESTION, temperature=0, max_output_tokens=24).output_text
    answer = anthropics.messages.create(model="here", messages=ASKED, max_tokens=24, extra_body={"temperature": 0})
    assert answer.content[0].text == said


@pytest.mark.shows("stream")
def test_the_pieces_of_a_stream_are_the_whole_answer(anthropics, ask):
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(**GREEDY, stream=True) if chunk.choices]
    assert "".join(pieces) == ask(**GREEDY).choices[0].message.content and len(pieces) > 3
    fields = {"max_tokens": 24, "extra_body": {"temperature": 0}}
    with anthropics.messages.stream(model="here", messages=ASKED, **fields) as stream:
        assert "".join(stream.text_stream) == "".join(pieces)


@pytest.mark.shows("tool loop")
def test_two_calls_and_their_results_make_a_conversation(ask):
    messages = list(ASKED)
    for _ in range(2):
        message = ask(messages=messages, tools=[WEATHER_TOOL], tool_choice="required", **HOT).choices[0].message
        assert message.tool_calls
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "Rain."} for call in message.tool_calls]
    assert ask(messages=messages, tools=[WEATHER_TOOL], **GREEDY).choices[0].message.content


@pytest.mark.shows("tool loop")
def test_anthropics_blocks_make_one(anthropics):
    messages = list(ASKED)
    for _ in range(2):
        choice = {"type": "tool", "name": "weather"}
        fields = {"messages": messages, "tools": [ANTHROPICS], "tool_choice": choice, "max_tokens": 400}
        answer = anthropics.messages.create(model="here", **fields)
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": f"Rain in {call.input['city']}."}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert anthropics.messages.create(model="here", messages=messages, tools=[ANTHROPICS], max_tokens=24).content


@pytest.mark.shows("structured")
def test_what_is_parsed_is_an_instance(client):
    chosen = client.chat.completions.parse(model="here", messages=ASKED, response_format=Report, **HOT)
    assert isinstance(chosen.choices[0].message.parsed, Report)


@pytest.mark.shows("both")
@pytest.mark.parametrize("choice", CHOICES)
def test_beside_tools_an_answer_is_a_call_or_an_instance(client, choice):
    chosen = client.chat.completions.parse(
        model="here", messages=ASKED, response_format=Report, tools=[WEATHER_TOOL], tool_choice=choice, **HOT
    )
    message = chosen.choices[0].message
    assert message.tool_calls or Report.model_validate_json(message.content)


@pytest.mark.shows("abort")
def test_a_stream_that_is_left_ends_at_the_server(served, ask):
    with served.one_aborted(), ask(**ENDLESS, stream=True) as stream:
        assert next(iter(stream)).id
