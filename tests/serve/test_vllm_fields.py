"""Fields and paths that vLLM has beside OpenAI's, and OpenAI's without /v1."""

from __future__ import annotations

import json
import math

import httpx
import pytest

from minivllm.engine.output import Logprob
from minivllm.request import BeamSearchParams
from minivllm.serve import command, operate

HELLO = [{"role": "user", "content": "Hello"}]
BODIES = {"chat/completions": {"messages": HELLO}, "completions": {"prompt": "Hello"}}


def post(url: str, path: str, **fields) -> dict:
    reply = httpx.post(f"{url}/v1/{path}", json=BODIES[path] | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def chunks(url: str, path: str, **fields) -> list[dict]:
    with httpx.stream("POST", f"{url}/v1/{path}", json=BODIES[path] | {"stream": True} | fields) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("path", BODIES)
def test_the_usage_goes_with_every_chunk(fake, path):
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = chunks(fake.url, path, stream_options=options)
    used = [chunk["usage"] for chunk in found]
    so_far = [usage["completion_tokens"] for usage in used]
    before = [0] if path == "chat/completions" else []  # its first chunk says who speaks, and brings no token
    assert so_far == [*before, 1, 2, 3, 3]
    assert len({usage["prompt_tokens"] for usage in used}) == 1
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in used)
    once = [chunk["usage"] for chunk in chunks(fake.url, path, stream_options={"include_usage": True})]
    assert once[:-1] == [None] * (len(found) - 1) and once[-1] == used[-1]


NULLS = {  # that vLLM's whole answers hold, by the path to them
    "chat/completions": {
        "": ["service_tier", "prompt_logprobs", "prompt_token_ids", "kv_transfer_params"],
        "choices": ["logprobs", "stop_reason", "token_ids"],
        "message": ["refusal", "annotations", "audio", "function_call"],
    },
    "completions": {
        "": ["service_tier", "kv_transfer_params"],
        "choices": ["logprobs", "stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids"],
    },
}


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_answer_has_null_for_what_it_has_not(fake, path):
    answer = post(fake.url, path)
    found = {"": answer, "choices": answer["choices"][0], "message": answer["choices"][0].get("message")}
    for where, names in NULLS[path].items():
        assert {name: found[where][name] for name in names} == dict.fromkeys(names)
    assert "tool_calls" not in (found["message"] or {}), "neither have vLLM's messages, without calls"
    told = post(fake.url, path, return_token_ids=True)
    assert (told if "chat" in path else told["choices"][0])["prompt_token_ids"]


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_has_a_chunk_for_each_step_that_brought_tokens(serving, fake_engine, path):
    """Also where the text is held back: clients time tokens by chunks."""
    steps = [("a", [1]), ("", [2]), ("b", [3]), ("", [4])]

    async def generate(prompt, params, request_id, **_):
        for i, (text, tokens) in enumerate(steps):
            output = fake_engine._output(prompt, request_id, text, i == len(steps) - 1)
            output.outputs[0].token_ids = tokens
            yield output

    fake_engine.generate = generate
    with serving(fake_engine) as url:
        choices = [choice for chunk in chunks(url, path) for choice in chunk["choices"]]
    texts = [choice.get("text", choice.get("delta", {}).get("content")) for choice in choices]
    opening = [""] if "chat" in path else []
    assert texts[:-1] == [*opening, "a", "", "b"], "the last token shows nothing: the ending stands for it"
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", BODIES)
def test_a_server_may_send_the_usage_unasked(fake_engine, serving, path):
    with serving(fake_engine, force_usage=True) as url:
        used = [chunk["usage"]["completion_tokens"] for chunk in chunks(url, path)]
        assert used == sorted(used) and used[-1] == 3
        assert post(url, path)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("path", BODIES)
