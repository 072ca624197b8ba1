"""Rule: the fused forward computes what the model as written does, whichever of its two ways a step takes."""

import pytest
import torch
from naive_attention import hidden_of

from minivllm import LLM, SamplingParams
from minivllm.compile.context import ForwardContext
from minivllm.kernels.cpu import decoder as kernels
from minivllm.kernels.cpu import dense
from minivllm.kernels.cpu.decoder import Embedded
from minivllm.loading import load_model
from minivllm.runner.forward_fused import FusedModel, linears, unavailable

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(kernels.unsupported_reason() is not None, reason=str(kernels.unsupported_reason()))
TINY = {"model.path": "dummy:tiny", "kv.num_blocks": 60, "executor.num_threads": 1, "model.max_model_len": 128}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = [[5, 6, 7], [9] * 40, list(range(3, 60))]


def generate(prompts=PROMPTS, **overrides) -> tuple[list[list[int]], int]:
    """The tokens, and how many forwards took the whole stack in one call."""
    with LLM(overrides={**TINY, **overrides}) as llm:
        forward, calls = llm._core.executor.worker.runner.forward, []
        if isinstance(fused := getattr(getattr(forward, "_run", None), "__self__", None), FusedModel):
            decode = fused.kernels.decode
            fused.kernels.decode = lambda *args: calls.append(args) or decode(*args)
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs], len(calls)


@pytest.mark.parametrize(
    # Gemma's norms are twice as large, so that what one layer rounds grows in those behind it.
    ("name", "atol"),
    [("dummy:tiny", 2e-5), ("dummy:smollm2-135m", 2e-5), ("dummy:tiny-gemma3", 1e-4)],
)
@pytest.mark.parametrize("num_tokens", [1, 2, 17, 300])
def test_in_fp32_layer_by_layer_is_the_model(name, atol, num_tokens):
    model = load_model(name, torch.float32, CPU).model
    got, expected = hidden_of(model, FusedModel(model), num_tokens), hidden_of(model, model, num_tokens)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=atol)


MODELS = pytest.mark.parametrize("model", ["dummy:tiny", "dummy:tiny-gemma3"])


@MODELS
@pytest.mark.parametrize("whole", [True, False])
def test_tokens_looked_up_in_the_call_are_embeddings_made_before_it(whole, model, monkeypatch):
    """Bit for bit, in the whole stack and layer by layer."""
    if not whole:
        monkeypatch.setattr(FusedModel, "_one_form", lambda *_: None)

    def generate_as(run) -> tuple[list[list[int]], int]:
        monkeypatch.setattr(FusedModel, "of_tokens", run)
        return generate(**{"model.path": model, "model.dtype": "float32", "model.quantization": "int8"})

    direct, num_whole = generate_as(FusedModel.of_tokens)
    split = generate_as(lambda self, token_ids, positions: self(self.model.embed(token_ids), positions))
    assert split == (direct, num_whole) and (num_whole > 0) == whole


@MODELS
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_whole_stack_in_one_call_gives_the_same_tokens(quantization, threads, model):
    options = {
        "model.path": model,
        "model.dtype": "float32",
        "model.quantization": quantization,
        "executor.num_threads": threads,
    }
    expected, none = generate(**options, **{"runner.forward": "eager"})
    tokens, num_calls = generate(**options, **{"runner.forward": "fused"})
    assert tokens == expected and none == 0 < num_calls


@MODELS
def test_the_whole_stack_rounds_to_as_many_bits_as_the_layers_do(model):
    """Sums of another order make another integer of an input now and then: far less than 8 bits change."""

    def logprobs(forward, bits):
        options = {"model.path": model, "model.dtype": "float32", "model.quantization": "int8"}
        options |= {"runner.forward": forward, "quantization.activation_bits": bits}
        with LLM(overrides={**TINY, **options}) as llm:
            outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        read = [(output.prompt_token_ids[1:], output.prompt_logprobs[1:]) for output in outputs]
        return torch.tensor(
            [found[token].logprob for ids, rows in read for token, found in zip(ids, rows, strict=True)]
        )

    for bits, other in ((8, 16), (16, 8)):
        exact = logprobs("eager", bits)
        noise, rounding = ((found - exact).std() for found in (logprobs("fused", bits), logprobs("eager", other)))
        assert noise < rounding / 4


NO_TILES = pytest.mark.skipif(dense.unsupported_reason() is not None, reason=str(dense.unsupported_reason()))


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [pytest.param("bfloat16", "none", marks=NO_TILES), ("bfloat16", "int8"), ("float32", "int8")],
)
@MODELS
@pytest.mark.parametrize("threads", [1, 2])
def test_blocks_of_tokens_in_one_call_are_the_layers_one_by_one(threads, model, dtype, quantization, monkeypatch):
    """In bf16 too, token for token: whether a prompt goes through in blocks, product by product or call by call, a
    token's sums are taken in one order."""
    longer = [[i % 500 for i in range(700)], *PROMPTS]  # more than FEW for each thread, and three times TOGETHER
    options = {
        "model.path": model,
        "model.dtype": dtype,
        "model.quantization": quantization,
        "model.dense_copy": False,
        "model.max_model_len": 800,
        "kv.num_blocks": 200,
        "executor.num_threads": threads,
    }
    tokens, num_calls = generate(longer, **options)
    chunked, _ = generate(longer, **options, **{"scheduler.max_num_batched_tokens": 50})
    monkeypatch.setattr(FusedModel, "_one_form", lambda *_: None)
    assert generate(longer, **options) == (tokens, 0)
    assert chunked == tokens and num_calls > 0


