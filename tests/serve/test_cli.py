"""The command line: light to start, readable, and a wrong word is answered with the right one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from minivllm.cli import COMMANDS, bench, chapter
from minivllm.cli.chat import parser as chat_parser
from minivllm.config import VLLM_NAMES
from minivllm.features import FEATURES
from minivllm.serve.command import parser as serve_parser
from minivllm.terminal import engine_options

ROOT = Path(__file__).parent.parent.parent


def run(*args, code=0, stdin=None):
    done = subprocess.run(
        [sys.executable, "-m", "minivllm", *args], capture_output=True, text=True, timeout=250, input=stdin
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


LIGHT = (
    ["--help"],
    ["serve", "--help"],
    ["chat", "--help"],
    ["batch", "--help"],
    ["bench"],
    ["bench", "hots"],
    ["chapter"],
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
    done = subprocess.run([sys.executable, "-c", probe, *args], capture_output=True, text=True, timeout=250)
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
        (["bench", "hots"], '"host"'),
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


def test_the_list_of_commands_has_a_line_for_each():
    lines = run("--help").splitlines()
    for name, (_, what) in COMMANDS.items():
        assert f"  {name:10}{what}" in lines


def test_the_console_command_is_the_module_and_calls_itself_by_its_name(tmp_path):
    """What an installer writes for [project.scripts]: a file of that name that calls the function."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    (name,) = scripts
    module, _, function = scripts[name].partition(":")
    (tmp_path / name).write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    command = [sys.executable, str(tmp_path / name)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    for args, code, text in [
        (["--help"], 0, "usage: minivllm <command>"),
        (["serve", "--help"], 0, "usage: minivllm serve [MODEL] [options]"),
        (["sreve"], 2, 'Did you mean "serve"?'),
        (["serve", "--prt", "1"], 2, "All options: minivllm serve --help"),
        (["serve", "no-such-model"], 1, 'model "no-such-model": no such file or folder'),
    ]:
        done = subprocess.run([*command, *args], capture_output=True, text=True, timeout=250, env=env, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        assert text in done.stdout + done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [serve_parser, chat_parser])
def test_the_model_is_an_argument_or_an_option(command):
    parse = command("x").parse_args
    for args in (["m"], ["--model", "m"], ["--seed", "1", "m"], ["m", "--model", "m"]):
        assert engine_options(parse(args))["model"] == "m"
    assert "model" not in engine_options(parse([]))
    with pytest.raises(SystemExit):
        engine_options(parse(["m", "--model", "n"]))
    with pytest.raises(SystemExit):
        parse(["m", "n"])


def test_options_may_be_written_with_underscores_and_as_vllm_does():
    parse = serve_parser("x").parse_args
    args = parse(["--max_model_len", "9", "--served_model_name=a_b", "--structured-outputs-config.backend", "dfa"])
    assert (args.max_model_len, args.served_model_name, args.guided_decoding_backend) == ("9", ["a_b"], "dfa")
    with pytest.raises(SystemExit):
        parse(["--max_model_lem", "9"])


def test_without_the_repository_benchmarks_and_chapters_say_where_they_are(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(chapter, "ROOT", tmp_path)
    for command in (bench, chapter):
        with pytest.raises(SystemExit) as exit:
            command.main([])
        assert exit.value.code == 1 and "are in minivllm's repository" in capsys.readouterr().err
