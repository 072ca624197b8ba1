"""Rule: which form of a weight is used may depend on the number of tokens, and then it is exactly that form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Type
from loading.gguf_fixture import write_gguf
from tolerances import rounded_inputs

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError
from minivllm.kernels.cpu import blocks as kernels
from minivllm.kernels.cpu import dense
from minivllm.kernels.cpu.blocks import Blocks
from minivllm.layers.embedding import Embedding, LMHead, TiedLMHead
from minivllm.layers.linear import Linear, Unquantized, choose_method
from minivllm.loading import load_model
from minivllm.quantization import Packed, crossover, dequantise, quantise
from minivllm.quantization.formats import to_blocks
from minivllm.quantization.gguf import GGUFFormat, InBlocks
from minivllm.quantization.packed import NEVER, TRITON, AsStored, KeptPacked, Limit, QuantisedAtLoad
from minivllm.quantization.select import Choice, choose, install, linear_layers, refuse_activation_bits, rounding

needs_kernels = pytest.mark.skipif(kernels.unsupported_reason() is not None, reason=str(kernels.unsupported_reason()))
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def method_of(kind, bits, *how):
    if kind is not AsStored:
        return QuantisedAtLoad(bits, *how)
    scheme = InBlocks({4: "Q4_1", 8: "Q8_0"}[bits])
    return AsStored({"q": scheme, "k": scheme}, Unquantized(), KeptPacked(*how))


def layer_of(method, dtype=torch.bfloat16, bias=True, bits=4) -> Linear:
    """bits: of the blocks that a method keeps."""
    torch.manual_seed(0)
    layer = Linear(64, {"q": 32, "k": 16}, bias=bias, dtype=dtype, method=method)
    weight = torch.randn(48, 64).to(dtype)
    if isinstance(method, AsStored):
        for part, rows in layer.rows.items():
            layer.held[part]["weight"] = to_blocks(quantise(weight[rows], bits)).rows
    else:
        layer.weight.data.copy_(weight)
    if bias:
        layer.bias.data.normal_()
    return layer


@needs_kernels
@pytest.mark.parametrize("kind", [QuantisedAtLoad, AsStored])
@pytest.mark.parametrize("bits", [4, 8])
def test_dual_is_its_two_parts_on_both_sides_of_the_limit(bits, kind):
    dense = choose_method(CPU, torch.bfloat16).method
    dual = layer_of(method_of(kind, bits, dense, limit := Limit(5)), bits=bits)
    packed = layer_of(method_of(kind, bits), bits=bits)
    dual.finish(), packed.finish()
    rounded = layer_of(dense)
    rounded.weight.data.copy_(dequantise(quantise(layer_of(Unquantized()).weight.data, bits)))
    rounded.finish()
    for tokens in (1, 4, 5, 6, 32):
        x = torch.randn(tokens, 64).bfloat16()
        assert torch.equal(dual(x), (rounded if tokens >= limit.tokens else packed)(x)), tokens
    x = torch.randn(5, 64).bfloat16()
    assert not torch.equal(rounded(x), packed(x)), "the two cannot be told apart, so the lines above show nothing"


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_that_are_kept_are_those_that_were_loaded(dtype):
    for bits in (4, 8):
        kept, made = layer_of(method_of(AsStored, bits), dtype, bits=bits), layer_of(QuantisedAtLoad(bits), dtype)
        kept.finish(), made.finish()
        x = torch.randn(3, 64).to(dtype)
        assert torch.equal(kept(x), made(x))
        assert kept.weight is None and kept.held is None and made.weight is None  # one copy is kept


@needs_kernels
def test_the_head_gives_the_fp32_sums():
    """In bf16 a vocabulary's logits are full of ties."""
    torch.manual_seed(0)
    embedding = Embedding(96, 64, torch.bfloat16)
    embedding.weight.data.normal_()
    method = QuantisedAtLoad(8)
    head = LMHead(64, 96, dtype=torch.bfloat16, method=method)
    head.weight.data.copy_(embedding.weight)
    tied = TiedLMHead(embedding, method)
    head.finish(), tied.finish()
    hidden = torch.randn(2, 64).bfloat16()
    expected = hidden.float() @ dequantise(quantise(embedding.weight.data, 8)).T
    for logits in (head(hidden), tied(hidden)):
        torch.testing.assert_close(logits, expected, rtol=0, atol=64 * 4 * 3 * 0.5 / 16256)  # see test_packed_matrix
        assert not torch.equal(logits, logits.bfloat16().float())
    assert torch.equal(embedding(torch.tensor([3])), embedding.weight[[3]])  # look-ups are of the dense rows


