"""Rules: each key that a format's own writer has for a documented family is followed, harmless for a reason, or refused
by name; one that is neither is named in a warning, once a load."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator
from typing import Any

import gguf
import pytest
import tiny_tokenizers as tiny
import transformers
from loading.gguf_fixture import write_gguf
from lora.adapters import SHAPES, write_adapter
from peft import LoraConfig
from transformers import CONFIG_MAPPING, GenerationConfig, WhisperFeatureExtractor

from minivllm import LLM, file_keys
from minivllm.engine.audio import AudioReader
from minivllm.engine.tokenizer import TextTokenizer
from minivllm.errors import AdapterError, ModelError
from minivllm.loading import resolve
from minivllm.lora.peft import READ, Target, read_adapter
from minivllm.models import FILES, GGUF_FILES, read_spec

WHERE = "folder/config.json"
# To be read at all: a default of transformers' own classes cannot be.
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
}
# Followed, but alone they change nothing: each asks for another to be set as well.
IN_PAIRS = {
    *((kind, key) for kind in ("qwen2", "qwen3", "smollm3") for key in ("use_sliding_window", "layer_types")),
    ("phi3", "original_max_position_embeddings"),
}


def config_of(architecture: str) -> dict[str, Any]:
    """All keys that transformers writes, with its defaults."""
    kind = FILES[architecture].architectures[architecture]
    return CONFIG_MAPPING[kind]().to_dict() | {"architectures": [architecture]} | NEEDED.get(kind, {})


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if "does not know" in record.getMessage()]
    caplog.clear()
    return lines


def others(key: str, value: Any) -> list[Any]:
    """Values that are not this one, of any kind that the key might take."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value, value // 2 or 3]
    if isinstance(value, float):
        return [value + 0.5]
    if isinstance(value, str):
        return ["other", "relu", "silu", "gelu"]
    if isinstance(value, list):
        return [[*value, 1], value[::-1], ["sliding_attention"] * len(value)]
    if isinstance(value, dict):
        return [{**value, "a": 1}, {}]
    return [True, 2, 0.5, [1], "x", {"a": 1}]


@pytest.mark.parametrize("architecture", FILES)
def test_each_key_that_transformers_writes_of_a_family_has_a_row(architecture, caplog):
    read_spec(config_of(architecture), {}, WHERE)
    assert not warned(caplog)


@pytest.mark.parametrize("architecture", FILES)
def test_no_value_of_a_family_is_passed_over_in_silence(architecture, caplog):
    """A key that is not harmless changes what the engine knows of the model, or is refused, or named."""
    kind, config = FILES[architecture].architectures[architecture], config_of(architecture)
    own = file_keys.CONFIG_OF.get(kind.removesuffix("_text") if kind == "qwen3_5_text" else kind)
    spec, tables = read_spec(config, {}, WHERE), [table for table in (own, file_keys.CONFIG) if table]
    for key, value in config.items():
        if any(key in table.harmless for table in tables) or (kind, key) in IN_PAIRS or key == "architectures":
            continue
        assert any(is_told(config | {key: other}, spec, caplog) for other in others(key, value)), key


def is_told(config: dict[str, Any], spec: Any, caplog: pytest.LogCaptureFixture) -> bool:
    try:
        return read_spec(config, {}, WHERE) != spec or bool(warned(caplog))
    except ModelError as error:
        assert WHERE in str(error)
        return True


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "WhisperForConditionalGeneration"])
def test_each_key_of_generation_config_is_read_harmless_or_refused_by_name(architecture, caplog):
    config, kind = config_of(architecture), FILES[architecture].architectures[architecture]
    assert read_spec(config, GenerationConfig().to_dict(), WHERE) and not warned(caplog)
    followed = {*file_keys.GENERATION_READ, *file_keys.GENERATION_READ_OF.get(kind, ())}
    own = file_keys.GENERATION_OF.get(kind, file_keys.Table({}))
    for key in GenerationConfig().to_dict():
        if key in followed or key in file_keys.GENERATION.harmless or key in own.harmless:
            continue
        with pytest.raises(ModelError, match=rf"folder/generation_config\.json: {key}=\[7\] is not supported"):
            read_spec(config, {key: [7]}, WHERE)


@pytest.mark.parametrize("table", [v for v in vars(file_keys).values() if isinstance(v, file_keys.Table)])
def test_a_harmless_key_has_a_reason_and_is_in_one_list(table):
    assert all(len(why.split()) > 1 for why in table.harmless.values())
    assert not table.harmless.keys() & table.only.keys()


