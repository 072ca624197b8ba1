"""Rule: a client reaches an adapter by its name, and a file only where the server was told that it may."""

from __future__ import annotations

import json
import os
import threading

import httpx
import pytest
from lora.adapters import write_adapter

from minivllm import AsyncLLM
from minivllm.engine.metrics import Metrics
from minivllm.serve.command import lora_options, parser

OPTIONS = {"model.dtype": "float32", "kv.num_blocks": 60, "kv.block_size": 8, "executor.num_threads": 1}
OPTIONS |= {"lora.enabled": True, "lora.max_loras": 2, "lora.max_rank": 32, "lora.max_cpu_loras": 4}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    for i, name in enumerate(("first", "second", "third")):
        write_adapter(root / "in" / name, i)
    write_adapter(root / "in" / "large", 9, rank=64)
    write_adapter(root / "in" / "broken", 9)
    (root / "in" / "broken" / "adapter_config.json").write_text("{}")
    write_adapter(root / "out", 7)
    (root / "in" / "link").symlink_to(root / "out")
    (root / "in" / "loop").symlink_to(root / "in" / "loop")
    (root / "in" / "half").mkdir()
    for name in os.listdir(root / "out"):
        (root / "in" / "half" / name).symlink_to(root / "out" / name)
    return root


@pytest.fixture(scope="module")
def url(serving, root):
    metrics = Metrics("base")
    overrides = {**OPTIONS, "lora.adapters": {"start": str(root / "in" / "first")}}
    engine = AsyncLLM("dummy:tiny", overrides=overrides)
    with serving(engine, metrics, ("base", "alias"), lora_dirs=[root / "in"]) as url:
        yield url


def post(url, path, **body):
    return httpx.post(f"{url}/v1/{path}", json=body, timeout=60)


def complete(url, model, **fields):
    return post(url, "completions", model=model, prompt=[5, 6, 7, 8], temperature=0, max_tokens=8, **fields)


def text(url, model):
    answer = complete(url, model).json()
    assert answer["model"] == model
    return answer["choices"][0]["text"]


def names(url):
    return [card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]]


def test_an_adapter_is_a_model_with_a_parent(url, root):
    assert names(url) == ["base", "alias", "start"]
    card = httpx.get(f"{url}/v1/models/start").json()
    assert (card["parent"], card["root"]) == ("base", str(root / "in" / "first"))
    assert httpx.get(f"{url}/v1/models/base").json()["parent"] is None
    assert text(url, "start") != text(url, "base")
    messages = [{"role": "user", "content": "hi"}]
    chat = [
        post(url, "chat/completions", model=m, messages=messages, temperature=0, max_tokens=6).json()
        for m in ("start", "base")
    ]
    assert chat[0]["model"] == "start"
    assert chat[0]["choices"][0]["message"]["content"] != chat[1]["choices"][0]["message"]["content"]


def test_loading_serving_and_unloading(url, root):
    reply = post(url, "load_lora_adapter", lora_name="b", lora_path=str(root / "in" / "second"))
    assert reply.status_code == 200 and reply.json()["id"] == "b" and names(url)[-1] == "b"
    assert text(url, "b") not in (text(url, "base"), text(url, "start"))
    again = post(url, "load_lora_adapter", lora_name="b", lora_path=str(root / "in" / "second"))
    assert again.status_code == 400 and "loaded already" in again.json()["error"]["message"]
    assert post(url, "load_lora_adapter", lora_name="same", lora_path="first").status_code == 200, "below --lora-dir"
    assert text(url, "same") == text(url, "start")
    for name in ("b", "same"):
        assert post(url, "unload_lora_adapter", lora_name=name).json() == {
            "id": name,
            "object": "model",
            "deleted": True,
        }
    assert names(url) == ["base", "alias", "start"]
    for reply in (complete(url, "b"), post(url, "unload_lora_adapter", lora_name="b")):
        assert reply.status_code == 404 and reply.json()["error"]["code"] == "model_not_found"


def test_an_unknown_name_is_a_404_that_suggests(url):
    for stream in (False, True):
        reply = complete(url, "strt", stream=stream)
        assert reply.status_code == 404 and 'Did you mean "start"?' in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "path",
    [
        "{root}/out",
        "{root}/in/../out",
        "../out",
        "{root}/in/link",
        "link",
        "half",
        "{root}/in2",
        "{root}",
        "/etc",
        "/nowhere",
    ],
)
def test_no_path_leads_out_of_the_folder(url, root, path):
    reply = post(url, "load_lora_adapter", lora_name="x", lora_path=path.format(root=root))
    assert reply.status_code == 403 and reply.json()["error"]["code"] == "path_not_allowed"
    assert "x" not in names(url)


