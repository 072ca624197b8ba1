"""Rule: a model's files may come from anybody. What is wrong with them is one typed error, what they may cost is
bounded, and they open no file outside of their folder and run no code."""

from __future__ import annotations

import ast
import json
import math
import os
import struct
import tracemalloc
from pathlib import Path

import gguf
import pytest
import tiny_tokenizers as tiny
from loading.gguf_fixture import write_gguf
from lora.adapters import write_adapter

from minivllm import files
from minivllm.config import EngineConfig
from minivllm.engine.tokenizer import TextTokenizer
from minivllm.errors import AdapterError, ModelError
from minivllm.files import inside, read_json
from minivllm.loading import gguf_file, resolve, sources
from minivllm.loading.cache import Cache
from minivllm.loading.gguf_convert import convert
from minivllm.loading.gguf_file import GGUFFile
from minivllm.loading.safetensors_io import INDEX, weight_files
from minivllm.lora.peft import Target, read_adapter
from minivllm.models import read_spec
from minivllm.pooling.settings import read_settings
from minivllm.pooling.task import choose_task

# --- GGUF

UINT8, UINT32, TEXT, ARRAY = 0, 4, 8, 9


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key.encode()) + struct.pack("<I", kind) + value


def tensor(*dims: int, name: bytes = b"x", offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, offset)


def write(path: Path, *entries: bytes, tensors: tuple[bytes, ...] = (), rest: bytes = bytes(256)) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries))
    path.write_bytes(head + b"".join(entries) + b"".join(tensors) + rest)
    return path


@pytest.mark.parametrize(
    ("entries", "tensors", "message"),
    [
        ([entry("general.alignment", UINT32, struct.pack("<I", 0))], [], "alignment is 0"),
        ([entry("general.alignment", TEXT, text(b"32"))], [], "wrong kind"),
        ([entry("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 5000 + bytes(12))], [], "corrupt header"),
        ([], [tensor(2**32, 2**32)], "truncated"),
        ([], [tensor(*[1] * 5000)], "5000 dimensions"),
        ([], [tensor(1, offset=3)], "does not begin at a multiple"),
        ([entry("a", ARRAY, struct.pack("<IQ", UINT8, 2**63))], [], "corrupt header"),
        ([entry("a", TEXT, struct.pack("<Q", 2**62))], [], "corrupt header"),
    ],
    ids=["alignment 0", "alignment text", "nested", "wraps", "dimensions", "offset", "long array", "long text"],
)
def test_a_header_that_cannot_be_is_one_error(tmp_path, entries, tensors, message):
    with pytest.raises(ModelError, match=message):
        GGUFFile(write(tmp_path / "m.gguf", *entries, tensors=tuple(tensors)))


def test_an_array_of_numbers_takes_no_memory_of_its_own(tmp_path):
    """As lists, 4 MB of them were 64."""
    numbers = entry("a", ARRAY, struct.pack("<IQ", UINT8, 4 << 20) + bytes(range(256)) * (4 << 12))
    path = write(tmp_path / "m.gguf", numbers)
    tracemalloc.start()
    file = GGUFFile(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert file.metadata["a"][300] == 44 and len(file.metadata["a"]) == 4 << 20
    assert peak < 1 << 20


def test_a_header_has_a_most_that_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file, "MAX_HEADER", 1000)
    GGUFFile(write(tmp_path / "short.gguf", entry("a", TEXT, text(b"x" * 900))))
    with pytest.raises(ModelError, match="longer than 1,000 bytes"):
        GGUFFile(write(tmp_path / "long.gguf", entry("a", TEXT, text(b"x" * 1100))))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.embedding_length", "wide"),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count", [4, 4]),
        ("llama.block_count", 2_000_000_000),
        ("llama.expert_count", "many"),
        ("llama.rope.scaling.type", [1, 2]),
        ("tokenizer.ggml.eos_token_id", [0, 2]),
        ("tokenizer.ggml.bos_token_id", "first"),
        ("tokenizer.ggml.model", [1]),
        ("tokenizer.ggml.pre", [1]),
        ("tokenizer.ggml.tokens", [1, 2]),
        ("tokenizer.ggml.tokens", "abc"),
        ("tokenizer.ggml.merges", ["h"]),
        ("tokenizer.ggml.merges", ["no such"]),
        ("tokenizer.ggml.token_type", "normal"),
        ("tokenizer.chat_template", 5),
        ("tokenizer.ggml.add_bos_token", "yes"),
    ],
)
def test_metadata_of_the_wrong_kind_are_one_error(tmp_path, monkeypatch, key, value):
    add = gguf.GGUFWriter.add_key_value
    kind = gguf.GGUFValueType

    def changed(writer, name, old, vtype, sub_type=None):
        if name != key:
            return add(writer, name, old, vtype, sub_type)
        add(writer, name, value, kind.UINT32 if isinstance(value, int) else kind.get_type(value))

    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", changed)
    written = key not in ("llama.expert_count", "llama.rope.scaling.type")
    write_gguf(tmp_path / "m.gguf", extra=None if written else {key: value})
    with pytest.raises(ModelError, match="m.gguf|config.json"):
        convert(tmp_path / "m.gguf", tmp_path)
        read_spec(read_json(tmp_path / "config.json"), None)