# --- GGUF


def keys_of(group: type = gguf.constants.Keys) -> Iterator[str]:
    """All that llama.cpp's package can write."""
    for name, value in vars(group).items():
        if not name.startswith("_"):
            yield from keys_of(value) if isinstance(value, type) else (value,)


def written(key: str, architecture: str) -> str:
    key = key.replace("{arch}", architecture).replace("{id}", "3").replace("{dense}", "dense_2")
    return key.replace("{name}", "tool")


# What a reader of these architectures asks for; of an own file each is noted, of the others this is the account.
FOLLOWED = (
    *("general.architecture", "general.alignment", "tokenizer.chat_template", "tokenizer.chat_template.tool"),
    *(f"tokenizer.ggml.{name}" for name in ("model", "tokens", "token_type", "add_bos_token", "add_eos_token")),
    *(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "padding")),
    *(f"tokenizer.ggml.{name}_token_id" for name in ("prefix", "suffix", "middle")),
    *(f"tokenizer.ggml.fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")),
    *(f"{{arch}}.{name}" for name in ("context_length", "embedding_length", "block_count", "feed_forward_length")),
    *(f"{{arch}}.attention.{name}" for name in ("head_count", "head_count_kv", "key_length", "value_length")),
    *(f"{{arch}}.rope.{name}" for name in ("dimension_count", "freq_base", "scaling.type", "scaling.factor")),
    *("{arch}.rope.scaling.original_context_length", "{arch}.rope.scaling.yarn_beta_fast"),
    "{arch}.rope.scaling.yarn_beta_slow",
)


@pytest.mark.parametrize("architecture", GGUF_FILES)
def test_each_key_of_the_gguf_package_has_a_row(architecture):
    keys = {written(key, architecture) for key in keys_of()}
    table = file_keys.gguf_table(keys, architecture)
    assert keys - table.harmless.keys() - table.only.keys() == {written(key, architecture) for key in FOLLOWED}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_gguf_key_that_is_not_followed_is_refused_by_name(tmp_path, architecture):
    table = file_keys.gguf_table({written(key, architecture) for key in keys_of()}, architecture)
    for key in table.only.keys() - {"llama.attention.sliding_window"}:  # which makes it a Mistral
        value: Any = [7] if key.endswith(("sections", "charsmap")) else "other" if "type" in key else 7
        value = False if key.endswith("causal") else value
        path = tmp_path / "m.gguf"
        write_gguf(path, architecture, extra={key: value}, decode=False)
        with pytest.raises(ModelError, match=rf"m\.gguf.*{key.rpartition('.')[2]}|mixture of experts"):
            resolve(str(path), tmp_path / "cache")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("qwen2.attention.sliding_window", 64),
        ("qwen2.attention.value_length", 16),
        ("qwen2.rope.dimension_count", 16),
    ],
)
def test_what_depends_on_another_key_is_refused_by_name(tmp_path, key, value):
    path = tmp_path / "m.gguf"
    add = gguf.GGUFWriter.add_key_value

    def changed(writer: Any, name: str, old: Any, kind: Any, sub_type: Any = None) -> None:
        add(writer, name, value if name == key else old, kind, sub_type)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_key_value", changed)
        write_gguf(path, "qwen2", extra={key: value} if "sliding" in key else {})
    with pytest.raises(ModelError, match=rf'm\.gguf: metadata "{key}" is {value}'):
        resolve(str(path), tmp_path / "cache")


def test_templates_by_name_are_followed(tmp_path):
    write_gguf(tmp_path / "m.gguf", extra={"tokenizer.chat_template.tool_use": "{{ tools }}"})
    tokenizer = TextTokenizer.load(resolve(str(tmp_path / "m.gguf"), tmp_path / "cache").tokenizer_dir)
    assert tokenizer.tool_template == "{{ tools }}" and "<|user|>" in str(tokenizer.chat_template)


# --- tokenizers, preprocessors, adapters

