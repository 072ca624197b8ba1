"""Peers' own tests: what the stand-ins make of the peers' options, and what counts as explained."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from clients.peers_suites import llama_server, vllm_server
from clients.peers_suites.run import HERE, KINDS, RECORD, SUITES, figures, read, reasons_of, table, unexplained
from clients.run import PAGE

from minivllm.serve.command import parser


def test_the_page_shows_the_record():
    assert table(json.loads(RECORD.read_text())) in PAGE.read_text()


@pytest.mark.parametrize("suite", SUITES)
def test_every_reason_is_one_of_the_three_with_a_sentence(suite):
    assert all(reason.kind in KINDS and reason.why for reason in reasons_of(suite))


def test_what_has_no_reason_counts_as_failed(tmp_path):
    rows = [
        {"test": "tests/x.py::test_long_seed", "outcome": "failed", "why": "words"},
        {"test": "tests/x.py::test_single_chat_session[a]", "outcome": "passed", "why": ""},
        {"test": "tests/x.py::test_of_nobody", "outcome": "passed", "why": ""},
        {"test": "tests/x.py::test_of_nobody", "outcome": "failed", "why": "its server did not end\nmore"},
    ]
    (tmp_path / "outcomes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = read(tmp_path / "outcomes.jsonl")
    assert figures("vllm", found) == {"passed": 1, "failed": 1, "skipped": 0, "internals": 1, "model": 0, "refused": 0}
    assert list(unexplained("vllm", found)) == ["tests/x.py::test_of_nobody: its server did not end"]


def test_what_starts_no_server_never_counts_as_passed():
    rows = [
        {"test": f"tests/x.py::test_a_class[{outcome}]", "outcome": outcome, "why": "", "asks": False}
        for outcome in ("passed", "failed", "skipped")
    ]
    assert figures("vllm", rows) == {"passed": 0, "failed": 0, "skipped": 1, "internals": 2, "model": 0, "refused": 0}
    assert not list(unexplained("vllm", rows))


def test_the_plugin_tells_who_starts_a_server(tmp_path):
    """Itself, or by a fixture, also for the tests after the first; and where the start fails."""
    (tmp_path / "servers.py").write_text(SERVERS)
    (tmp_path / "test_it.py").write_text(TESTS)
    own = {"PEERS_OUTCOMES": str(tmp_path / "outcomes.jsonl"), "PYTHONPATH": f"{tmp_path}:{HERE}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "outcomes", "-p", "servers", "-p", "no:cacheprovider"]
    subprocess.run([*command, "-c", "/dev/null", "."], cwd=tmp_path, env=os.environ | own, capture_output=True)
    found = {row["test"].partition("::")[2]: (row["outcome"], row["asks"]) for row in read(tmp_path / "outcomes.jsonl")}
    assert found == {
        "test_a_class": ("passed", False),
        "test_by_itself": ("passed", True),
        "test_another_class": ("failed", False),
        "test_by_a_fixture": ("passed", True),
        "test_by_the_same_fixture": ("failed", True),
        "test_that_does_not_start": ("failed", True),
        "test_that_did_not_start": ("failed", True),
    }


SERVERS = """
import outcomes

class Server:
    def start(self, works=True):
        assert works

outcomes.count_starts(Server, "start")
"""
TESTS = """
import pytest
from servers import Server

@pytest.fixture(scope="module")
def server():
    Server().start()

@pytest.fixture
def client(server):
    pass

@pytest.fixture(scope="module")
def broken():
    Server().start(works=False)

def test_a_class(): pass
def test_by_itself(): Server().start()
def test_another_class(): assert False
def test_by_a_fixture(client): pass
def test_by_the_same_fixture(client): assert False
def test_that_does_not_start(broken): pass
def test_that_did_not_start(broken): pass
"""


def test_vllms_options_become_ours():
    given = "zephyr-7b --dtype bfloat16 --max-model-len 8192 --enforce-eager --lora-modules a=/a b=/b --port 5"
    made = vllm_server.translated(given.split())
    args = parser("serve").parse_args(made)
    assert parser("serve").parse_args(["--structured-outputs-config.backend", "x"]).guided_decoding_backend == "x"
    assert (args.port, args.lora, args.served_model_name) == (5, ["a=/a", "b=/b"], ["zephyr-7b"])
    assert made[made.index("--max-model-len") + 1] == str(vllm_server.CONTEXT[vllm_server.GENERATES])
    assert vllm_server.model_for("intfloat/multilingual-e5-small") == vllm_server.EMBEDS
    with pytest.raises(vllm_server.Refused, match="olmo3"):
        vllm_server.translated(["m", "--reasoning-parser", "olmo3"])


def test_llama_servers_options_become_ours():
    given = "--port 5 --temp 0.8 --seed 42 --host 127.0.0.1 --alias bert-bge-small --ctx-size 512 --parallel 2 --no-ui"
    port, made = llama_server.translated(given.split())
    args = parser("serve").parse_args(made)
    assert port == 5 and not args.page and args.served_model_name[0] == "bert-bge-small"
    assert made[made.index("--max-model-len") + 1] == "256", "a slot's part of the context"
    _, made = llama_server.translated(["--ctx-size", "256", "--parallel", "4", "--kv-unified"])
    assert made[made.index("--max-model-len") + 1] == "256", "of all slots together"
    with pytest.raises(llama_server.Refused, match="--slot-save-path"):
        llama_server.translated(["--slot-save-path", "x"])
