"""What each key may do, how keys are exchanged while the server runs, and what the log says of them."""

from __future__ import annotations

import hashlib
import json
import logging
from types import SimpleNamespace

import httpx
import pytest

from minivllm.errors import UserError
from minivllm.serve import access
from minivllm.serve.command import parser
from minivllm.serve.keys import KeyFile, Keys

ROLES = [{"name": "app", "role": "use", "key": "u"}, {"name": "prometheus", "role": "metrics", "key": "m"},
         {"name": "ann", "role": "admin", "key": "a"}]  # fmt: skip
LOADS = ("POST", "/v1/load_lora_adapter", {"lora_name": "x\nforged", "lora_path": "in/x"})
UNLOADS = ("POST", "/v1/unload_lora_adapter", {"lora_name": "x"})
ASKS = ("POST", "/v1/completions", {"prompt": "x"})


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


@pytest.fixture
def lines(tmp_path):
    """A file of keys."""
    return lambda *given: KeyFile(write(tmp_path / "keys", *given))


def ask(url, key, method, path, body=None):
    return httpx.request(method, url + path, json=body, headers={"x-api-key": key} if key else {}, timeout=20)


def may(url, key, *asked):
    """Whether the key opens this door, whatever is behind it."""
    reply = ask(url, key, *asked)
    refused = reply.status_code == 401 or (reply.status_code == 403 and "role" in reply.json()["error"]["code"])
    assert not refused or ("role" in reply.text) == (reply.status_code == 403)
    return not refused


# ---- roles


def test_each_role_opens_its_own_doors(fake_engine, serving, lines, tmp_path):
    doors = {
        "u": [ASKS, ("GET", "/v1/models")],
        "m": [("GET", "/metrics"), ("GET", "/load")],
        "a": [LOADS, UNLOADS, ("GET", "/debug/trace"), ("GET", "/debug/process")],
        "": [("GET", "/health"), ("GET", "/version")],
    }
    with serving(fake_engine, key_file=lines(*ROLES), debug_endpoints=True) as url:
        for key in ("u", "m", "a", ""):
            for whose, asked in [(whose, each) for whose, some in doors.items() for each in some]:
                allowed = whose in ("", key) or key == "a"
                if asked[1] != "/debug/trace" or not allowed:  # which the fake engine does not have
                    assert may(url, key, *asked) == allowed, (key, asked)


def test_metrics_ask_for_a_key_as_soon_as_there_is_one_for_them(fake_engine, serving, lines):
    with serving(fake_engine, api_keys=["u"]) as url:
        assert may(url, "", "GET", "/metrics") and may(url, "", "GET", "/load")
    with serving(fake_engine, api_keys=["u"], key_file=lines(ROLES[1])) as url:
        assert ask(url, "", "GET", "/metrics").status_code == 401
        assert ask(url, "u", "GET", "/metrics").status_code == 403


def test_of_several_keys_none_is_an_admins_unless_it_is_said(fake_engine, serving):
    """Any client could unload what the others use."""
    with serving(fake_engine, api_keys=["one", "two"], debug_endpoints=True) as url:
        for asked in (LOADS, UNLOADS, ("GET", "/debug/process")):
            assert not may(url, "one", *asked) and may(url, "one", *ASKS)
    with serving(fake_engine, api_keys=["one"]) as url:
        assert may(url, "one", *UNLOADS)


@pytest.mark.parametrize(
    "path",
    ["/v1/unload_lora_adapter%0a", "/unload_lora_adapter", "/v1//unload_lora_adapter", "/v1/unload_lora_adapter/",
     "/v1/%75nload_lora_adapter", "/V1/unload_lora_adapter", "/v1/x/../unload_lora_adapter"],
)  # fmt: skip
def test_no_way_to_write_a_path_leads_past_its_role(fake_engine, serving, lines, path):
    calls = []

    async def unload_lora(name):
        calls.append(name)

    fake_engine.unload_lora = unload_lora
    with serving(fake_engine, key_file=lines(*ROLES)) as url:
        reply = httpx.post(url + path, json=UNLOADS[2], headers={"x-api-key": "u"}, follow_redirects=True, timeout=20)
    assert reply.status_code >= 400 and not calls


# ---- a file


def test_a_key_is_exchanged_while_the_server_runs(fake_engine, serving, tmp_path):
    path = write(tmp_path / "keys", {"name": "app", "key": "old"}, {"name": "other", "key": "x"})
    with serving(fake_engine, key_file=KeyFile(path)) as one, serving(fake_engine, key_file=KeyFile(path)) as two:
        assert [may(url, key, *ASKS) for url in (one, two) for key in ("old", "new")] == [True, False] * 2
        write(path, {"name": "app", "key": "old"}, {"name": "app", "key": "new"}, {"name": "other", "key": "x"})
        assert [may(url, key, *ASKS) for url in (one, two) for key in ("old", "new")] == [True, True] * 2
        write(path, {"name": "app", "key": "new"}, {"name": "other", "key": "x"})
        assert [may(url, key, *ASKS) for url in (one, two) for key in ("old", "new")] == [False, True] * 2
        assert not may(one, "", *ASKS)


def test_keys_of_one_name_are_one_client(fake_engine, serving, lines):
    file = lines({"name": "app", "key": "old"}, {"name": "app", "key": "new"}, {"name": "other", "key": "x"})
    with serving(fake_engine, key_file=file) as url:
        for key in ("old", "new", "x"):
            assert ask(url, key, *ASKS).status_code == 200
    old, new, other = fake_engine.calls
    assert (old.client, old.salt) == (new.client, new.salt) and old.salt != "" != other.client
    assert old.client != other.client and old.salt != other.salt


