"""Rules: a captured step computes what the eager one does, token for token; it is padded to a size that was captured in
warm-up, reads at the addresses of its capture, and padding reads no KV that was not written."""

import gc
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from lora.adapters import write_adapter
from naive_attention import NaiveAttention, hidden_of

from minivllm import LLM, SamplingParams
from minivllm.attention.base import KVSpec
from minivllm.attention.reference import ReferenceAttention
from minivllm.batch import BatchKey, InputSizes
from minivllm.compile import graphs
from minivllm.compile.context import ForwardContext, aside, forward_context
from minivllm.compile.graphs import Captures, CudaGraphs, RecordedCalls, borrowed, capture_sizes, copy_into
from minivllm.config import EngineConfig
from minivllm.lora.layer import LoRAMethod
from minivllm.runner.forward import EagerForward, ForwardOptions
from minivllm.runner.forward_graphs import FullForward, Setting, full, full_and_piecewise
from minivllm.runner.memory import size_pool
from minivllm.runner.profile_run import peak_of, profile_run
from minivllm.runner.runner import ModelRunner

CPU = torch.device("cpu")
TINY = {"model.path": "dummy:tiny", "model.dtype": "float32", "kv.num_blocks": 60, "executor.num_threads": 1}
SMALL = {"scheduler.max_num_seqs": 6, "runner.attention": "reference", "debug.check": True}
DRAFTS = {"spec_decode.method": "draft", "spec_decode.model": "dummy:tiny", "spec_decode.adaptive": False}
DRAFTS |= {"spec_decode.k": 3}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = [[5, 6, 7], [9] * 40, list(range(3, 120)), [8], [1, 2]]


def ids(num: int) -> torch.Tensor:
    return torch.arange(num)


# ---------------------------------------------------------------- the manager


def test_padding_is_at_most_a_third_and_the_largest_size_comes_first():
    assert capture_sizes(1) == (1,) and capture_sizes(12) == (12, 8, 6, 4, 3, 2, 1)
    assert capture_sizes(100)[:3] == (100, 96, 64)
    for most in (7, 100, 512):
        captures = Captures(capture_sizes(most), RecordedCalls())
        assert captures.sizes[0] == most and list(captures.sizes) == sorted(captures.sizes, reverse=True)
        for n in range(1, most + 1):
            assert n <= captures.fit(n) < n * 1.5 + 1
        assert captures.fit(most + 1) == most + 1  # not captured, not padded


def captured():
    captures = Captures(capture_sizes(4), RecordedCalls())
    piece = captures.wrap(lambda args: (args[0] * 2,))
    for size in captures.sizes:
        piece([captures.inputs(ids(size), ids(size))[0]])
    captures.seal()
    return captures, piece


def test_a_replay_reads_and_writes_where_its_capture_did():
    captures, piece = captured()
    first = piece([captures.inputs(torch.tensor([1, 2]), ids(2))[0]])[0]
    assert first.tolist() == [2, 4]
    second = piece([captures.inputs(torch.tensor([5, 6]), ids(2))[0]])[0]
    assert first is second and second.tolist() == [10, 12]


def test_an_argument_at_another_address_is_found():
    captures, piece = captured()
    token_ids, _ = captures.inputs(torch.tensor([1, 2]), ids(2))
    with pytest.raises(AssertionError, match="argument 0 has moved since size 2"):
        piece([token_ids.clone()])


def test_a_size_that_was_not_warmed_up_is_found():
    captures = Captures(capture_sizes(4), RecordedCalls())
    captures.seal()
    with pytest.raises(AssertionError, match="not warmed up"):
        captures.inputs(ids(3), ids(3))
    captures, _ = captured()
    with pytest.raises(AssertionError, match="not warmed up"):
        captures.wrap(lambda args: args)([captures.inputs(ids(3), ids(3))[0]])


def test_a_step_longer_than_all_sizes_is_called():
    captures, piece = captured()
    assert piece([captures.inputs(ids(9), ids(9))[0]])[0].tolist() == [2 * i for i in range(9)]


class Meta(NamedTuple):
    lens: torch.Tensor
    inner: tuple
    longest: int


def test_metadata_is_copied_to_where_it_was_captured_and_nothing_else_may_change():
    held = Meta(ids(3), (torch.zeros(2), None), 7)
    lens = held.lens
    copy_into(held, Meta(ids(3) + 5, (torch.ones(2), None), 7))
    assert lens.tolist() == [5, 6, 7] and held.inner[0].tolist() == [1, 1]
    with pytest.raises(AssertionError, match="7 was captured, not 8"):
        copy_into(held, held._replace(longest=8))
    with pytest.raises(AssertionError, match="was captured, not"):
        copy_into(held, held._replace(lens=ids(4)))