def test_a_server_may_call_tokens_by_their_ids(fake_engine, serving, path):
    def first(**fields) -> str:
        (choice,) = post(url, path, logprobs=True if "chat" in path else 1, **fields)["choices"]
        told = choice["logprobs"]
        return told["content"][0]["token"] if "chat" in path else told["tokens"][0]

    async def generate(prompt, params, request_id, **_):
        output = fake_engine._output(prompt, request_id, "a", True)
        output.outputs[0].logprobs = [{97: Logprob(-0.5, 1, "a")}]
        yield output

    fake_engine.generate = generate
    with serving(fake_engine, tokens_as_ids=True) as url:
        assert (first(), first(return_tokens_as_token_ids=False)) == ("token_id:97", "a")
    with serving(fake_engine) as url:
        assert (first(), first(return_tokens_as_token_ids=True)) == ("a", "token_id:97")


@pytest.mark.parametrize("path", BODIES)
def test_a_request_may_bring_its_id(fake, path):
    answer = post(fake.url, path, request_id="mine-1")
    assert answer["id"].endswith("-mine-1") and fake.engine.calls[0].id.startswith(answer["id"])
    bad = httpx.post(f"{fake.url}/v1/{path}", json=BODIES[path] | {"request_id": "a b"})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "request_id")