def test_auto_is_fused_and_other_backends_take_the_other_way():
    options = {"model.dtype": "float32", "model.quantization": "int8", "runner.attention": "sdpa"}
    expected, _ = generate(**options, **{"runner.forward": "eager"})
    assert generate(**options) == (expected, 0)


def test_the_dense_copy_takes_over_at_its_limit(monkeypatch):
    """bf16, whose two forms of a weight differ: each step must be exactly the form that the layer would take."""
    model = load_model("dummy:tiny", torch.bfloat16, CPU, quantization="int8").model
    fused = FusedModel(model)
    model.layers[0].mlp.down.method.limit.tokens = 4
    context = ForwardContext(_CPU(), None, [], [])
    assert fused._one_form(context, 3) == "matrix"
    assert fused._one_form(context, 4) == ("tiles" if dense.unsupported_reason() is None else None)
    linears(model)[5].method = object()  # an adapter's
    assert fused._one_form(context, 3) is fused._one_form(context, 4) is None


def _CPU():
    from minivllm.attention.cpu import CPUAttention

    return CPUAttention.__new__(CPUAttention)


def test_what_cannot_be_fused_stays_eager_with_the_reason():
    with LLM(overrides={**TINY, "model.dtype": "float16", "runner.forward": "fused"}) as llm:
        how = next(d for d in llm.decisions if d.field == "runner.forward")
        assert how.value == "eager" and "not in float16" in how.reason
    assert "not for cuda" in unavailable(None, torch.device("cuda"))


def test_a_kind_of_layer_that_no_data_describes_is_named():
    moe = load_model("dummy:tiny-moe", torch.float32, CPU).model
    assert "3 of 4 layers have no gated MLP but experts or others (SparseMLP)" in unavailable(moe, CPU)
    model = load_model("dummy:tiny", torch.float32, CPU).model
    assert unavailable(model, CPU) is None
    model.layers[2].mlp_norm = torch.nn.LayerNorm(64)
    model.layers[3].attention = torch.nn.Identity()
    why = unavailable(model, CPU)
    assert "1 of 4 layers have a norm that is none" in why and "1 of 4 layers have attention of their own" in why
    model = load_model("dummy:tiny", torch.float32, CPU).model
    model.layers[1].attention.qk_norm = torch.nn.LayerNorm(32)
    model.layers[3] = torch.nn.Identity()
    why = unavailable(model, CPU)
    assert "1 of 4 layers have a norm of q and k of their own (LayerNorm)" in why
    assert "1 of 4 layers have an order of their own (Identity)" in why
    model = load_model("dummy:tiny", torch.float32, CPU).model
    model.layers[2].mlp.activation = "gelu_tanh"
    assert "differ in more than weights" in unavailable(model, CPU)
    assert "not for Linear" in unavailable(torch.nn.Linear(1, 1), CPU)


@MODELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_call_is_its_tensor_operations(dtype, model):
    """To one rounding of the result: the sum of squares and exp differ in their last bits alone."""
    model = load_model(model, dtype, CPU, quantization="none").model
    fused, t = FusedModel(model).kernels, 19
    shape, near = fused.shape, {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
    torch.manual_seed(0)
    x, delta = torch.randn(2, t, shape.hidden).to(dtype)
    ids, positions = torch.randint(0, 100, (2, t))
    y = torch.empty_like(x)
    for embedded in (Embedded(model.embedding.weight, ids), Embedded(model.embed(ids), None)):
        fused.embed(embedded, x.zero_(), y)
        assert torch.equal(x, model.embed(ids))
    torch.testing.assert_close(y, model.layers[0].attention_norm(x), **near)
    gate_up = (4 * torch.randn(t, 2 * shape.intermediate)).to(dtype)
    gate_up[0, :5] = torch.tensor([0.0, -200.0, 200.0, float("nan"), -0.0])
    gated = torch.empty(t, shape.intermediate, dtype=dtype)
    fused.gate(gate_up, gated)
    gate, up = gate_up.chunk(2, -1)
    torch.testing.assert_close(gated, model.layers[0].mlp.activate(gate) * up, equal_nan=True, **near)
    for i, (layer, of) in enumerate(zip(model.layers[:2], fused.described.layers, strict=False)):
        for post, name in ((of.attention_post_norm, "attention_post_norm"), (of.mlp_post_norm, "mlp_post_norm")):
            summed = x + (delta if post is None else getattr(layer, name)(delta))
            got = x.clone()
            fused.add_norm(delta, post, of.mlp_norm, got, y)
            assert torch.equal(got, summed) if post is None else torch.allclose(got, summed, **near)
            torch.testing.assert_close(y, layer.mlp_norm(got), **near)
        qkv = torch.randn(t, (shape.heads + 2 * shape.kv_heads) * shape.head_size).to(dtype)
        heads = qkv.clone().view(t, -1, shape.head_size)
        turned = shape.heads + shape.kv_heads
        expected = model.rotary_of(layer)(positions)(layer.attention.qk_norm(heads[:, :turned]))
        fused.rotate(i, positions, qkv)
        # A sum of two rounded products: each may round the other way, so the error is relative to the head's largest,
        # which is the larger the larger the norm's weights are.
        atol = 8 * near["rtol"] * float(layer.attention.qk_norm.multiplier.max())
        torch.testing.assert_close(qkv.view_as(heads)[:, :turned], expected, rtol=0, atol=atol)
        assert torch.equal(qkv.view_as(heads)[:, turned:], heads[:, turned:])