# --- folders


@pytest.fixture
def folder(tmp_path) -> Path:
    """With a file outside of it, and a link there."""
    (tmp_path / "secret").write_text("{}")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "loop").symlink_to(folder / "loop")
    return folder


OUTSIDE = ["../secret", "a/../../secret", "{tmp}/secret", "link", "..", "/etc/passwd"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_opens_nothing_outside_of_its_folder(folder, name):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": name.format(tmp=folder.parent)}}))
    with pytest.raises(ModelError, match="leads out of the folder"):
        weight_files(folder)


@pytest.mark.parametrize("name", ["../..", "link", "/etc"])
def test_modules_of_an_embedding_model_lie_in_its_folder(folder, name):
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": name}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match="leads out of the folder"):
        read_settings(folder, is_encoder=True)


@pytest.mark.parametrize("name", ["loop", "x" * 5000, "gone", 5, None, ["a"], "a\0b"])
def test_a_shard_that_is_none_is_one_error(folder, name):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ModelError):
        weight_files(folder)


def test_the_hubs_cache_may_link_to_its_blobs_and_nowhere_else(tmp_path):
    """snapshots/REVISION/FILE -> ../../blobs/DIGEST, and only for what is laid out like that."""
    ours, theirs = (tmp_path / f"models--{name}" for name in ("a--b", "c--d"))
    for model in (ours, theirs):
        (model / "blobs").mkdir(parents=True)
        (model / "blobs" / "digest").write_text("")
        (model / "snapshots" / "main" / "part").mkdir(parents=True)
    snapshot = ours / "snapshots" / "main"
    (snapshot / "one").symlink_to("../../blobs/digest")
    (snapshot / "part" / "two").symlink_to("../../../blobs/digest")
    (snapshot / "other").symlink_to(theirs / "blobs" / "digest")
    said = snapshot / INDEX
    for name in ("one", "part/two"):
        assert inside(snapshot, name, said).is_file()
    (tmp_path / "mine").symlink_to(snapshot)
    assert inside(tmp_path / "mine", "one", said).is_file(), "a link to the whole folder is the user's own"
    (plain := tmp_path / "x" / "y").mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    (plain / "one").symlink_to(tmp_path / "blobs")
    for home, name in ((snapshot, "other"), (plain, "one")):
        with pytest.raises(ModelError, match="leads out"):
            inside(home, name, said)


@pytest.mark.parametrize("value", ["[" * 100_000, '{"a": ' * 100_000, '{"a": ' + "1" * 5000 + "}", "\udc80"])
def test_json_that_cannot_be_read_is_one_error(tmp_path, value):
    (tmp_path / "config.json").write_text(value, errors="surrogateescape")
    with pytest.raises(ModelError, match=r"config\.json: not readable"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.mkdir(), lambda path: path.symlink_to("/dev/zero")])
def test_only_regular_files_are_read(tmp_path, make):
    """A pipe to which nothing writes would be read for ever, and /dev/zero too."""
    make(tmp_path / "config.json")
    with pytest.raises(ModelError, match=r"config\.json: not "):
        read_json(tmp_path / "config.json")
    config = EngineConfig.build(overrides={"model.path": str(tmp_path)})
    assert choose_task(config).value == "generate"  # loading it says what is wrong
    with pytest.raises(ModelError, match="no config.json"):
        resolve(str(tmp_path), tmp_path / "cache")


@pytest.mark.parametrize("depth", [70, 900, 100_000])
def test_a_field_that_is_nested_beyond_reason_is_one_error_that_names_it(tmp_path, depth):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "odd": ' + "[" * depth + "]" * depth + "}")
    (tmp_path / "model.safetensors").touch()
    what = 'field "odd" is nested over 64 deep' if depth < 1000 else "not readable as JSON"
    assert choose_task(EngineConfig.build(overrides={"model.path": str(tmp_path)})).value == "generate"
    with pytest.raises(ModelError, match=rf"config\.json: {what}"):
        resolve(str(tmp_path), tmp_path / "cache")