def test_a_prompt_is_cut_to_its_last_tokens_or_its_first(fake):
    def prompt(**fields) -> str:
        fake.engine.reset()
        post(fake.url, "completions", **{"prompt": "abcdefgh", "echo": True, **fields})
        return bytes(fake.engine.calls[0].prompt["prompt_token_ids"]).decode()

    assert prompt(truncate_prompt_tokens=3) == prompt(truncate_prompt_tokens=3, truncation_side="left") == "fgh"
    assert prompt(truncate_prompt_tokens=3, truncation_side="right") == "abc"
    assert prompt(truncate_prompt_tokens=8) == prompt(truncate_prompt_tokens=99) == prompt() == "abcdefgh"
    assert prompt(truncate_prompt_tokens=-1, prompt="x" * 99, max_tokens=30) == "x" * 70  # the context has 100
    assert post(fake.url, "completions", prompt="abcdefgh", echo=True, truncate_prompt_tokens=3)["choices"][0][
        "text"
    ].startswith("fgh")
    zero = httpx.post(f"{fake.url}/v1/completions", json={"prompt": "a", "truncate_prompt_tokens": 0})
    assert (zero.status_code, zero.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_the_fingerprint_is_of_the_server(fake, fake_engine, serving):
    first = post(fake.url, "chat/completions")["system_fingerprint"]
    assert first.startswith("fp_") and post(fake.url, "completions")["system_fingerprint"] == first
    assert {chunk["system_fingerprint"] for chunk in chunks(fake.url, "chat/completions")} == {first}
    with serving(fake_engine, names=("another",)) as url:
        assert post(url, "chat/completions")["system_fingerprint"] != first


@pytest.mark.parametrize("path", BODIES)
def test_openais_paths_work_without_v1(fake, path):
    reply = httpx.post(f"{fake.url}/{path}", json=BODIES[path])
    assert reply.status_code == 200 and reply.json()["choices"]
    assert httpx.get(f"{fake.url}/models").json()["data"][0]["id"] == "fake"
    assert 'path="/v1/' in httpx.get(f"{fake.url}/metrics").text


def test_paths_without_v1_are_guarded_as_those_with_it(fake_engine, serving):
    with serving(fake_engine, api_keys=["secret"]) as url:
        for method, path in (("GET", "/models"), ("POST", "/chat/completions")):
            assert httpx.request(method, f"{url}{path}", json={"messages": HELLO}).status_code == 401
            allowed = httpx.request(
                method, f"{url}{path}", json={"messages": HELLO}, headers={"authorization": "Bearer secret"}
            )
            assert allowed.status_code == 200


@pytest.mark.parametrize("prefix", ["", "/llm/a"])
def test_a_proxy_may_cut_the_root_path_off_or_pass_it_on(fake_engine, serving, prefix):
    with serving(fake_engine, root_path="/llm/a", api_keys=["secret"]) as url:
        key = {"authorization": "Bearer secret"}
        for path in ("/v1/completions", "/completions"):
            assert httpx.post(f"{url}{prefix}{path}", json={"prompt": "a"}, headers=key).status_code == 200
            assert httpx.post(f"{url}{prefix}{path}", json={"prompt": "a"}).status_code == 401
        for path in ("/v1/models", "/models"):
            assert httpx.get(f"{url}{prefix}{path}").status_code == 401, "a key is needed with the prefix, too"
        assert httpx.get(f"{url}{prefix}/health").status_code == 200
        assert httpx.get(f"{url}{prefix}/openapi.json").json()["servers"] == [{"url": "/llm/a"}]
        assert httpx.get(f"{url}{prefix}").text.startswith("<!doctype html>")
        assert httpx.get(f"{url}/llm/ab/health").status_code == 404
        assert httpx.get(f"{url}/llm/a/llm/a/health").status_code == 404


@pytest.mark.parametrize("prefix", ["llm", "/", "/llm/", "/a//b", "/a?b", "/a b"])
def test_a_root_path_is_a_path(capsys, prefix):
    with pytest.raises(SystemExit):
        operate.app_options(command.parser("serve").parse_args(["--root-path", prefix]))
    assert "a path such as /llm" in capsys.readouterr().err


def test_ping_and_load(fake):
    assert httpx.get(f"{fake.url}/ping").json() == httpx.post(f"{fake.url}/ping").json() == {"status": "ok"}
    assert httpx.get(f"{fake.url}/load").json() == {"server_load": 0}
    fake.engine.is_running = False
    assert httpx.get(f"{fake.url}/ping").status_code == httpx.post(f"{fake.url}/ping").status_code == 503


@pytest.fixture(scope="module")
def tiny(serving):
    """(url, engine) of a model of random weights, with no limit on log-probabilities."""
    from minivllm.engine.async_llm import AsyncLLM

    overrides = {"kv.num_blocks": 64, "model.dtype": "float32"}
    engine = AsyncLLM("dummy:tiny", overrides=overrides, max_model_len=256, max_logprobs=-1)
    with serving(engine, names=("tiny",)) as url:
        yield url, engine


AS_IDS = {"max_tokens": 4, "return_tokens_as_token_ids": True, "return_token_ids": True, "temperature": 0}


def test_tokens_of_logprobs_can_be_named_by_their_ids(tiny):
    url, _ = tiny
    chat = post(url, "chat/completions", logprobs=True, top_logprobs=2, **AS_IDS)["choices"][0]
    wanted = [f"token_id:{token}" for token in chat["token_ids"]]
    assert [position["token"] for position in chat["logprobs"]["content"]] == wanted
    assert chat["logprobs"]["content"][0]["top_logprobs"][0]["token"] == wanted[0]
    text = post(url, "completions", logprobs=1, **AS_IDS)["choices"][0]
    assert text["logprobs"]["tokens"] == [f"token_id:{token}" for token in text["token_ids"]]
    assert all(name.startswith("token_id:") for name in text["logprobs"]["top_logprobs"][0])


def by_name(position: dict) -> dict[str, float]:
    return {top["token"]: top["logprob"] for top in position["top_logprobs"]}


def test_a_request_may_choose_whose_logprobs_it_gets(tiny):
    url, engine = tiny
    chosen, names = [300, 5, 300, 7], ["token_id:300", "token_id:5", "token_id:7"]
    every = post(url, "chat/completions", logprobs=True, top_logprobs=-1, **AS_IDS)["choices"][0]
    some = post(url, "chat/completions", logprobs=True, top_logprobs=3, logprob_token_ids=chosen, **AS_IDS)["choices"][
        0
    ]
    assert some["token_ids"] == every["token_ids"]
    for all_of, these in zip(every["logprobs"]["content"], some["logprobs"]["content"], strict=True):
        assert len(by_name(all_of)) == engine.info["vocab_size"]
        assert list(by_name(these)) == [these["token"], *names], "the one taken, then the chosen in their order"
        assert by_name(these) == {name: pytest.approx(by_name(all_of)[name], abs=1e-5) for name in by_name(these)}
    text = post(url, "completions", logprobs=0, logprob_token_ids=chosen, **AS_IDS)["choices"][0]["logprobs"]
    assert set(text["top_logprobs"][0]) == {text["tokens"][0], *names}
    wrong = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "logprobs": 0, "logprob_token_ids": [10**6]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "logprob_token_ids")