@needs_kernels
def test_the_crossover_is_a_count_that_was_tried():
    layer = layer_of(QuantisedAtLoad(4, choose_method(CPU, torch.bfloat16).method, limit := Limit()))
    layer.finish()
    x = torch.randn(max(crossover.TOKENS), layer.matrix.n_in).bfloat16()
    assert "measured" in crossover.settle(limit, crossover.run_layer(layer, x), max_seconds=60)
    assert limit.tokens in (*crossover.TOKENS, NEVER)


def test_settling_runs_both_forms_and_leaves_the_faster_ones_limit(monkeypatch):
    clock, forms, limit = [0.0], set(), Limit()
    monkeypatch.setattr(crossover.time, "perf_counter", lambda: clock[0])

    def run(tokens):
        is_dense = tokens >= limit.tokens
        forms.add(is_dense)
        clock[0] += 1e-3 * (20 if is_dense else tokens)

    assert "from 24 tokens on" in crossover.settle(limit, run, max_seconds=60)
    assert limit.tokens == 24 and forms == {True, False}


@pytest.mark.parametrize(("num_races", "expected"), [(0, 16), (3, 16), (4, 32), (8, 32), (15, 32), (18, NEVER)])
def test_when_its_time_is_over_nothing_is_concluded_from_one_look(monkeypatch, num_races, expected):
    """The packed form always wins; a race takes a second."""
    clock = [0.0]
    monkeypatch.setattr(crossover.time, "perf_counter", lambda: clock[0])

    def race(tokens):
        clock[0] += 1
        return [[1.0], [2.0]]

    assert crossover.measure(race, max_seconds=num_races - 0.5).tokens == expected


def test_a_disturbed_moment_does_not_move_the_crossover():
    """Each race is disturbed somewhere: one part takes ten times as long, in one form, at random."""
    rng = np.random.default_rng(0)

    def race(tokens):
        seconds = np.array([[0.1 * tokens] * 20, [2.35] * 20])  # they cross at 23.5
        seconds[rng.integers(2), rng.integers(20, size=4)] *= 10
        return seconds

    assert [crossover.measure(race, max_seconds=60).tokens for _ in range(50)] == [24] * 50


def test_a_count_takes_no_longer_than_a_larger_one():
    """The packed form at 12 tokens was disturbed in every round."""
    packed = {12: 9.0, 24: 1.4, 32: 1.45, 48: 2.0, 64: 3.0, 96: 4.0, 128: 5.0}
    assert crossover.measure(lambda tokens: [[packed[tokens]], [1.5]]).tokens == 48


@pytest.mark.parametrize(("dense_from", "expected"), [(2, 4), (8, 8), (16, 24), (32, 32), (128, 128), (10_000, NEVER)])
def test_the_crossover_is_where_the_faster_one_changes(dense_from, expected):
    assert crossover.measure(lambda n: [[2.0], [1.0]] if n >= dense_from else [[1.0], [2.0]]).tokens == expected


@pytest.mark.parametrize("asked", ["int4", "int8"])
@pytest.mark.parametrize(
    ("device", "dtype", "why"), [(CUDA, torch.bfloat16, "on a CPU only"), (CPU, torch.float16, "not in float16")]
)
def test_what_cannot_be_is_refused_with_what_to_do(asked, device, dtype, why):
    with pytest.raises(ConfigError, match=f"model.quantization={asked}: .*{why}.*Use model.quantization=none"):
        choose(asked, device, dtype, is_packed=True)
    assert choose("auto", device, dtype, is_packed=True).kind == "none"


def test_without_a_compiler_auto_is_dense_and_the_rest_is_refused(monkeypatch):
    monkeypatch.setattr(kernels, "unsupported_reason", lambda: "no C++ compiler")
    assert choose("auto", CPU, torch.bfloat16, True).kind == "none"
    assert "no C++ compiler" in choose("auto", CPU, torch.bfloat16, True).reason
    with pytest.raises(ConfigError, match="no C\\+\\+ compiler"):
        choose("int4", CPU, torch.bfloat16, False)