def test_of_a_table_the_columns_in_use_are_copied_alone():
    held = torch.tensor([[1, 2, 3], [4, 5, 6]])
    copy_into(held, torch.tensor([[7], [8]]))
    assert held.tolist() == [[7, 2, 3], [8, 5, 6]]
    for other in (torch.zeros(1, 1), torch.zeros(2, 4), torch.zeros(2)):
        with pytest.raises(AssertionError, match="was captured, not"):
            copy_into(held, other.long())


# ---------------------------------------------------------------- captures that break off at attention


@pytest.mark.parametrize("num_tokens", [1, 5, 8])
def test_a_capture_that_breaks_off_at_attention_computes_what_the_model_does(tiny, num_tokens):
    captures = Captures((8, 5, 1), RecordedCalls())
    forward = captures.wrap_forward(tiny)
    for _ in range(3):  # recorded, then replayed
        got = hidden_of(tiny, lambda *args: forward(*captures.inputs(*args)), num_tokens)
        assert torch.equal(got, hidden_of(tiny, tiny, num_tokens))


def test_attention_is_outside_of_the_capture(tiny):
    """It sees the tensors of the capture and the metadata of the step."""
    seen = []

    class Watched(NaiveAttention):
        def forward(self, q, k, v, kv, meta, layer, out):
            seen.append((meta, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()))
            super().forward(q, k, v, kv, meta, layer, out)

    captures = Captures((4,), RecordedCalls())
    forward, caches = captures.wrap_forward(tiny), [torch.empty(0)] * len(tiny.attention_layers)
    for step in range(3):
        with torch.inference_mode(), forward_context(ForwardContext(Watched(), step, caches, tiny.attention_layers)):
            forward(*captures.inputs(tiny.embed(ids(4) + step), ids(4)))
    num_layers = len(tiny.attention_layers)
    assert [meta for meta, *_ in seen] == [0] * num_layers + [1] * num_layers + [2] * num_layers
    addresses = [tuple(where) for _, *where in seen]
    assert addresses[:num_layers] == addresses[num_layers : 2 * num_layers] == addresses[2 * num_layers :]


def test_a_call_aside_that_comes_in_another_order_is_found():
    a, b = (lambda x: x.add_(1)), (lambda x: x.add_(2))

    def forward(token_ids, positions):
        for run in order:
            aside(run, token_ids)
        return token_ids

    order = [a, b]
    captures = Captures((2,), RecordedCalls())
    call = captures.wrap_forward(forward)
    context = ForwardContext(NaiveAttention(), None, [], [])
    with forward_context(context):
        assert call(*captures.inputs(torch.tensor([1, 2]), ids(2))).tolist() == [4, 5]
        assert call(*captures.inputs(torch.tensor([5, 6]), ids(2))).tolist() == [8, 9]
        order.reverse()
        with pytest.raises(AssertionError, match="another order"):
            call(*captures.inputs(torch.tensor([5, 6]), ids(2)))


def test_borrowed_memory_is_the_same_and_is_not_kept():
    owner = torch.arange(12.0).view(3, 4)
    there = borrowed(owner[:, 1:])
    owner[1, 2] = 50.0
    assert there.tolist() == [[1, 2, 3], [5, 50, 7], [9, 10, 11]]
    assert there.data_ptr() == owner.data_ptr() + 4 and there.stride() == (4, 1)
    of_owner = weakref.ref(owner.untyped_storage())
    del owner
    gc.collect()
    assert of_owner() is None


class FakeGraph:
    """Notes what is asked of it: no GPU is needed to see in which order."""

    log: list = []
    count = 0

    def __init__(self):
        FakeGraph.count += 1
        self.name = f"graph {FakeGraph.count}"

    def capture_begin(self, pool):
        self.log.append(f"begin {self.name} in {pool}")

    def capture_end(self):
        self.log.append(f"end {self.name}")

    def replay(self):
        self.log.append(f"replay {self.name}")