@pytest.mark.parametrize("path", BODIES)
def test_logprobs_of_a_prompt_may_be_of_the_whole_vocabulary(tiny, path):
    url, engine = tiny
    answer = post(url, path, prompt_logprobs=-1, max_tokens=1)
    first, *others = (answer if "chat" in path else answer["choices"][0])["prompt_logprobs"]
    assert first is None and others
    for position in others:
        assert len(position) == engine.info["vocab_size"]
        assert sum(math.exp(entry["logprob"]) for entry in position.values()) == pytest.approx(1, abs=1e-4)
        assert sorted(entry["rank"] for entry in position.values())[0] == 1


def test_beams_need_no_leave_to_compare_their_rivals():
    from minivllm import LLM

    with LLM("dummy:tiny", overrides={"kv.num_blocks": 64}, max_logprobs=0) as llm:
        assert len(llm.beam_search(["Hello"], BeamSearchParams(beam_width=3, max_tokens=2))[0].outputs) == 3


ECHOED = [
    ([{"role": "assistant", "content": "Once"}], {}, "Once"),
    ([{"role": "assistant", "content": "Once"}], {"continue_final_message": True}, "Once"),
    ([{"role": "assistant", "content": [{"type": "text", "text": "Once"}]}], {}, "Once"),
    ([{"role": "user", "content": "Once"}], {}, ""),
    ([{"role": "user", "content": "Once"}], {"add_generation_prompt": False}, "Once"),
    ([{"role": "assistant", "content": "Once"}, {"role": "user", "content": "more"}], {}, ""),
]


@pytest.mark.parametrize(("messages", "more", "wanted"), ECHOED)
def test_a_chats_echo_puts_the_last_message_of_the_same_role_before_the_answer(fake, messages, more, wanted):
    asks = {"messages": messages, **more}
    whole = post(fake.url, "chat/completions", echo=True, **asks)["choices"][0]["message"]["content"]
    deltas = [c["delta"].get("content") or "" for chunk in chunks(fake.url, "chat/completions", echo=True, **asks)
              for c in chunk["choices"]]  # fmt: skip
    assert whole == "".join(deltas) == wanted + "abc"
    assert post(fake.url, "chat/completions", **asks)["choices"][0]["message"]["content"] == "abc"


@pytest.fixture(scope="module")
def trusting(serving, tiny):
    """The URL of a server over the same engine that runs requests' chat templates."""
    with serving(Borrowed(tiny[1]), names=("tiny",), trust_templates=True) as url:
        yield url


