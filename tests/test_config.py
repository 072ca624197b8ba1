from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from minivllm import features
from minivllm.config import PRESETS, EngineConfig, fields, from_vllm_names, parse_set
from minivllm.errors import ConfigError
from minivllm.features import CONFLICTS, FEATURES, Conflict
from minivllm.registry import Registry


def test_overrides_are_converted_to_the_fields_type():
    config = EngineConfig.build(
        "v1", {"kv.block_size": "32", "scheduler.chunked_prefill": "false", "kv.prefix": "none"}
    )
    assert config.kv.block_size == 32 and config.scheduler.chunked_prefill is False and config.kv.prefix == "none"


def test_none_empties_an_optional_field_and_names_an_option_elsewhere():
    config = EngineConfig.build("v1", {"kv.num_blocks": "none", "kv.prefix": "none"})
    assert config.kv.num_blocks is None and config.kv.prefix == "none"


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"kv.prefx": "hash"}, 'no option "kv.prefx". Did you mean "kv.prefix"'),
        ({"kv": "hash"}, 'no option "kv"'),
        ({"kv.prefix": "hsh"}, 'kv.prefix: no option "hsh". Did you mean "hash"? Options: none, hash'),
        ({"kv.block_size": "big"}, 'kv.block_size must be int, got "big"'),
        ({"kv.block_size": 0}, "kv.block_size must be at least 1 and at most 8192, got 0"),
        ({"kv.memory_fraction": 1.5}, "kv.memory_fraction must be at least"),
        ({"scheduler.max_num_seqs": 0}, "scheduler.max_num_seqs must be at least 1"),
        ({"model.dtype": "int3"}, 'model.dtype must be one of auto, bfloat16, float16, float32, got "int3"'),
    ],
)
def test_a_wrong_override_says_what_is_right(overrides, message):
    with pytest.raises(ConfigError) as e:
        EngineConfig.build("v1", overrides)
    assert message in str(e.value)


def test_an_unknown_preset_is_refused():
    with pytest.raises(ConfigError, match="Did you mean"):
        EngineConfig.build("v11")


def test_the_preset_of_a_chapter_is_the_system_so_far_with_the_switches_turned_since():
    def as_of(chapter):
        return dict(EngineConfig.build(f"ch{chapter:02}").flat())

    assert as_of(1) == EngineConfig.build("naive").flat() and as_of(5) == EngineConfig.build("orca-max").flat()
    v0, v1 = (EngineConfig.build(preset).flat() for preset in ("v0", "v1"))
    assert as_of(6) == as_of(8) == v0
    assert as_of(9) == {**v0, "kv.prefix": "hash"}
    assert as_of(10) == {**as_of(9), "scheduler.kind": "unified", "scheduler.chunked_prefill": True}
    assert as_of(11) == {**as_of(10), "runner.inputs": "persistent"}
    assert as_of(12) == as_of(18) == v1
    with pytest.raises(ConfigError, match="ch00 to ch18"):
        EngineConfig.build("ch19")
    with pytest.raises(ConfigError, match="as of chapter 6"):
        EngineConfig.build("ch6")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_and_says_what_it_stands_for(name):
    assert EngineConfig.build(name).preset == name and PRESETS[name].what


def test_a_config_cannot_be_changed():
    with pytest.raises(AttributeError):
        EngineConfig.build().kv.block_size = 1


def test_vllms_names_set_the_same_things():
    overrides = from_vllm_names({"max_model_len": 100, "enable_prefix_caching": False, "dtype": "float32", "seed": 3})
    config = EngineConfig.build("v1", overrides)
    assert (config.model.max_model_len, config.kv.prefix, config.model.dtype) == (100, "none", "float32")
    assert from_vllm_names({"kv_cache_dtype": "fp8_e4m3"}) == {"kv.dtype": "float8_e4m3fn"}
    assert from_vllm_names({"guided_decoding_backend": "guidance"}) == {"structured.backend": "llguidance"}
    with pytest.raises(ConfigError, match="max_num_seqs"):
        from_vllm_names({"max_num_seq": 1})


def test_set_needs_an_equals_sign():
    assert parse_set(["kv.prefix=none", "kv.memory = 2GiB"]) == {"kv.prefix": "none", "kv.memory": "2GiB"}
    with pytest.raises(ConfigError, match="section.field=value"):
        parse_set(["kv.prefix"])


def test_a_declared_conflict_is_raised_with_its_reason(monkeypatch):
    conflict = Conflict(("prefix", "hash"), ("inputs", "rebuild"), "for the test")
    monkeypatch.setattr("minivllm.config.CONFLICTS", (*CONFLICTS, conflict))
    EngineConfig.build("v1", {"runner.inputs": "rebuild", "kv.prefix": "none"})
    with pytest.raises(ConfigError, match="prefix=hash cannot be combined with inputs=rebuild: for the test"):
        EngineConfig.build("v1", {"runner.inputs": "rebuild"})


def test_every_feature_names_a_field_and_its_default():
    defaults = EngineConfig().flat()
    for feature in FEATURES:
        assert feature.field in fields() and feature.default in feature.options and feature.what
        assert defaults[feature.field] == feature.default
    assert len({f.name for f in FEATURES}) == len(FEATURES)


def test_every_value_that_a_switch_takes_is_listed_so_that_it_is_tested_beside_all_others():
    registries = {value.axis: value for value in vars(features).values() if isinstance(value, Registry)}
    sections = get_type_hints(EngineConfig)
    for feature in FEATURES:
        section, _, name = feature.field.partition(".")
        kind, registry = get_type_hints(sections[section])[name], registries.get(feature.field)
        if get_origin(kind) is Literal:
            assert {*feature.options} == {*get_args(kind)}, feature.field
        elif registry is not None:
            listed = {part for option in feature.options for part in registry.parts(option)}
            assert listed | {"auto"} == {*registry.names(), "auto"}, feature.field


def test_a_registry_imports_on_first_use_only():
    registry = Registry("axis", {"broken": "no.such.module:X", "path": "pathlib:Path"})
    assert registry.names() == ("broken", "path")
    assert registry.get("path").__name__ == "Path"
    with pytest.raises(ImportError):
        registry.get("broken")
    with pytest.raises(ConfigError, match='axis: no option "pth". Did you mean "path"'):
        registry.get("pth")