@pytest.mark.parametrize(
    "broken", [None, "", "# nobody", '{"name": "app", "key": ', '{"key": "secret", "role": "root"}']
)
def test_a_file_that_is_broken_changes_nothing_and_tells_no_key(tmp_path, caplog, broken):
    path = write(tmp_path / "keys", "one", "two")
    keys = Keys(file=KeyFile(path))
    path.unlink() if broken is None else write(path, broken)
    assert keys.accept(b"one") and keys.accept(b"two") and not keys.accept(b"secret") and not keys.accept(b"")
    (record,) = caplog.records
    assert record.levelname == "ERROR" and "stay as they were" in record.message and "secret" not in record.message
    write(path, "three")
    assert keys.accept(b"three") and not keys.accept(b"one")


def test_an_only_client_is_the_operator_also_while_its_key_is_exchanged(lines):
    keys = Keys(file=lines({"name": "ann", "key": "old"}, {"name": "ann", "key": "new"}))
    assert keys.accept(b"old").role == keys.accept(b"new").role == "admin"
    keys = Keys(["old"], file=lines({"name": "ann", "key": "new"}))
    assert keys.accept(b"old").role == keys.accept(b"new").role == "use"


def test_a_line_may_hold_a_hash_in_the_place_of_a_key(lines):
    keys = Keys(file=lines({"sha256": hashlib.sha256(b"one").hexdigest().upper(), "name": "app", "role": "admin"}))
    assert keys.accept(b"one").name == "app" and keys.accept(b"one").role == "admin" and not keys.accept(b"two")


@pytest.mark.parametrize(
    "line, told",
    [({"name": "app"}, "give key, or sha256"), ({"key": "k", "sha256": "0" * 64}, "give key, or sha256"),
     ({"sha256": "abc"}, "64 hexadecimal"), ({"key": "k", "role": "root"}, "use, metrics, admin"),
     ({"key": "k", "name": "a\nb"}, "a name has letters"), ({"key": "k", "roles": "use"}, "unknown field `roles`"),
     ("{key}", "malformed")],
)  # fmt: skip
def test_a_mistake_in_a_file_is_named_with_its_line(lines, line, told):
    with pytest.raises(UserError, match=told) as failure:
        lines("# ours", "fine", line)
    assert "line 3" in str(failure.value)


def test_the_environment_may_hold_a_key(monkeypatch, capsys):
    args = parser("serve").parse_args(["--api-key", "one"])
    assert access.keys_of(args) == ["one"]
    monkeypatch.setenv("MINIVLLM_API_KEY", "two")
    assert access.keys_of(args) == access.app_options(args)["api_keys"] == ["one", "two"]
    monkeypatch.setenv("MINIVLLM_API_KEY", "")  # else a slip would let everybody in
    with pytest.raises(SystemExit):
        access.app_options(args)
    assert "MINIVLLM_API_KEY, is empty" in capsys.readouterr().err


# ---- the log


def test_a_keys_name_in_the_log_is_another_one_after_each_start():
    names = {keys.name(keys.accept(b"one")) for keys in (Keys(["one"]), Keys(["one"]))}
    assert len(names) == 2 and hashlib.sha256(b"one").hexdigest()[:8] not in names
    shared = [Keys(["one", "two"], secret=b"of all servers") for _ in range(2)]
    assert len({keys.name(keys.accept(b"one")) for keys in shared}) == 1


def test_each_administrative_act_is_logged_with_who_what_and_its_result(
    fake_engine, serving, lines, tmp_path, caplog, eventually
):
    caplog.set_level(logging.INFO)
    (tmp_path / "in" / "x").mkdir(parents=True)

    async def load_lora(name, path):
        return SimpleNamespace(name=name, path=path)

    fake_engine.load_lora = load_lora
    with serving(fake_engine, key_file=lines(*ROLES), lora_dirs=[tmp_path]) as url:
        assert ask(url, "a", *LOADS).status_code == 200
        assert ask(url, "u", *LOADS).status_code == 403
        assert (
            ask(url, "a", "POST", "/v1/load_lora_adapter", {"lora_name": "y", "lora_path": "/etc"}).status_code == 403
        )
        assert ask(url, "u", "GET", "/v1/unload_lora_adapter%0aforged").status_code == 404
        assert ask(url, "u", "POST", "/v1/unload_lora_adapter%0a", UNLOADS[2]).status_code == 403
        assert ask(url, "u", *ASKS).status_code == 200
        eventually(lambda: sum(r.name == "minivllm.serve.requests" for r in caplog.records) == 6)
    records = [r for r in caplog.records if r.name == "minivllm.serve.audit"]
    told = [(r.fields["who"], r.fields["what"].get("adapter"), r.fields["result"], r.fields["status"]) for r in records]
    assert told == [("ann", "x\nforged", "done", 200), ("app", None, "refused", 403), ("ann", "y", "refused", 403),
                    ("app", None, "refused", 403)]  # fmt: skip
    ids = [r.fields["id"] for r in caplog.records if r.name == "minivllm.serve.requests"]
    assert [r.fields["id"] for r in records] == [*ids[:3], ids[4]]
    assert all("\n" not in r.getMessage() for r in records) and records[0].fields["what"]["path"] == "in/x"
    assert records[0].getMessage().startswith('POST /v1/load_lora_adapter by ann: done (200), adapter "x\\nforged"')