class Borrowed:
    """An engine that its second server does not end."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def shutdown(self):
        pass


def test_a_request_may_bring_its_template_where_that_is_trusted(trusting):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ mood }}"
    asks = {"messages": HELLO, "chat_template": template, "chat_template_kwargs": {"mood": "!"}}
    tokens = httpx.post(f"{trusting}/tokenize", json=asks).json()["tokens"]
    assert httpx.post(f"{trusting}/detokenize", json={"tokens": tokens}).json()["prompt"] == "<user>Hello!"
    assert post(trusting, "chat/completions", **asks)["usage"]["prompt_tokens"] == len(tokens)
    without = httpx.post(f"{trusting}/tokenize", json={"messages": HELLO}).json()["tokens"]
    assert without != tokens, "the model's own is still there"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for %}", "not valid Jinja"),
        ("x" * 70_000, "65536 at most"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "steps"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 'a' * 10**10 }}", "repeats something too often"),
        ("{% for a in [1] %}" * 40 + "{% endfor %}" * 40, "nests too deeply"),
        ("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "nests too deeply"),
    ],
)
def test_a_requests_template_is_bounded(trusting, template, why):
    reply = httpx.post(
        f"{trusting}/v1/chat/completions", json={"messages": HELLO, "chat_template": template}, timeout=60
    )
    assert reply.status_code == 400 and why in reply.json()["error"]["message"], reply.text


def test_a_template_takes_the_place_of_the_models(tmp_path, fake_engine):
    from minivllm.engine.tokenizer import TextTokenizer
    from minivllm.loading import resolve

    path = tmp_path / "template.jinja"
    path.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    fake_engine.tokenizer = TextTokenizer.load(resolve("dummy:tiny").tokenizer_dir)
    args = command.parser("serve").parse_args(["--chat-template", str(path)])
    command.application(args, fake_engine, ["fake"], {})
    messages = [{"role": "king", "content": "Hi"}]
    assert fake_engine.tokenizer.apply_chat_template(messages) == "<king>Hi"


@pytest.mark.parametrize(
    ("text", "why"), [("{% for %}", "not valid Jinja"), (None, "No such file"), (b"\xff", "no text")]
)
def test_a_file_that_is_no_template_ends_the_start(tmp_path, capsys, text, why):
    path = tmp_path / "template.jinja"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SystemExit):
        command.read_template(path)
    assert why in capsys.readouterr().err


def asked(fake, path: str, **fields):
    """What the engine was asked for."""
    fake.engine.reset()
    bodies = {"responses": {"input": "Hello"}, "messages": {"messages": HELLO, "max_tokens": 5}} | BODIES
    reply = httpx.post(f"{fake.url}/v1/{path}", json=bodies[path] | fields)
    assert reply.status_code == 200 and "x-minivllm-ignored" not in reply.headers, reply.text
    return fake.engine.calls[0]


SAMPLED = {
    "top_k": 7, "min_p": 0.25, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5,
    "logit_bias": {"5": 1.0}, "seed": 11, "stop": ["z"], "stop_token_ids": [9], "ignore_eos": True,
    "include_stop_str_in_output": True, "skip_special_tokens": False, "priority": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", [*SAMPLED, "structured_outputs"])
def test_a_response_samples_as_a_chat_completion_does(fake, name):
    fields = {name: SAMPLED.get(name, {"regex": "a+"})}
    chat, response = (asked(fake, path, **fields) for path in ("chat/completions", "responses"))
    assert response.params == chat.params and response.priority == chat.priority
    plain = asked(fake, "responses")
    assert (response.params, response.priority) != (plain.params, plain.priority)


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_a_templates_variables_reach_it_from_every_endpoint(fake, path):
    asked(fake, path, chat_template_kwargs={"mood": "merry"})
    assert fake.engine.tokenizer.rendered["mood"] == "merry"


def test_a_text_may_go_without_the_special_tokens_of_its_beginning(fake, monkeypatch):
    encode = type(fake.engine.tokenizer).encode
    monkeypatch.setattr(
        type(fake.engine.tokenizer),
        "encode",
        lambda self, text, add_special_tokens=True: [1] * add_special_tokens + encode(self, text),
    )
    for given, begins in ((None, True), (True, True), (False, False)):
        prompt = asked(fake, "completions", add_special_tokens=given).prompt["prompt_token_ids"]
        assert (prompt[0] == 1) is begins


def test_a_field_called_as_pythons_keyword_is_refused_by_its_name(fake):
    tool = {"type": "function", "name": "f", "parameters": {}, "async": True}
    reply = httpx.post(f"{fake.url}/v1/responses", json={"input": "x", "tools": [tool]})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "tools[0].async"


def test_a_chosen_id_is_its_clients_own(fake_engine, serving):
    with serving(fake_engine, api_keys=["a", "b"]) as url:
        for key in "aba":
            headers = {"authorization": f"Bearer {key}"}
            body = {"prompt": "x", "request_id": "mine"}
            assert httpx.post(f"{url}/v1/completions", json=body, headers=headers).json()["id"] == "cmpl-mine"
    first, other, again = (call.id for call in fake_engine.calls)
    assert first == again != other
