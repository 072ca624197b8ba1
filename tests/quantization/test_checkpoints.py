"""Rule: a checkpoint in any weight format loads, and its model is that of its de-quantised twin: bit for bit where its
weights are de-quantised, within what inputs are rounded by where they are multiplied packed."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
import torch
from quantization.checkpoints import Draw, write
from safetensors.torch import load_file, save_file
from tolerances import rounded_inputs

from minivllm.errors import ModelError
from minivllm.kernels.cpu import blocks as kernels
from minivllm.loading import load_model
from minivllm.loading.dummy import SHAPES
from minivllm.quantization.base import FORMATS, read_format

needs_kernels = pytest.mark.skipif(kernels.unsupported_reason() is not None, reason=str(kernels.unsupported_reason()))


class Checkpoint(NamedTuple):
    config: dict[str, Any]  # quantization_config
    linear: str  # what the table at start says of the layers; 14 matrices and an LM head
    draw: Draw = lambda spec, generator: None
    scale: float = 0.01
    shape: str = "tiny-short"


def shuffled_groups(size: int) -> Draw:
    def draw(spec, generator):
        if spec.name != "g_idx":
            return None
        return (torch.randperm(*spec.shape, generator=generator) // size).to(torch.int32)

    return draw


def draws(**values) -> Draw:
    """Of these tensors one number each."""
    return lambda spec, generator: (
        torch.full(spec.shape, values[spec.name], dtype=spec.dtype or torch.float32) if spec.name in values else None
    )


def exponents(*names: str) -> Draw:
    """Of these tensors powers of two, 127 too large."""
    return lambda spec, generator: (
        torch.randint(117, 123, spec.shape, generator=generator).to(torch.uint8) if spec.name in names else None
    )


def states(n_in: int, **changes) -> Draw:
    """bitsandbytes' JSON of a matrix of these inputs."""
    state = {"blocksize": 64, "nested_blocksize": 256, "dtype": "float16", "nested_offset": 0.02, "shape": [1, n_in]}
    text = torch.tensor(list(json.dumps(state | changes).encode()), dtype=torch.uint8)
    return lambda spec, generator: text.clone() if "quant_state" in spec.name else None


def shapes(n_in: int) -> Draw:
    """HQQ's tensors of a matrix of these inputs."""
    return lambda spec, generator: torch.tensor([-1, n_in]) if spec.name == "shape" else None


EIGHTS = int.from_bytes(b"\x77" * 4, "little")  # zero points of 8, less one
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "packing_format": "auto_round"}
MIXED = {"model.layers.0.mlp.down_proj": {"bits": 16}, r".*layers\.1\.mlp.*": {"bits": 2}}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
NVFP4 = {"quant_algo": "NVFP4", "group_size": 16}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
DOWN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "lm_head"]  # all but down_proj
HQQ = {
    "quant_method": "hqq",
    "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 32, "axis": 0}},
    "skip_modules": ["lm_head", "o_proj", "down_proj"],
}
NO_FP8 = "no kernel multiplies FP8"

HIDDEN, WIDE = SHAPES["tiny-short"]["hidden_size"], SHAPES["tiny-short"]["intermediate_size"]