@pytest.mark.parametrize(
    "body, status, message",
    [
        ({"lora_path": "large"}, 400, "rank 64, and lora.max_rank admits 32"),
        ({"lora_path": "broken"}, 400, "peft_type is None"),
        ({"lora_path": "missing"}, 404, "no such folder"),
        ({"lora_path": "a\0b"}, 400, "null character"),
        ({"lora_path": "a" * 5000}, 400, "longer than 4,096"),
        ({"lora_path": "a" * 4000}, 404, "no such folder"),
        ({"lora_path": "a/" * 2000}, 404, "no such folder"),
        ({"lora_path": "loop"}, 404, "no such folder"),
        ({"lora_path": "second", "lora_name": "base"}, 400, "name of the model itself"),
        ({"lora_path": "second", "lora_name": ""}, 400, "1 to 256 characters"),
        ({"lora_path": 5}, 400, "lora_path"),
        ({}, 400, "lora_path"),
        ({"lora_path": "second", "load_inplace": True}, 400, "load_inplace is not supported"),
    ],
)
def test_what_cannot_be_loaded_is_a_4xx_with_the_reason(url, body, status, message):
    reply = post(url, "load_lora_adapter", **{"lora_name": "x", **body})
    assert reply.status_code == status and message in reply.json()["error"]["message"]
    assert names(url) == ["base", "alias", "start"]


def test_more_adapters_than_memory_has_room_for_are_served(url):
    """lora.max_cpu_loras is 4, and one is there from the start."""
    wanted = text(url, "start")
    for i in range(5):
        assert post(url, "load_lora_adapter", lora_name=f"m{i}", lora_path="first").status_code == 200
    assert names(url) == ["base", "alias", "start", *(f"m{i}" for i in range(5))]
    assert [text(url, name) for name in ("m0", "start", "m4", "m1", "m2", "m3")] == [wanted] * 6
    for i in range(5):
        assert post(url, "unload_lora_adapter", lora_name=f"m{i}").status_code == 200


def test_clients_of_many_adapters_at_once(url):
    wanted = {}
    for name, path in (("x", "second"), ("y", "third")):
        post(url, "load_lora_adapter", lora_name=name, lora_path=path)
    for name in ("base", "start", "x", "y"):
        wanted[name] = text(url, name)
    got = []
    threads = [threading.Thread(target=lambda name=name: got.append((name, text(url, name)))) for name in [*wanted] * 4]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert len(got) == 16 and all(wanted[name] == answer for name, answer in got)
    for name in ("x", "y"):
        post(url, "unload_lora_adapter", lora_name=name)


def test_without_a_folder_loading_is_off(fake):
    for path, body in (
        ("load_lora_adapter", {"lora_name": "x", "lora_path": "/"}),
        ("unload_lora_adapter", {"lora_name": "x"}),
    ):
        reply = post(fake.url, path, **body)
        assert reply.status_code == 403 and "--lora-dir" in reply.json()["error"]["message"]


def test_the_openapi_document_has_both(fake):
    document = json.loads(httpx.get(f"{fake.url}/openapi.json").content)
    assert {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"} <= set(document["paths"])


def options(*argv):
    args = parser("serve").parse_args(argv)
    return lora_options(args, {"preset": "v1", "overrides": {"kv.num_blocks": 9}})["overrides"]


def test_the_command_line_loads_adapters_and_names_folders(root):
    assert options() == {"kv.num_blocks": 9}
    lora = options("--lora", "a=x/y", "--lora", "b=z=1")
    assert lora == {"kv.num_blocks": 9, "lora.enabled": True, "lora.adapters": {"a": "x/y", "b": "z=1"}}
    assert options("--lora-dir", str(root))["lora.enabled"] is True
    vllms = '{"name": "c", "path": "x/c", "base_model_name": "smollm2-135m"}'
    lora = options("--lora", "a=x/a", "--lora-modules", "b=x/b", vllms, "--lora", "d=x/d")
    assert lora["lora.adapters"] == {name: f"x/{name}" for name in "abcd"}


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--lora", "a"], "NAME=FOLDER"),
        (["--lora", "=x"], "NAME=FOLDER"),
        (["--lora-modules", "a=x", '{"name": "b"}'], "missing required field `path`"),
        (["--lora-modules", '{"name": "b", "path": "x", "rank": 8}'], "unknown field `rank`"),
        (["--lora-modules", '{"name": "b"'], "--lora-modules"),
        (["--lora", "a=x", "--lora", "a=y"], "name of another adapter"),
        (["--lora", "smollm2-135m=x"], "or of the model"),
        (["--lora-dir", "not/there"], "no such folder"),
    ],
)
def test_wrong_flags_say_why(argv, message, capsys):
    with pytest.raises(SystemExit):
        options(*argv)
    assert message in capsys.readouterr().err
