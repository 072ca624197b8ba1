"""Sizes from config.json, and the time of a step from them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from minivllm.errors import ConfigError, ModelError
from minivllm.loading.dummy import SHAPES, dummy_spec, hf_config
from minivllm.simulate import operations
from minivllm.simulate.cost import Cost, Numbers, Step, num_pairs
from minivllm.simulate.devices import DEVICES, find_device, find_larger
from minivllm.simulate.models import MODELS
from minivllm.simulate.operations import crowding
from minivllm.simulate.shape import read_shape
from minivllm.simulate.weights import weight_bytes

BF16 = Numbers("bfloat16", 2, 2)
OPT_13B = {
    "model_type": "opt",
    "num_hidden_layers": 40,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "ffn_dim": 20480,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_parameters_of_the_model(name):
    assert read_shape(hf_config(name)).num_parameters == dummy_spec(name).num_parameters


def test_opt_is_read_by_its_own_names():
    shape = read_shape(OPT_13B)
    assert math.isclose(shape.num_parameters, 12.85e9, rel_tol=0.01)  # Zhang et al., 2022
    assert shape.kv_bytes_per_token(2) == 800 * 1024  # the vLLM paper's figure for OPT-13B, section 3


def test_a_gigabyte_of_kv_holds_as_many_tokens_as_vllm_says():
    """vLLM 0.19 on an RTX 4090: 2588 blocks of 16 tokens of Llama-3.1-8B are 5.05 GiB."""
    per_token = read_shape(hf_config("llama-3.1-8b")).kv_bytes_per_token(2)
    assert per_token * 2588 * 16 / 2**30 == pytest.approx(5.05, abs=0.01)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"kv_lora_rank": 512}, "no field qk_rope_head_dim"),
        ({"index_topk": 2048}, "sparse attention"),
        ({"layer_types": ["full_attention", "conv"] * 20}, "the cost of conv"),
        ({"ssm_state_size": 128}, "a recurrent state"),
        ({"num_hidden_layers": None}, "no field num_hidden_layers or n_layer"),
        ({"vocab_size": "many"}, "no field vocab_size"),
    ],
)
def test_what_is_not_modelled_is_refused(changes, says):
    with pytest.raises(ModelError, match=says):
        read_shape({**OPT_13B, **changes})


@pytest.mark.parametrize("window", [None, 1, 3, 8, 50])
def test_pairs_are_counted_as_a_mask_has_them(window):
    num_new, start = np.array([1, 1, 7, 20, 4]), np.array([0, 9, 0, 5, 30])
    expected = 0
    for new, before in zip(num_new, start, strict=True):
        for position in range(before, before + new):
            expected += position + 1 if window is None else min(position + 1, window)
    assert num_pairs(num_new, start, window) == expected


def decode(num_requests: int, context: int) -> Step:
    return Step(np.ones(num_requests, np.int64), np.full(num_requests, context), num_requests)


@pytest.mark.parametrize("device", DEVICES)
def test_more_work_takes_longer_and_never_less_than_reading_the_weights(device):
    cost = Cost(DEVICES[device], read_shape(hf_config("llama-3.1-8b")), BF16)
    steps = [decode(1, 10), decode(1, 5000), decode(64, 5000), decode(256, 5000)]
    seconds = [cost.step_seconds(step) for step in steps]
    assert seconds == sorted(seconds) and len(set(seconds)) == 4
    assert seconds[0] > 0.9 * cost.weight_bytes / DEVICES[device].bandwidth  # all but the embedding


def test_a_prompt_costs_what_its_multiplications_do():
    device, shape = DEVICES["h100"], read_shape(hf_config("llama-3.1-8b"))
    seconds = Cost(device, shape, BF16).step_seconds(Step(np.array([8192]), np.array([0]), 1))
    flops = 2 * 8192 * (shape.num_parameters - 2 * shape.vocab_size * shape.hidden_size)
    assert (
        1 < seconds / (flops / (device.reached["product"].compute * device.flops["bfloat16"])) < 1.4
    )  # attention, norms, head


def test_in_two_pieces_a_prompt_takes_no_shorter():
    cost = Cost(DEVICES["h100"], read_shape(hf_config("llama-3.1-8b")), BF16)
    whole = Step(np.array([4096]), np.array([0]), 1)
    pieces = Step(np.array([2048]), np.array([0]), 0), Step(np.array([2048]), np.array([2048]), 1)
    assert cost.step_seconds(whole) <= sum(map(cost.step_seconds, pieces))


def test_a_sliding_window_bounds_what_a_decode_reads():
    config = {**hf_config("llama-3.1-8b"), "layer_types": ["sliding_attention", "full_attention"] * 16}
    windows = Cost(DEVICES["h100"], read_shape({**config, "sliding_window": 1024}), BF16)
    full = Cost(DEVICES["h100"], read_shape(config), BF16)
    assert math.isclose(windows.step_seconds(decode(8, 500)), full.step_seconds(decode(8, 500)), rel_tol=0.01)
    assert windows.step_seconds(decode(8, 50_000)) < 0.75 * full.step_seconds(decode(8, 50_000))


def test_a_mixture_reads_more_experts_the_more_tokens_there_are():
    cost = Cost(DEVICES["h100"], read_shape(hf_config("qwen3-30b-a3b")), BF16)
    one, many = cost.step_seconds(decode(1, 100)), cost.step_seconds(decode(64, 100))
    assert many > 4 * one and many > 0.9 * cost.weight_bytes / (0.849 * 3.35e12) * 0.95


# --------------------------------------------------------------------------------------------------------- states


def test_of_four_layers_three_keep_a_state_and_the_fourth_has_k_and_v():
    shape = read_shape(MODELS["qwen3-next-80b-a3b"])
    assert math.isclose(shape.num_parameters, 80e9, rel_tol=0.01)  # its name
    assert shape.states is not None and (shape.states.num_layers, shape.num_attention_layers) == (36, 12)
    assert shape.kv_bytes_per_token(2) == 12 * 2 * 2 * 256 * 2
    assert shape.states.bytes == 4 * (32 * 128 * 128 + 3 * 8192)  # of each head a matrix; three tokens' channels


def test_states_take_as_long_whatever_came_before_them():
    """The same layers, once with states and once as attention: what a step takes more for a longer context."""
    config = MODELS["qwen3-next-80b-a3b"]
    with_states, without = (
        Cost(DEVICES["h200"], read_shape(one), BF16)
        for one in (config, {**config, "layer_types": ["full_attention"] * 48})
    )
    more = [c.step_seconds(decode(16, 200_000)) - c.step_seconds(decode(16, 1000)) for c in (with_states, without)]
    assert more[0] == pytest.approx(more[1] / 4, rel=0.01)
    one, many = (with_states.step_seconds(decode(batch, 1)) for batch in (1, 256))
    assert many - one > 0.9 * 36 * 255 * 2 * with_states.shape.states.bytes / DEVICES["h200"].bandwidth


def test_a_prompt_reads_and_writes_its_states_once():
    states = read_shape(hf_config("qwen3.5-0.8b")).states
    assert states.flops(3, 64) == 3 * states.flops(1, 0) + 64 * states.flops(0, 1)
    cost = Cost(DEVICES["h100"], read_shape(hf_config("qwen3.5-0.8b")), BF16)
    (_, prompt), (_, decodes) = (next(cost._attentions(step)) for step in (Step.of(64), decode(64, 1)))
    assert decodes.bytes - prompt.bytes == 63 * 2 * states.bytes
    without = dataclasses.replace(states, each=states.each._replace(rule="ssd"))  # takes nothing out
    assert all(without.flops(*of) < states.flops(*of) for of in ((1, 0), (0, 64)))


@pytest.mark.parametrize("name", ["qwen3.5-0.8b", "granite-4.0-h-350m"])
def test_a_block_is_as_large_as_a_state(name):
    shape = read_shape(hf_config(name))
    cost = Cost(DEVICES["h100"], shape, BF16)
    size = cost.block_size(16)
    per_token = cost.kv_bytes_per_token / shape.num_attention_layers
    assert (size - 16) * per_token < shape.states.bytes <= size * per_token
    assert cost.block_size(100_000) == 100_000 and on("h100").block_size(16) == 16


def test_devices_share_the_heads_of_a_state():
    shape = read_shape(MODELS["qwen3-next-80b-a3b"])
    part = shape.over(4).states
    assert part.num_layers == 36 and 4 * part.bytes == shape.states.bytes
    with pytest.raises(ConfigError, match="equal parts of 24 and 16 heads of a state"):
        dataclasses.replace(shape.states, each=shape.states.each._replace(num_v_heads=24)).over(16)
    with pytest.raises(ConfigError, match="stages of a model with sliding windows or recurrent states"):
        shape.stages(2)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layer_types": None}, "no field layer_types says"),
        ({"layer_types": ["mamba"] * 32}, "without a layer of attention"),
        ({"mamba_n_heads": None}, "of a kind that is not modelled"),
        ({"layer_types": ["conv"] * 32}, "the cost of conv"),
    ],
)
def test_states_that_are_not_modelled_are_refused(changes, says):
    with pytest.raises(ModelError, match=says):
        read_shape({**hf_config("granite-4.0-h-350m"), **changes})


@pytest.mark.parametrize(
    ("says", "windows"),
    [
        ({"model_type": "gemma3_text"}, {None: 5, 512: 27}),
        ({"sliding_window_pattern": 4}, {None: 8, 512: 24}),
        ({"model_type": "gemma2"}, {None: 16, 512: 16}),
        ({}, {None: 32}),
    ],
)
def test_older_configs_say_which_layers_have_windows_in_other_words(says, windows):
    shape = read_shape({**hf_config("llama-3.1-8b"), "model_type": None, "sliding_window": 512, **says})
    assert shape.windows == windows


def test_a_config_that_could_have_states_and_has_none_is_one_of_attention():
    shape = read_shape({**hf_config("granite-4.0-h-350m"), "layer_types": ["attention"] * 32})
    assert shape.states is None and shape.num_attention_layers == 32


# ------------------------------------------------------------------------------------------------- several devices


def on(device: str, model: str = "llama-3.1-8b", numbers: Numbers = BF16) -> Cost:
    return Cost(find_device(device), read_shape(hf_config(model)), numbers)


def test_each_of_several_devices_has_its_part_of_weights_and_kv():
    one, four, shape = on("h100"), on("4xh100"), read_shape(hf_config("llama-3.1-8b"))
    assert 4 * four.weight_bytes == one.weight_bytes
    assert 4 * four.kv_bytes_per_token == one.kv_bytes_per_token
    assert on("8xh100", "qwen3-30b-a3b").kv_bytes_per_token == on("4xh100", "qwen3-30b-a3b").kv_bytes_per_token
    with pytest.raises(ConfigError, match="cannot share 8 heads of K and V"):
        dataclasses.replace(shape, num_heads=36, intermediate_size=36).over(3)


def test_several_devices_are_faster_and_not_as_many_times_as_they_are():
    for step in (decode(8, 2000), Step(np.array([4096]), np.array([0]), 1)):
        seconds = [on(device).step_seconds(step) for device in ("h100", "2xh100", "4xh100", "8xh100")]
        assert seconds == sorted(seconds, reverse=True) and seconds[0] < 8 * seconds[3]


def test_experts_that_are_spread_are_as_many_bytes_and_wait_for_whose_are_drawn_most():
    cut, spread = on("8xh100", "qwen3-30b-a3b"), on("8xh100+ep", "qwen3-30b-a3b")
    assert spread.weight_bytes == cut.weight_bytes
    steps = [decode(1, 100), decode(64, 100), Step(np.array([16_384]), np.array([0]), 1)]
    ratios = [spread.step_seconds(step) / cut.step_seconds(step) for step in steps]
    assert ratios == sorted(ratios, reverse=True) and ratios[0] > 1.02 > 1 > ratios[2]  # one reads its tokens once


@pytest.mark.parametrize(("drawn", "ranks"), [(8, 8), (256, 8), (4096, 4), (100_000, 2)])
def test_the_crowd_at_one_rank_is_what_chance_makes_or_a_little_more(drawn, ranks):
    counts = np.random.default_rng(0).multinomial(drawn, [1 / ranks] * ranks, size=2000)
    seen = counts.max(axis=1).mean() * ranks / drawn
    assert seen <= crowding(drawn, ranks) <= 1 + 1.8 * (seen - 1)


def test_a_device_alone_has_all_draws_and_one_draw_is_one_ranks():
    assert crowding(100, 1) == 1 and crowding(1, 4) == 4 and crowding(1, 100) == 100


@pytest.mark.parametrize(
    ("device", "model", "what"),
    [
        ("8xh100+ep", "llama-3.1-8b", "the model has none"),
        ("h100+ep", "qwen3-30b-a3b", "here is one"),
        ("8xh100+ep", "nine experts", "8 devices cannot have equal parts of 9 experts"),
    ],
)
def test_experts_that_cannot_be_spread_are_refused_in_a_sentence(device, model, what):
    config = {**MODELS["mixtral-8x7b"], "num_local_experts": 9} if model == "nine experts" else hf_config(model)
    with pytest.raises(ConfigError, match=what):
        Cost(find_device(device), read_shape(config), BF16)


def test_contexts_that_are_spread_leave_room_for_as_many_times_the_tokens():
    for device, model, num_contexts in (("8xh100", "qwen3-30b-a3b", 2), ("8xh200", "deepseek-v3", 8)):
        alike, spread = (
            Cost(find_device(name), read_shape(config_of(model)), BF16)
            for name in (device, f"{device}+dcp{num_contexts}")
        )
        assert spread.weight_bytes == alike.weight_bytes
        assert num_contexts * spread.kv_bytes_per_token == pytest.approx(alike.kv_bytes_per_token)


@pytest.mark.parametrize(("model", "device"), [("qwen3-30b-a3b", "8xh100+dcp2"), ("deepseek-v3", "8xh200+dcp8")])
def test_spread_contexts_are_faster_where_they_are_long_and_gathered_where_a_prompt_goes_on(model, device):
    shape = read_shape(config_of(model))
    spread, alike = (Cost(find_device(name), shape, BF16) for name in (device, device.partition("+")[0]))
    steps = {
        "long": decode(32, 100_000),
        "short": decode(1, 100),
        "prompt": Step(np.array([2048]), np.array([0]), 1),
        "goes on": Step(np.array([2048]), np.array([50_000]), 1),
    }
    ratios = {name: spread.step_seconds(step) / alike.step_seconds(step) for name, step in steps.items()}
    assert ratios["long"] < 0.8 and ratios["prompt"] == 1 < min(ratios["short"], ratios["goes on"])


def test_all_pairs_of_spread_contexts_are_computed_once():
    sizes = 1e6, 3e8, 32, 16, 512, 64, 256, 2
    whole, part = (operations.absorbed(*sizes, num_contexts=count) for count in (1, 8))
    assert part.flops == whole.flops and part.bytes > whole.bytes  # queries and results, beside the same vectors


@pytest.mark.parametrize(
    ("device", "model", "what"),
    [
        ("4xh100+dcp2", "llama-3.1-8b", "no two of 4 devices have the same K and V"),
        ("8xh100+dcp4", "qwen3-30b-a3b", "2 of 8 devices have the same"),
        ("8xh100+dcp3", "deepseek-v3", "3 parts of a context cannot lie on 8 devices"),
        ("h100+dcp2", "qwen3-30b-a3b", "2 parts of a context cannot lie on 1 devices"),
        ("8xh100+dcp0", "qwen3-30b-a3b", "0 parts"),
        ("2xh100+dcp2", "one head", "with sliding windows"),
    ],
)
def test_contexts_that_cannot_be_spread_are_refused_in_a_sentence(device, model, what):
    with pytest.raises(ConfigError, match=what):
        Cost(find_device(device), read_shape(config_of(model)), BF16)


def config_of(model: str) -> dict:
    if model == "one head":
        layers = ["full_attention", "sliding_attention"] * 2
        own = {"num_key_value_heads": 1, "num_hidden_layers": 4, "layer_types": layers, "sliding_window": 64}
        return {**hf_config("llama-3.1-8b"), **own}
    return MODELS[model] if model in MODELS else hf_config(model)


def test_a_device_s_name_has_all_ways_of_sharing_in_one_order():
    found = find_device("2x8xh100+ep+dcp2:41,39")
    assert (found.num_stages, found.count, found.split) == (2, 8, (41, 39))
    assert found.spreads_experts and found.num_contexts == 2
    with pytest.raises(ConfigError, match="no device"):
        find_device("8xh100+dcp")


# vLLM's captured all-reduce on H100, in ai-dynamo/aiconfigurator 095f58a (us): devices, bytes, measured.
MEASURED = [(2, 8192, 4.5), (2, 8388608, 81.4), (4, 131072, 7.2), (4, 33554432, 329.9), (8, 512, 4.6), (8, 8388608, 92)]


@pytest.mark.parametrize("count, size, measured", MEASURED)
def test_an_all_reduce_takes_as_long_as_measured(count, size, measured):
    link = DEVICES["h100"].link
    assert link.all_reduce_seconds(count, size) == pytest.approx(measured * 1e-6, rel=0.25)


def test_an_all_reduce_of_three_lies_between_those_of_two_and_four():
    two, three, four = (DEVICES["a100-80"].link.all_reduce_seconds(count, 1e6) for count in (2, 3, 4))
    assert two < three < four


def test_a_larger_machine_is_more_of_the_same_or_else_the_smallest_that_does():
    assert find_larger(DEVICES["h100"], lambda one: one.count * one.memory > 200e9) == "4xh100"
    assert find_larger(DEVICES["xeon-8480"], lambda one: one.memory > 90e9) == "rtx-pro-6000"
    assert find_larger(DEVICES["h100"], lambda one: False) is None


# ----------------------------------------------------------------------------------------------------- models by name

# Billions of parameters, as their publishers say; DeepSeek-V3 without its head for a second token.
PUBLISHED = {
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "llama-3.3-70b": 70.6,
    "llama-3.1-405b": 406,
    "qwen3-8b": 8.2,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "qwen3-next-80b-a3b": 80,
    "mistral-7b": 7.25,
    "mixtral-8x7b": 46.7,
    "gemma-3-27b": 27.0,
    "opt-13b": 12.9,
    "opt-30b": 30.0,
    "opt-66b": 65.7,
    "opt-175b": 175,
    "deepseek-v3": 671,
    "deepseek-r1": 671,
    "kimi-k2": 1026.5,
    "kimi-k2.5": 1026.5,
    "minimax-m2": 230,
    "minimax-m2.5": 230,
    "glm-4.5": 355,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
}


def test_a_model_by_name_has_as_many_parameters_as_its_publisher_says():
    for name, config in MODELS.items():
        assert read_shape(config).num_parameters == pytest.approx(PUBLISHED[name] * 1e9, rel=0.01), name


def by_name(device: str, name: str, quantization: str = "auto") -> Cost:
    weights = weight_bytes(MODELS[name], quantization, "bfloat16", 2, name)
    return Cost(find_device(device), read_shape(MODELS[name]), dataclasses.replace(BF16, weights=weights))


def test_a_token_of_latent_attention_is_one_vector_that_every_device_keeps():
    one, eight = by_name("h200", "deepseek-v3"), by_name("8xh200", "deepseek-v3")
    assert one.kv_bytes_per_token == eight.kv_bytes_per_token == 61 * (512 + 64) * 2
    assert eight.weight_bytes < 90e9 < DEVICES["h200"].memory  # fp8, as published: eight H200 hold it


def test_latent_attention_reads_little_and_computes_much():
    """Absorbed, every head has queries of 576 numbers and values of 512, of a cache that all share: with 128 heads
    computing takes longer than reading, with 16 of them it does not."""

    def beside_reading(device: str) -> float:
        cost = by_name(device, "deepseek-v3")
        longer = cost.step_seconds(decode(32, 9000)) - cost.step_seconds(decode(32, 1000))
        return longer / (32 * 8000 * cost.kv_bytes_per_token / DEVICES["h200"].bandwidth)

    assert beside_reading("h200") > 1.3 > 1.05 > beside_reading("8xh200") > 0.95


def test_a_prompt_in_pieces_pays_for_expanding_what_is_cached():
    cost = by_name("8xh200", "deepseek-v3")
    behind = cost.step_seconds(Step(np.array([512]), np.array([32_768]), 1))
    expanding = 2 * 61 * 32_768 * 512 * (128 // 8) * (128 + 128) / DEVICES["h200"].flops["float8_e4m3fn"]
    assert behind > cost.step_seconds(Step(np.array([512]), np.array([0]), 1)) + expanding


def test_weights_in_fewer_bits_are_read_sooner_and_multiplied_no_sooner():
    whole, eight, four = (by_name("h100", "llama-3.1-8b", asked) for asked in ("none", "int8", "int4"))
    assert whole.weight_bytes > 1.6 * eight.weight_bytes > 2 * four.weight_bytes
    decodes = [cost.step_seconds(decode(1, 100)) for cost in (whole, eight, four)]
    assert decodes == sorted(decodes, reverse=True) and decodes[0] > 1.7 * decodes[2]
    prompt = Step(np.array([8192]), np.array([0]), 1)
    assert math.isclose(whole.step_seconds(prompt), four.step_seconds(prompt), rel_tol=0.01)


def test_a_checkpoint_in_fp8_is_multiplied_in_fp8_where_the_device_can():
    prompt = Step(np.array([8192]), np.array([0]), 1)
    config = {**MODELS["llama-3.3-70b"], "quantization_config": {"quant_method": "fp8"}}
    weights = weight_bytes(config, "auto", "bfloat16", 2, "it")
    for device, can in (("h200", True), ("a100-80", False)):
        published = Cost(DEVICES[device], read_shape(config), dataclasses.replace(BF16, weights=weights))
        whole = Cost(DEVICES[device], read_shape(config), BF16)
        assert (published.step_seconds(prompt) < 0.9 * whole.step_seconds(prompt)) == can


def test_weights_that_are_not_modelled_are_refused():
    config = {**MODELS["llama-3.1-8b"], "quantization_config": {"quant_method": "odd"}}
    with pytest.raises(ModelError, match="quant_method='odd'"):
        weight_bytes(config, "auto", "bfloat16", 2, "it")


# -------------------------------------------------------------------------------------------------- what was measured

# Milliseconds of vLLM 0.24's kernels on H100, in ai-dynamo/aiconfigurator 095f58a: matrices of 8192 x 8192, and
# attention with 32 heads of which 8 have K and V.
KERNELS = [
    (operations.product(128, 8192, 8192, 2, 2, "product"), 0.0487),
    (operations.product(8192, 8192, 8192, 2, 2, "product"), 1.5417),
    (operations.attention(2048 * 2049 / 2, 2048 * 4096, 2048, 32, 128, 2, "prefill"), 0.0890),
    (operations.attention(8192 * 8193 / 2, 8192 * 4096, 8192, 32, 128, 2, "prefill"), 0.9122),
    (operations.attention(1024, 1024 * 4096, 1, 32, 128, 2, "decode"), 0.0136),
    (operations.attention(32 * 2048, 32 * 2048 * 4096, 32, 32, 128, 2, "decode"), 0.1008),
    (operations.attention(128 * 4096, 128 * 4096 * 4096, 128, 32, 128, 2, "decode"), 0.6898),
]


@pytest.mark.parametrize("work, measured", KERNELS)
def test_a_kernel_takes_about_as_long_as_measured(work, measured):
    assert on("h100").seconds(work) == pytest.approx(measured / 1e3, rel=0.25)


# Milliseconds of steps of DistServe's engine, whose host is C++, on A100, by its own fits (LLMServe/DistServe 82831f1):
# nothing here was fitted to them. A step of vLLM V0 took longer, by what its host took.
STEPS = [
    ("a100-80", "opt-13b", Step(np.array([2048]), np.array([0]), 1), 257),
    ("a100-80", "opt-13b", decode(64, 511), 43),
    ("4xa100-80", "opt-66b", Step(np.array([2048]), np.array([0]), 1), 374),
    ("4xa100-80", "opt-66b", decode(64, 511), 50),
]


@pytest.mark.parametrize("device, model, step, measured", STEPS)
def test_a_step_takes_about_as_long_as_another_engine_measured(device, model, step, measured):
    assert by_name(device, model).step_seconds(step) == pytest.approx(measured / 1e3, rel=0.16)


def test_norms_over_all_heads_are_a_sum_of_the_devices_in_each_layer():
    """MiniMax M2's: two sums of squares a token."""
    shape = read_shape(MODELS["minimax-m2"])
    assert shape.sums_norms
    without = dataclasses.replace(shape, sums_norms=False)
    four = find_device("4xh200")
    more = Cost(four, shape, BF16).step_seconds(decode(16, 100)) - Cost(four, without, BF16).step_seconds(
        decode(16, 100)
    )
    assert more == pytest.approx(62 * four.link.all_reduce_seconds(4, 16 * 2 * 4))
    alone = find_device("h200")
    assert Cost(alone, shape, BF16).step_seconds(decode(1, 9)) == Cost(alone, without, BF16).step_seconds(decode(1, 9))
