"""The command line: light to start, readable, and a wrong word is answered with the right one."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from minivllm.config import VLLM_NAMES
from minivllm.features import FEATURES


def run(*args, code=0, stdin=None):
    done = subprocess.run(
        [sys.executable, "-m", "minivllm", *args], capture_output=True, text=True, timeout=60, input=stdin
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


LIGHT = (
    ["--help"],
    ["serve", "--help"],
    ["chat", "--help"],
    ["batch", "--help"],
    ["features"],
    ["serve", "--prt", "1"],
    ["serv"],
)


@pytest.mark.parametrize("args", LIGHT, ids=" ".join)
def test_help_features_and_wrong_flags_import_nothing_but_msgspec(args):
    """Help answers at once because of what it does not import. Seconds would say how busy the machine is."""
    probe = (
        "import sys, msgspec; found = set(sys.modules)\n"
        "import minivllm.__main__ as m\n"
        "try: m.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "packages = {name.partition('.')[0] for name in set(sys.modules) - found} - sys.stdlib_module_names\n"
        "more = packages - {'minivllm'}\n"
        "sys.exit(f'imported {more}' if more else 0)"
    )
    done = subprocess.run([sys.executable, "-c", probe, *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_help_lists_every_vllm_name_with_its_default():
    text = run("serve", "--help")
    for name in VLLM_NAMES:
        assert f"--{name.replace('_', '-')}" in text
    assert "(8000)" in text and "(128)" in text and "examples:" in text


@pytest.mark.parametrize(
    ("args", "right"),
    [
        (["sreve"], '"serve"'),
        (["serve", "--max-model-length", "9"], '"--max-model-len"'),
        (["serve", "--prefix-caching"], '"--enable-prefix-caching"'),
        (["chat", "--modle", "x"], '"--model"'),
        (["trace", "exprt", "a", "b"], '"export"'),
    ],
)
def test_a_wrong_word_suggests_the_right_one(args, right):
    assert f"Did you mean {right}?" in run(*args, code=2)


def test_an_abbreviated_flag_is_no_flag():
    assert "no option --max-model-le" in run("serve", "--max-model-le", "9", code=2)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["serve", "--set", "kv.prefx=none"], 'Did you mean "kv.prefix"?'),
        (["serve", "--set", "kv.prefix=hsah"], 'Did you mean "hash"?'),
        (["serve", "--set", "kv.prefix"], "--set takes section.field=value"),
        (["serve", "--preset", "v9"], 'no preset "v9"'),
        (["serve", "--max-num-seqs", "many"], "int"),
        (["serve", "--max-num-seqs", "0"], "at least 1"),
        (["serve", "--dtype", "float8"], "float8"),
        (["serve", "--port", "70000"], "between 0 and 65535"),
        (["serve", "--host", "256.1.1.1"], "--host 256.1.1.1"),
        (["chat", "--temperature", "-1"], "temperature must be at least 0"),
        (["chat", "--url", "http://127.0.0.1:9"], "no server at"),
        (["trace", "export", "/nonexistent.jsonl", "/tmp/out.json"], "cannot read the trace"),
    ],
)
def test_a_wrong_value_is_one_message_that_says_what_is_allowed(args, text):
    assert text in run(*args, code=1)


def test_a_port_in_use_is_told_before_the_model_is_loaded_with_a_free_one():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        text = run("serve", "--port", str(port), "--model", "no-such-model", code=1)
    assert f"port {port} on 127.0.0.1 is in use" in text and "--port " in text
    assert "Loading" not in text


def test_two_servers_that_start_at_once_do_not_both_get_the_port(tmp_path):
    from minivllm.serve.command import bind

    with bind("127.0.0.1", 0) as first:  # bound, still loading
        port = first.getsockname()[1]
        with bind("127.0.0.1", port):
            first.listen()
        with pytest.raises(SystemExit):
            bind("127.0.0.1", port)


def test_features_lists_every_axis_and_option():
    text = run("features")
    for feature in FEATURES:
        assert feature.field in text and feature.what in text
    assert "scheduler.max_num_seqs" in text


def test_features_as_json_is_the_feature_table():
    data = json.loads(run("features", "--json"))
    assert [row["name"] for row in data["features"]] == [feature.name for feature in FEATURES]
    assert data["fields"]["kv.block_size"] == 16


def test_version():
    assert run("version").startswith("minivllm ")