def compressed(layout: str, activations: bool = False, **weights) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 8, "symmetric": True} | weights}
    group |= {"input_activations": {"num_bits": 8, "dynamic": True}} if activations else {}
    named = {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"]}
    return named | {"config_groups": {"group_0": group}}


CHECKPOINTS = {
    "compressed-tensors, W8A16": Checkpoint(
        compressed("pack-quantized", strategy="group", group_size=32), "14 in Q8_0, 1 dense", scale=0.001
    ),
    "compressed-tensors, W8A8": Checkpoint(
        compressed("int-quantized", True, strategy="channel"), "14 in Q8_0, 1 dense", draws(input_scale=0.5), 0.001
    ),
    "compressed-tensors, W8A8 by tensor": Checkpoint(
        compressed("int-quantized", True, strategy="tensor", symmetric=False), "dense (numbers that Q8_0", scale=0.001
    ),
    "compressed-tensors, FP8": Checkpoint(
        compressed("float-quantized", True, strategy="tensor", type="float"), NO_FP8, draws(input_scale=0.5)
    ),
    "compressed-tensors, NVFP4": Checkpoint(
        compressed("nvfp4-pack-quantized", True, strategy="tensor_group", group_size=16, num_bits=4, type="float"),
        "groups of 16 fill no block",
        draws(weight_global_scale=30.0, input_global_scale=2.0),
    ),
    "compressed-tensors, MXFP4": Checkpoint(
        compressed("mxfp4-pack-quantized", strategy="group", group_size=32, num_bits=4, type="float"),
        "14 in Q5_0, 1 dense",
        exponents("weight_scale"),
    ),
    "fp8": Checkpoint(FP8, NO_FP8),
    "fp8, ragged blocks": Checkpoint(FP8 | {"weight_block_size": [24, 40]}, NO_FP8),
    "fp8, by tensor": Checkpoint(
        FP8 | {"weight_block_size": None, "activation_scheme": "static"}, NO_FP8, draws(activation_scale=0.1)
    ),
    "fp8, AutoFP8": Checkpoint(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        NO_FP8,
        draws(input_scale=0.1),
    ),
    "fp8, mixed by module": Checkpoint(
        FP8 | {"modules_to_not_convert": ["model.layers.1", "mlp.down_proj"]}, "9 dense (not packed in the file)"
    ),
    "auto-round": Checkpoint(AUTO_ROUND, "14 in Q5_0, 1 dense (not packed in the file)"),
    "auto-round, mixed by module": Checkpoint(
        AUTO_ROUND | {"extra_config": MIXED, "block_name_to_quantize": "model.layers"},
        "3 in Q4_0 and 10 in Q5_0, 2 dense (not packed in the file)",
    ),
    "auto-round, AWQ's words": Checkpoint(
        AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, "14 in Q5_0, 1 dense (not packed in the file)"
    ),
    "awq": Checkpoint(AWQ, "14 in Q5_0, 1 dense (not packed in the file)"),
    "awq, mixed by module": Checkpoint(
        AWQ | {"modules_to_not_convert": ["layers.0.", "down_proj"], "group_size": -1},
        "6 in Q5_0, 9 dense (not packed in the file)",
    ),
    "mxfp4": Checkpoint(
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "down_proj"]},
        "dense (not packed in the file)",
        exponents("scales"),
        shape="tiny-moe",
    ),
    "modelopt, FP8": Checkpoint(MODELOPT, NO_FP8, draws(input_scale=0.5)),
    "modelopt, NVFP4": Checkpoint(
        MODELOPT | {"quant_algo": "NVFP4", "ignore": ["lm_head", "*.layers.0.*"]},
        "groups of 16 fill no block",
        draws(weight_scale_2=0.03, input_scale=2.0),
    ),
    "modelopt, mixed": Checkpoint(
        MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layers.1.mlp.down_proj": NVFP4}},
        "1 dense (groups of 16 fill no block), 14 dense",
        draws(weight_scale_2=0.03),
    ),
    "bitsandbytes, nf4": Checkpoint(
        BNB | {"llm_int8_skip_modules": ["o_proj", "down_proj", "lm_head"]}, "tables", states(HIDDEN), 1
    ),
    "bitsandbytes, fp4 nested": Checkpoint(
        BNB | {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True, "llm_int8_skip_modules": DOWN},
        "tables",
        states(WIDE),
        0.3,
    ),
    "bitsandbytes, int8": Checkpoint(
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, "its scales are float32", draws(weight_format=0), 0.2
    ),
    "hqq": Checkpoint(HQQ, "axis 0", shapes(HIDDEN)),
    "hqq, packed": Checkpoint(
        HQQ | {"quant_config": {"mlp.up_proj": {"weight_quant_params": {"nbits": 4, "group_size": 32}}}},
        "dense (not packed in the file)",
        shapes(HIDDEN),
    ),
    "gptq": Checkpoint(GPTQ, "14 in Q5_0, 1 dense (not packed in the file)"),
    "gptq, symmetric": Checkpoint(
        GPTQ | {"sym": True}, "14 in Q4_0, 1 dense (not packed in the file)", draws(qzeros=EIGHTS)
    ),
    "gptq, 3 bits": Checkpoint(GPTQ | {"bits": 3}, "14 in Q4_0, 1 dense (not packed in the file)"),
    "gptq, act-order": Checkpoint(GPTQ | {"desc_act": True}, "act-order", shuffled_groups(32)),
    "gptq, mixed by module": Checkpoint(
        GPTQ | {"dynamic": {r"-:.*\.layers\.0\..*": {}, r".*down_proj": {"bits": 8, "group_size": 16}}},
        "6 in Q5_0, 1 dense (no block fits: its groups are no multiples of 32 inputs), 8 dense",
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_model_is_its_dequantised_twin(tmp_path, name):
    from naive_attention import logits_of

    config, linear, draw, scale, shape = CHECKPOINTS[name]
    write(tmp_path, config, draw, shape, scale)
    ids = list(range(20))
    found = load_model(str(tmp_path / "quantised"), torch.float32, "cpu")
    twin = load_model(str(tmp_path / "dense"), torch.float32, "cpu")
    assert found.quantization[0] == "none" and found.quantization[1].startswith(read_name(config))
    logits = logits_of(twin.model, ids)
    assert logits.isfinite().all() and torch.equal(logits_of(found.model, ids), logits)
    if kernels.unsupported_reason() is None:
        packed = load_model(str(tmp_path / "quantised"), torch.float32, "cpu", dtype_asked=False)
        assert linear in f"{packed.linear[1]} {packed.quantization[1]}"
        expected = logits_of(load_model(str(tmp_path / "exact"), torch.float32, "cpu").model, ids)
        error = (logits_of(packed.model, ids) - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
        assert error <= rounded_inputs(4 * 2 + 1)


def read_name(config) -> str:
    return read_format({"quantization_config": config}).name


def test_every_format_is_loaded_by_a_test():
    assert {checkpoint.config["quant_method"] for checkpoint in CHECKPOINTS.values()} == set(FORMATS.names())


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"}, "packing_format"),
        (AUTO_ROUND | {"act_bits": 8}, "act_bits=8"),
        (AUTO_ROUND | {"extra_config": {"x": {"data_type": "mx_fp"}}}, "data_type='mx_fp'"),
        (AWQ | {"version": "gemv"}, "version='gemv'"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size="),
        (FP8 | {"fmt": "e5m2"}, "fmt='e5m2'"),
        (FP8 | {"expert_dtype": "fp4"}, "expert_dtype='fp4'"),
        (AWQ | {"bits": 3}, "bits=3"),
        (MODELOPT | {"quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ'"),
        (MODELOPT | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme="),
        ({"quant_method": "modelopt"}, "no quant_algo"),
        (BNB | {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage='bfloat16'"),
        (BNB | {"load_in_8bit": True}, "load_in_4bit=True with load_in_8bit=True"),
        (HQQ | {"quant_config": {"weight_quant_params": {"nbits": 5}}}, "nbits=5"),
        (GPTQ | {"bits": 16}, "bits=16"),
        (GPTQ | {"group_size": 0}, "group_size=0"),
        (GPTQ | {"sym": 1}, "sym=1"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        (GPTQ | {"adapter": {"name": "lora"}}, "adapter"),
        (GPTQ | {"dynamic": {"x": {"bits": 9}}}, "bits=9"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_by_name(config, what):
    with pytest.raises(ModelError, match=rf"config.json: .*{what}.* is not supported; take the plain model"):
        read_format({"quantization_config": config})


@pytest.mark.parametrize("config", [GPTQ | {"dynamic": {"-:(": {}}}, GPTQ | {"dynamic": 3}])
def test_nonsense_is_a_clear_error(config):
    with pytest.raises(ModelError, match="quantization_config is missing or of the wrong kind"):
        read_format({"quantization_config": config})


ENDLESS = ("((([a-z._0-9])+)+)+!", "(.*)*(.*)*(.*)*!", "(a|b|ab|[a-z.]*)*_proj!")  # with `re`, for any name
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
LISTS = {
    "compressed-tensors, ignore": lambda text: {
        **{"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"a": GROUP}},
        "ignore": [f"re:{text}"],
    },
    "compressed-tensors, targets": lambda text: {
        **{"quant_method": "compressed-tensors", "format": "float-quantized"},
        "config_groups": {"a": GROUP | {"targets": [f"re:{text}"]}},
    },
    "auto-round": lambda text: AUTO_ROUND | {"extra_config": {text: {"bits": 8}}},
    "gptq": lambda text: GPTQ | {"dynamic": {f"-:{text}": {}}},
    "fp8": lambda text: FP8 | {"modules_to_not_convert": [text]},
    "bitsandbytes": lambda text: BNB | {"llm_int8_skip_modules": [text]},
    "hqq": lambda text: HQQ | {"skip_modules": [text]},
    "mxfp4": lambda text: {"quant_method": "mxfp4", "modules_to_not_convert": [text]},
    "modelopt": lambda text: MODELOPT | {"ignore": ["*" * 50 + "a!"]},
}


@pytest.mark.parametrize("text", ENDLESS)
@pytest.mark.parametrize("of", LISTS)
def test_no_pattern_of_a_list_makes_a_name_costly(of, text):
    """The test ends."""
    found = read_format({"quantization_config": LISTS[of](text)})
    plain = read_format({"quantization_config": LISTS[of]("nothing")})
    assert found is not None and plain is not None
    for i in range(100):
        name = f"model.layers.{i}.self_attn.q_proj"
        assert found.scheme_for(name) == plain.scheme_for(name)


@pytest.mark.parametrize("of", [of for of in LISTS if of != "modelopt"])
def test_a_pattern_that_cannot_be_matched_in_linear_time_is_refused_by_name(of):
    with pytest.raises(ModelError, match=r'the pattern "\(\?!a\)b" is no regular expression that is supported'):
        read_format({"quantization_config": LISTS[of]("(?!a)b")})


def test_an_order_that_nobody_announced_is_refused(tmp_path):
    write(tmp_path, GPTQ | {"desc_act": True}, shuffled_groups(32))
    path = tmp_path / "quantised" / "config.json"
    path.write_text(path.read_text().replace('"desc_act": true', '"desc_act": false'))
    with pytest.raises(ModelError, match="g_idx is not in order, and desc_act is false"):
        load_model(str(tmp_path / "quantised"), torch.float32, "cpu")


def test_a_scale_of_one_number_may_be_a_scalar_or_a_vector(tmp_path):
    from naive_attention import logits_of

    write(tmp_path, MODELOPT)
    file = tmp_path / "quantised" / "model.safetensors"
    held = load_file(file)
    save_file({name: tensor.view(-1) if tensor.dim() == 0 else tensor for name, tensor in held.items()}, file)
    found, twin = (load_model(str(tmp_path / name), torch.float32, "cpu").model for name in ("quantised", "dense"))
    assert torch.equal(logits_of(found, [1, 2, 3]), logits_of(twin, [1, 2, 3]))


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"blocksize": 128}, "blocks of 128 and 256 numbers, only"), ({"shape": None}, "is not its JSON")],
)
def test_a_state_of_bitsandbytes_that_is_not_understood_is_refused(tmp_path, changes, what):
    config = BNB | {"llm_int8_skip_modules": ["o_proj", "down_proj", "lm_head"]}
    with pytest.raises(ModelError, match=what):
        write(tmp_path, config, states(HIDDEN, **changes))