TOKENIZERS = ("LlamaTokenizerFast", "GPT2TokenizerFast", "WhisperTokenizerFast", "BertTokenizerFast")
TOKENIZERS += ("Qwen2TokenizerFast", "GemmaTokenizerFast", "CohereTokenizerFast", "GPTNeoXTokenizerFast")
TOKENIZERS += ("CodeGenTokenizerFast", "PreTrainedTokenizerFast")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_each_option_of_a_tokenizer_has_a_row(name):
    kind = getattr(transformers, name)
    keys = set(inspect.signature(kind.__init__).parameters) - {"self", "args", "kwargs", "vocab", "merges"}
    read = {*file_keys.TOKENIZER_READ, *file_keys.TOKENIZER_SAYS, "add_eos_token"}
    assert not keys - read - file_keys.TOKENIZER.harmless.keys() - file_keys.TOKENIZER.only.keys()


@pytest.mark.parametrize(
    "config",
    [
        {"split_special_tokens": True},
        {"add_prefix_space": True},
        {"eos_token": tiny.EOS, "add_eos_token": True},
    ],
    ids=lambda config: list(config)[-1],
)
def test_what_a_tokenizer_would_do_otherwise_is_refused_by_name(tmp_path, config):
    folder = tiny.save(tiny.byte_level(), tmp_path, tokenizer_config=config)
    with pytest.raises(ModelError, match=rf"tokenizer_config\.json: {list(config)[-1]}=True is not supported"):
        TextTokenizer.load(folder)


def test_each_key_of_a_feature_extractor_is_harmless_or_refused_by_name(tmp_path):
    reader, extractor = AudioReader(80, 3000), WhisperFeatureExtractor()
    given = extractor.to_dict() | {"mel_filters": [[0.0]]}
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(given))
    reader.check(tmp_path)
    for key, value in given.items():
        if key in file_keys.PREPROCESSOR.harmless:
            continue
        file.write_text(json.dumps(given | {key: "left" if isinstance(value, str) else value + 1}))
        with pytest.raises(ModelError, match=rf"preprocessor_config\.json: {key}=.* is not supported"):
            reader.check(tmp_path)


def test_each_key_of_an_adapter_has_a_row():
    keys = {field.name for field in dataclasses.fields(LoraConfig)}
    assert not keys - READ - file_keys.ADAPTER.harmless.keys() - file_keys.ADAPTER_REFUSED.keys()


def test_a_key_of_an_adapter_that_nothing_is_known_of_is_refused_or_named(tmp_path, caplog):
    targets = {
        f"model.layers.{i}.{name}": Target(n_in, n_out) for i in range(4) for name, (n_out, n_in) in SHAPES.items()
    }
    write_adapter(tmp_path, 0)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"use_novelty": False}))
    read_adapter(str(tmp_path), targets, 64)
    assert warned(caplog) == [f"{file}: keys that this version does not know are not followed: use_novelty"]
    file.write_text(json.dumps(config | {"use_novelty": True}))
    with pytest.raises(AdapterError, match="use_novelty=True is not supported"):
        read_adapter(str(tmp_path), targets, 64)


# --- the warning


def test_a_key_never_seen_is_one_warning_of_each_file_at_each_load(tmp_path, caplog, monkeypatch):
    from models.pairs import make_random
    from transformers import LlamaConfig, LlamaForCausalLM

    small = LlamaConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48
    )
    make_random(LlamaForCausalLM(small)).save_pretrained(tmp_path)
    tiny.save(tiny.byte_level(), tmp_path)
    for name in ("config", "generation_config", "tokenizer_config"):
        file = tmp_path / f"{name}.json"
        own = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(own | {"odd_one": 1, "odd_two": None}))
    for _ in range(2):
        options = {"kv.num_blocks": 9, "engine.core": "inproc", "model.path": str(tmp_path)}
        with LLM(overrides=options):
            pass
        assert sorted(warned(caplog)) == [
            f"{tmp_path / name}: keys that this version does not know are not followed: odd_one, odd_two"
            for name in ("config.json", "generation_config.json", "tokenizer_config.json")
        ]


def test_a_gguf_key_never_seen_is_a_warning_at_each_load(tmp_path, caplog):
    path = tmp_path / "m.gguf"
    write_gguf(path, extra={"llama.novelty": 3, "someone.note": "x"})
    for _ in range(2):  # the second time from the cache
        resolve(str(path), tmp_path / "cache")
        assert warned(caplog) == [
            f"{path}: keys that this version does not know are not followed: llama.novelty, someone.note"
        ]


def test_a_warning_is_short(caplog):
    file_keys.warn("x.json", [f"key{i}" + "y" * 1000 for i in range(100)])
    (line,) = warned(caplog)
    assert len(line) < 3000 and line.endswith("and 80 more")