@needs_kernels
def test_fp32_is_exact_unless_asked_otherwise():
    assert choose("auto", CPU, torch.float32, is_packed=True, dtype_asked=True).kind == "none"
    assert choose("auto", CPU, torch.float32, is_packed=True, dtype_asked=False).kind == "kept"
    assert choose("auto", CPU, torch.bfloat16, is_packed=True).kind == "kept"
    assert choose("auto", CPU, torch.bfloat16, is_packed=False).kind == "none"
    assert choose("int8", CPU, torch.float32, is_packed=False).kind == "int8"
    assert choose("none", CPU, torch.bfloat16, is_packed=True).kind == "none"


@needs_kernels
@pytest.mark.parametrize("bits", [8, 16])
def test_bits_of_inputs_that_are_asked_for_are_those_of_the_products(bits):
    for dtype, asked, is_packed, kind in (
        (torch.bfloat16, "auto", True, "kept"),
        (torch.float32, "auto", True, "kept"),  # though named, as exact products are: bits were named too
        (torch.float32, "int8", False, "int8"),
        (torch.bfloat16, "int4", True, "int4"),
    ):
        choice = choose(asked, CPU, dtype, is_packed, activation_bits=bits)
        assert (choice.kind, choice.kernel.activation_bits) == (kind, bits)
        assert rounding(bits, choice) == (bits, "as asked: inputs of packed weights, a scale for 32 of them")


@needs_kernels
def test_bits_of_inputs_are_16_or_none_unless_asked_for():
    kept = choose("auto", CPU, torch.float32, is_packed=True, dtype_asked=False)
    assert rounding("auto", kept) == (
        16,
        "auto: no answer changes; 8 are faster in batches and prompts, and change some",
    )
    assert rounding("auto", choose("int8", CPU, torch.float32, is_packed=False, dtype_asked=True)) is None


@needs_kernels
@pytest.mark.parametrize(
    ("asked", "device", "dtype", "is_packed", "why"),
    [
        ("auto", CPU, torch.bfloat16, False, "the checkpoint's weights are not in 4 or 8 bits"),
        ("none", CPU, torch.bfloat16, True, "model.quantization=none"),
        ("auto", CPU, torch.float16, True, "de-quantised: .* not in float16"),
        ("auto", CUDA, torch.bfloat16, True, "de-quantised: .* on a CPU only"),
    ],
)
def test_bits_of_inputs_without_packed_weights_are_refused(asked, device, dtype, is_packed, why):
    with pytest.raises(ConfigError, match=f"quantization.activation_bits=8 is of packed weights on a CPU.*: .*{why}"):
        choose(asked, device, dtype, is_packed, activation_bits=8)


def test_bits_of_inputs_are_refused_where_a_gpus_kernel_multiplies():
    with pytest.raises(ConfigError, match="a GPU's kernel rounds no input"):
        refuse_activation_bits(16, Choice("int4", "", TRITON))


@needs_kernels
def test_a_model_whose_every_layer_is_dense_refuses_bits_of_inputs(tmp_path):
    """The file is a GGUF, of which nothing has blocks."""
    write_gguf(tmp_path / "m.gguf", kind=Type.F16, decode=False)
    with pytest.raises(ConfigError, match="no weight of this model is multiplied in 4 or 8 bits"):
        load_model(str(tmp_path / "m.gguf"), torch.bfloat16, "cpu", tmp_path / "cache", activation_bits=8)


@needs_kernels
def test_an_option_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="quantization.*int8, int4"):
        LLM("dummy:tiny", quantization="int3")


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("asked", "bits"), [("int4", 4), ("int8", 8)])
def test_a_model_quantised_at_load_is_the_model_with_rounded_weights(asked, bits, dtype):
    """Logits against those of a dense fp32 model whose weights are what the codes mean."""
    from naive_attention import logits_of

    plain = load_model("dummy:tiny", dtype, "cpu", quantization="none")
    packed = load_model("dummy:tiny", dtype, "cpu", quantization=asked, dense_copy=False)
    ids = list(range(20))
    found, expected = logits_of(packed.model, ids), logits_of(dense_fp32(dtype, bits), ids)
    if dtype is torch.float32:
        assert (found - expected).pow(2).mean().sqrt() <= rounded_inputs(4 * 4 + 1) * expected.pow(2).mean().sqrt()
    else:
        noise = (logits_of(plain.model, ids) - logits_of(dense_fp32(dtype, None), ids)).pow(2).mean().sqrt()
        assert (found - expected).pow(2).mean().sqrt() <= 1.5 * noise  # what bf16 activations cost without any packing
    assert packed.quantization[0] == asked and plain.quantization[0] == "none"