@pytest.fixture
def fake_cuda(monkeypatch):
    monkeypatch.setattr(FakeGraph, "log", [])
    monkeypatch.setattr(FakeGraph, "count", 0)
    monkeypatch.setattr(graphs, "borrowed", lambda tensor: tensor)  # no graph holds its memory here
    for name, fake in {
        "graph_pool_handle": lambda: "the pool",
        "Stream": lambda device: None,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda: None,
        "CUDAGraph": FakeGraph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return FakeGraph.log


def test_on_a_gpu_graphs_and_attentions_take_turns(tiny, fake_cuda):
    class Logged(NaiveAttention):
        def forward(self, q, k, v, kv, meta, layer, out):
            fake_cuda.append(f"attend {meta}")
            super().forward(q, k, v, kv, meta, layer, out)

    captures = Captures((4,), CudaGraphs(torch.device("cuda")))
    forward, num_layers = captures.wrap_forward(tiny), len(tiny.attention_layers)

    def step(meta):
        fake_cuda.clear()
        caches = [torch.empty(0)] * num_layers
        with torch.inference_mode(), forward_context(ForwardContext(Logged(), meta, caches, tiny.attention_layers)):
            forward(*captures.inputs(tiny.embed(ids(4)), ids(4)))
        return list(fake_cuda)

    def replayed(meta):
        pairs = [[f"replay graph {i}", f"attend {meta}"] for i in range(1, num_layers + 1)]
        return [*sum(pairs, []), f"replay graph {num_layers + 1}"]

    made = [[f"begin graph {i} in the pool", f"end graph {i}"] for i in range(1, num_layers + 2)]
    assert step(0) == ["attend 0"] * num_layers + sum(made, []) + replayed(0)  # warmed, captured, replayed
    assert step(1) == replayed(1) and step(2) == replayed(2)


def test_what_an_adapter_adds_is_between_two_graphs(tiny, fake_cuda, monkeypatch):
    """One layer has adapters: its product is in a graph, what is added to it in none, and comes before attention."""

    class Products:
        def add(self, y, x):
            fake_cuda.append(f"add to {len(y)} rows")
            y += 1

    layer = tiny.layers[1].attention.qkv
    monkeypatch.setattr(layer, "method", LoRAMethod(layer.method, Products()))
    captures, num_layers = Captures((4,), CudaGraphs(torch.device("cuda"))), len(tiny.attention_layers)
    forward = captures.wrap_forward(tiny)
    for _ in range(2):
        fake_cuda.clear()
        caches = [torch.empty(0)] * num_layers
        with (
            torch.inference_mode(),
            forward_context(ForwardContext(NaiveAttention(), 0, caches, tiny.attention_layers)),
        ):
            forward(*captures.inputs(tiny.embed(ids(4)), ids(4)))
    graphs = [f"replay graph {i}" for i in range(1, num_layers + 3)]
    assert fake_cuda == [*graphs[:2], "add to 4 rows", *graphs[2:]]


def test_memory_between_two_graphs_is_not_kept(tiny, fake_cuda, monkeypatch):
    """Else each layer's activations would have memory of their own, for each size."""
    passed = []

    def watched(tensor):
        passed.append(weakref.ref(tensor))
        return torch.zeros_like(tensor)

    monkeypatch.setattr(graphs, "borrowed", watched)
    hidden_of(
        tiny, lambda *args: (captures := Captures((4,), CudaGraphs(CPU))).wrap_forward(tiny)(*captures.inputs(*args)), 4
    )
    gc.collect()
    num_layers = len(tiny.attention_layers)
    assert len(passed) == 4 * num_layers + 1 and not any(tensor() is not None for tensor in passed)


def test_on_a_gpu_a_whole_forward_is_one_graph(fake_cuda):
    captures = Captures((2,), CudaGraphs(torch.device("cuda")))
    piece = captures.wrap(lambda args: (args[0] * 2,))
    for expected in (["begin graph 1 in the pool", "end graph 1", "replay graph 1"], ["replay graph 1"]):
        fake_cuda.clear()
        piece([captures.inputs(ids(2), ids(2))[0]])
        assert fake_cuda == expected


# ---------------------------------------------------------------- the engine


def generate(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def decided(llm: LLM, field: str) -> tuple[str, str]:
    return next((d.value, d.reason) for d in llm.decisions if d.field == field)


@pytest.fixture(scope="module")
def wanted():
    with LLM(overrides={**TINY, "runner.forward": "eager"}) as llm:
        return generate(llm)


@pytest.mark.parametrize("forward", ["auto", "piecewise"])
@pytest.mark.parametrize("mode", ["full", "piecewise", "full+piecewise"])
@pytest.mark.parametrize("overlap", [1, 2])
def test_greedy_tokens_are_those_of_the_eager_model(mode, forward, overlap, wanted, monkeypatch):
    recorded, replays = [], []

    class Counting(RecordedCalls):
        def record_around(self, run):
            recorded.append(run)
            found = super().record_around(run)
            return found._replace(replay=lambda: (replays.append(run), found.replay()))

    monkeypatch.setattr("minivllm.runner.forward_graphs.make_recorder", lambda device: Counting())
    options = {"runner.graphs": mode, "runner.forward": forward, "engine.overlap": overlap}
    with LLM(overrides={**TINY, **SMALL, **options}) as llm:
        value, reason = decided(llm, "runner.graphs")
        assert value == mode and "a CPU has no graphs" in reason
        num_recorded = len(recorded)
        assert generate(llm) == wanted
    assert len(recorded) == num_recorded and len(replays) >= PARAMS.max_tokens - 1


@pytest.fixture
def keys(monkeypatch):
    """Of all steps, those of the warm-up left out."""
    seen, prepare = [], ModelRunner._prepare

    def watched(runner, plan):
        batch = prepare(runner, plan)
        seen.append((BatchKey(batch.padded_tokens, batch.max_query if batch.whole else 0), batch.num_requests, plan))
        return batch

    monkeypatch.setattr(ModelRunner, "_prepare", watched)
    return seen


@pytest.mark.parametrize("block_size", [2, 16])  # fewer, and more, than the tokens of a request
@pytest.mark.parametrize("mode", ["full", "full+piecewise"])
def test_steps_with_a_full_number_of_drafts_are_whole(mode, block_size, wanted, keys):
    own = {**DRAFTS, "kv.block_size": block_size, "kv.num_blocks": 960 // block_size, "runner.graphs": mode}
    with LLM(overrides={**TINY, **SMALL, **own}) as llm:
        assert "with 3 drafts each in 5 sizes of up to 24" in decided(llm, "runner.graphs")[1]
        assert generate(llm) == wanted
    with_drafts = [(key, num_requests) for key, num_requests, plan in keys if plan.drafts and key.queries == 4]
    assert with_drafts and all(key.num_tokens >= 4 * num_requests for key, num_requests in with_drafts)
    assert any(key.num_tokens > 4 * num_requests for key, num_requests in with_drafts), "nothing was padded"


@pytest.mark.parametrize("forward", ["eager", "piecewise"])
@pytest.mark.parametrize("mode", ["full", "piecewise", "full+piecewise"])
def test_steps_with_adapters_give_the_eager_models_tokens_and_are_never_whole(mode, forward, keys, tmp_path):
    folders = {name: str(write_adapter(tmp_path / name, i, rank=8)) for i, name in enumerate("ab")}
    used, found = [None, "a", None, "b", "a"], []
    for options in ({}, {"runner.graphs": mode}):
        own = {"lora.enabled": True, "lora.adapters": folders, "runner.forward": forward, **options}
        keys.clear()
        with LLM(overrides={**TINY, **SMALL, **own}) as llm:
            outputs = llm.generate(PROMPTS, PARAMS, lora_request=used, use_tqdm=False)
            found.append([list(output.outputs[0].token_ids) for output in outputs] + generate(llm))
    assert found[0] == found[1] and found[0][:5] != found[0][5:]
    adapted = {join.req_id for _, _, plan in keys for join in plan.joins if join.adapter}
    decodes = [
        (key, adapted.isdisjoint(plan.num_tokens)) for key, _, plan in keys if set(plan.num_tokens.values()) == {1}
    ]
    assert {(key.whole, is_plain) for key, is_plain in decodes} == {("full" in mode, True), (False, False)}


@pytest.mark.parametrize("mode, value", [("full", "none"), ("full+piecewise", "piecewise")])
def test_attention_that_cannot_be_part_of_a_graph_is_left_out_with_the_reason(mode, value, wanted):
    with LLM(overrides={**TINY, **SMALL, "runner.attention": "sdpa", "runner.graphs": mode}) as llm:
        assert decided(llm, "runner.graphs")[0] == value
        assert "no whole forward can be captured: SDPAAttention" in decided(llm, "runner.graphs")[1]
        assert generate(llm) == wanted


def graphed(model, kind, spare_block: int = 40, num_drafts: int = 0):
    """(Graphed, the shape of its KV caches, its sizes), with no engine around."""
    sizes, layer = InputSizes(6, 64, 8, spare_block), model.attention_layers[0]
    spec = KVSpec(len(model.attention_layers), layer.num_kv_heads, layer.head_size, sizes.block_size, torch.float32)
    attention = ReferenceAttention(model.attention_layers, spec, spare_block + 1, CPU)
    options = ForwardOptions("off", max_tokens=64, num_threads=1, cache=Path())
    setting = Setting(EagerForward, model, CPU, options, attention, sizes, num_drafts)
    return kind(setting), attention.kv_shape(1), sizes


def test_which_steps_are_whole(tiny):
    forward = graphed(tiny, full)[0].forward
    assert isinstance(forward, FullForward)
    assert forward.key_for(3, 3, 1) == BatchKey(3, queries=1) and forward.key_for(5, 5, 1) == BatchKey(6, queries=1)
    assert forward.key_for(3, 5, 3) == BatchKey(5)  # a prompt among decodes: called, not padded
    both = graphed(tiny, full_and_piecewise)[0].forward
    assert both.key_for(5, 5, 1) == BatchKey(6, queries=1) and both.key_for(3, 5, 3) == BatchKey(6)
    assert both.key_for(2, 70, 69) == BatchKey(70)  # longer than the longest
    assert both.key_for(5, 5, 1, adapted=True) == BatchKey(6)
    drafting = graphed(tiny, full, num_drafts=3)[0].forward
    assert drafting.key_for(5, 20, 4) == BatchKey(24, queries=4) and drafting.key_for(5, 5, 1) == BatchKey(6, queries=1)
    assert drafting.key_for(5, 19, 4) == BatchKey(19) and drafting.key_for(5, 10, 2) == BatchKey(10)  # fewer drafts


def test_captures_are_made_largest_first_and_each_in_warm_up(tiny):
    forward, keys = graphed(tiny, full_and_piecewise)[0].forward, []
    forward.warmup(keys.append)
    assert [key.num_tokens for key in keys if not key.whole] == list(capture_sizes(64))
    assert [key.num_tokens for key in keys if key.whole] == [6, 4, 3, 2, 1]


@pytest.mark.parametrize("options", [{}, {**DRAFTS, "kv.block_size": 2, "kv.num_blocks": 480}], ids=["plain", "drafts"])
def test_padding_reads_no_kv_that_was_not_written(options, wanted, monkeypatch):
    """NaN wherever nothing was written: it would come out of any row that read it."""
    rows, run_model = [], ModelRunner.run_model

    def watched(runner, batch):
        hidden = run_model(runner, batch)
        rows.append((batch.num_tokens, batch.padded_tokens, bool(hidden.isfinite().all())))
        return hidden  # raising here would be a failed step, which the engine tries again

    with LLM(overrides={**TINY, **SMALL, "runner.graphs": "full+piecewise", **options}) as llm:
        for cache in llm._core.executor.worker.runner.kv_caches:
            cache.fill_(torch.nan)
        monkeypatch.setattr(ModelRunner, "run_model", watched)
        assert generate(llm) == wanted
    assert any(padded > num_tokens for num_tokens, padded, _ in rows) and all(finite for *_, finite in rows)


# ---------------------------------------------------------------- memory


def test_a_profile_run_is_the_warm_up_over_one_block(tiny, monkeypatch):
    recorded = []
    record = RecordedCalls.record_around
    monkeypatch.setattr(RecordedCalls, "record_around", lambda self, run: recorded.append(run) or record(self, run))
    made, kv_shape, sizes = graphed(tiny, full_and_piecewise, spare_block=0)
    profile_run(tiny, made, [torch.zeros(kv_shape) for _ in tiny.attention_layers], sizes, num_tokens=200)
    assert len(recorded) == len(capture_sizes(6)) + len(capture_sizes(64))


def test_forwards_are_left_their_memory_when_the_pool_is_sized(monkeypatch):
    monkeypatch.setattr("minivllm.runner.memory.free_memory", lambda device: 1000 << 20)
    config = EngineConfig.build("v1", {"kv.memory_fraction": 0.9})
    spec = KVSpec(2, 2, 16, 16, torch.float32)
    num_blocks = [size_pool(config, spec, CPU, 1 << 20, forwards << 20)[0] for forwards in (0, 50, 300)]
    assert num_blocks[0] == num_blocks[1] == (900 << 20) // spec.bytes_per_block
    assert num_blocks[2] == (700 << 20) // spec.bytes_per_block
    assert "forwards take 300.0 MiB" in size_pool(config, spec, CPU, 1 << 20, 300 << 20)[1].reason
    assert peak_of(lambda: 1 / 0, CPU) == 0


def test_the_recorder_of_a_device():
    assert isinstance(graphs.make_recorder(CPU), RecordedCalls)