ODD = [1e308, -1, 10**400, math.inf, math.nan, "long", True, [1], {"a": 1}]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
LONGROPE = {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
LONGROPE |= {"original_max_position_embeddings": 1024, "attention_factor": 1.2}


@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize(
    ("architecture", "rope", "field"),
    [
        *(
            ("LlamaForCausalLM", YARN | {"rope_theta": 1e4}, field)
            for field in (*list(YARN)[1:], "rope_theta", "beta_fast")
        ),
        *(("LlamaForCausalLM", YARN, field) for field in ("beta_slow", "attention_factor")),
        *(("LlamaForCausalLM", LLAMA3, field) for field in list(LLAMA3)[1:]),
        ("LlamaForCausalLM", {"rope_type": "linear", "factor": 2.0}, "factor"),
        *(("Phi3ForCausalLM", LONGROPE, field) for field in ("factor", "attention_factor")),
        ("DeepseekV3ForCausalLM", YARN | {"mscale": 1.0}, "mscale_all_dim"),
        ("GPTNeoXForCausalLM", {"rope_type": "default"}, "partial_rotary_factor"),
    ],
)
def test_a_number_of_rope_that_cannot_be_is_one_error_that_names_its_field(architecture, rope, field, value):
    config = {"architectures": [architecture], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"vocab_size": 99, "intermediate_size": 96, "max_position_embeddings": 8192, "num_key_value_heads": 4}
    config |= {"rms_norm_eps": 1e-6, "layer_norm_eps": 1e-6, "hidden_act": "silu"}
    if architecture == "GPTNeoXForCausalLM":
        config["hidden_act"] = "gelu"
    assert read_spec(config | {"rope_parameters": rope})
    with pytest.raises(ModelError, match=rf"config\.json: .*{field}"):
        read_spec(config | {"rope_parameters": rope | {field: value}})


@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize(
    "field", ["hidden_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "vocab_size"]
)
def test_a_number_that_cannot_be_is_one_error_that_names_its_field(field, value):
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 99}
    config |= {"intermediate_size": 96, "max_position_embeddings": 8192, "num_attention_heads": 4}
    with pytest.raises(ModelError, match=rf"config\.json: .*{field}"):
        read_spec(config | {field: value})


def test_json_has_a_most_that_is_read(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"a": "x" * 100}))
    assert read_json(tmp_path / "config.json")
    monkeypatch.setattr(files, "MAX_TEXT", 100)
    with pytest.raises(ModelError, match="at most 100 are read"):
        read_json(tmp_path / "config.json")


# --- tokenizers


@pytest.mark.parametrize(
    "broken",
    [
        {"tokenizer_config": {"eos_token": 5}},
        {"tokenizer_config": {"eos_token": {"text": "x"}}},
        {"tokenizer_config": {"bos_token": tiny.EOS, "add_bos_token": "yes"}},
        {"tokenizer_config": {"chat_template": [{"name": "default"}]}},
        {"tokenizer_config": {"chat_template": 5}},
        {"generation_config": {"eos_token_id": "end"}},
        {"config": {"eos_token_id": {"a": 1}}},
    ],
    ids=str,
)
def test_a_tokenizers_field_of_the_wrong_kind_is_one_error(tmp_path, broken):
    with pytest.raises(ModelError, match=f"{next(iter(broken))}.json: "):
        TextTokenizer.load(tiny.save(tiny.byte_level(), tmp_path, **broken))


def test_a_template_that_is_no_text_is_one_error(tmp_path):
    folder = tiny.save(tiny.byte_level(), tmp_path)
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="chat_template.jinja: not readable as text"):
        TextTokenizer.load(folder)


def test_whoever_reads_a_folder_with_transformers_forbids_its_code():
    root = Path(__file__).parent.parent.parent
    found = []
    for path in (*(root / "minivllm").rglob("*.py"), *(root / "bench").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained":
                said = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                found.append(path.name)
                assert said.get("trust_remote_code") == "False", path
    assert "sources.py" in found and "naive_worker.py" in found


def test_no_code_of_a_model_is_run_whoever_is_asked(tmp_path, monkeypatch):
    """transformers asks at the terminal where it was not told."""
    ran = tmp_path / "ran"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "code.py").write_text(f"open({str(ran)!r}, 'w')\nclass Mine: pass\n")
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["code.Mine", null]}}')
    (folder / "config.json").write_text('{"model_type": "mine"}')
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    with pytest.raises(ModelError, match="cannot be converted"):
        sources._tokenizer_dir(folder, Cache(tmp_path / "cache"))
    assert not ran.exists()


# --- adapters


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_alpha": 10**400},
        {"lora_alpha": float("inf")},
        {"alpha_pattern": {"q_proj": 10**400}},
        {"exclude_modules": 5},
        {"target_modules": {"q_proj": 1}},
        {"layers_to_transform": "first"},
        {"layers_to_transform": ["first"]},
        {"target_modules": "a{99999999999999999999}"},
        {"target_modules": "(" * 3000 + ")" * 3000},
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_adapters_field_of_the_wrong_kind_is_one_error(tmp_path, changes):
    write_adapter(tmp_path, 0)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(AdapterError, match="adapter_config.json"):
        read_adapter(str(tmp_path), {"model.layers.0.self_attn.q_proj": Target(64, 64)}, 64)


@pytest.mark.parametrize("path", ["x" * 5000, "a/" * 3000])
def test_an_adapters_path_that_is_too_long_is_one_error(path):
    with pytest.raises(AdapterError, match="no such folder"):
        read_adapter(path, {}, 64)