def dense_fp32(dtype, bits):
    """The tiny model of `dtype` in fp32, the weights of its linear layers rounded to `bits` bits, or as they are."""
    from minivllm.loading.dummy import dummy_spec
    from minivllm.loading.dummy_weights import fill
    from minivllm.models import MODELS

    spec = dummy_spec("tiny")
    source = MODELS.get(spec.architecture)(spec, dtype, CPU).eval()
    fill(source, 0)
    model = MODELS.get(spec.architecture)(spec, torch.float32, CPU).eval()
    with torch.no_grad():
        for (_, to), (_, value) in zip(model.named_parameters(), source.named_parameters(), strict=True):
            to.copy_(value)
        for layer, names in linear_layers(model):
            if bits:
                rounded = dequantise(quantise(layer.weight.to(dtype), 8 if names == ["lm_head"] else bits))
                layer.weight = torch.nn.Parameter(rounded, requires_grad=False)  # the tied embedding is not rounded
    model.finish()
    return model


@needs_kernels
def test_a_layer_of_unequal_parts_stays_dense():
    from minivllm.loading.dummy import dummy_spec
    from minivllm.models import MODELS

    spec = dummy_spec("tiny")
    model = MODELS.get(spec.architecture)(spec, torch.bfloat16, CPU)
    rows = {"q": 128, "k": 64, "v": 64}
    stored = {
        f"model.layers.{i}.self_attn.{p}_proj": Blocks("Q4_1", torch.zeros(n, 40, dtype=torch.uint8))
        for i in (0, 1)
        for p, n in rows.items()
        if (i, p) != (0, "v")
    }
    stored["model.layers.0.self_attn.o_proj"] = Blocks("Q8_0", torch.zeros(64, 136, dtype=torch.uint8))
    stored["model.layers.1.self_attn.v_proj"] = Blocks("F16", torch.zeros(64, 128, dtype=torch.uint8))
    format = GGUFFormat({name: blocks.kind for name, blocks in stored.items()})
    done = install(model, "kept", format, dense_copy=True, reads_dense=True)
    assert done.layers == [model.layers[0].attention.o] and done.counts == {"Q8_0": 1}
    assert not isinstance(model.layers[0].attention.qkv.method, AsStored)  # v is missing
    assert done.left == {"not packed in the file": 4 * 7 + 1 - 1 - 3, "F16 in a layer of 3": 3}


@needs_kernels
@pytest.mark.parametrize("dense_copy", [True, False])
def test_the_engine_says_what_it_chose(dense_copy):
    with LLM("dummy:tiny", dtype="bfloat16", quantization="int4", overrides={"model.dense_copy": dense_copy}) as llm:
        chosen = {d.field: d for d in llm.decisions}
        assert chosen["model.quantization"].value == "int4"
        is_dual = dense_copy and dense.unsupported_reason() is None  # where the CPU multiplies bf16
        assert chosen["model.linear"].value == ("dual" if is_dual else "packed")
        assert ("MiB" in chosen["model.linear"].reason) == is_dual
        assert "16 in 4 bits and 1 in 8 bits" in chosen["model.linear"].reason
        assert chosen["quantization.activation_bits"].value == 16
        out = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        assert len(out[0].outputs[0].token_ids) == 4


@needs_kernels
def test_the_engine_says_to_how_many_bits_inputs_are_rounded():
    options = {"model.dtype": "float32", "model.quantization": "int8"}
    for more, expected in (({}, []), ({"quantization.activation_bits": 8}, [8])):
        with LLM("dummy:tiny", overrides=options | more) as llm:
            assert [d.value for d in llm.decisions if d.field == "quantization.activation_bits"] == expected


def test_the_oracle_is_the_formula():
    packed = Packed(
        torch.full((1, 16), 0x21, dtype=torch.uint8), torch.full((1, 1), 0.5).half(), torch.ones(1, 1).half()
    )
    expected = torch.cat((torch.full((16,), 1.5), torch.full((16,), 2.0)))[None]  # low halves first
    assert torch.equal(dequantise(packed), expected)
    assert torch.equal(F.linear(torch.ones(1, 32), dequantise(packed)), expected.sum().view(1, 1))
