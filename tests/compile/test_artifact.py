"""Rules of the form that GPUs get, on a CPU: what a builder made, another process loads, and computes with it what the
eager model does, for any number of tokens; a damaged file is never unpickled; one card's pieces are not another's."""

import gc
import os
import tempfile
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from eventually import eventually
from naive_attention import NaiveAttention, hidden_of
from toy_model import VOCAB, ToyModel

from minivllm.compile.context import ForwardContext, forward_context
from minivllm.compile.forms import FORMS, form_for
from minivllm.compile.graphs import Captures, RecordedCalls
from minivllm.compile.store import Store, environment
from minivllm.loading.cache import Cache
from minivllm.runner import forward_piecewise
from minivllm.runner.compile_job import gpu_bytes_beside, job_for
from minivllm.runner.forward import ForwardOptions
from minivllm.runner.forward_piecewise import PiecewiseForward

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ARTIFACT = FORMS["artifact"]
pytestmark = pytest.mark.skipif(
    FORMS["library"].unsupported_reason(CPU) is not None, reason="a CPU's artifact is built with g++"
)


@pytest.fixture(scope="module")
def toy():
    return ToyModel()


def options(cache) -> ForwardOptions:
    return ForwardOptions("wait", max_tokens=128, num_threads=1, cache=cache)


@pytest.fixture(scope="module")
def built(toy, tmp_path_factory):
    """The toy's forward with artifacts that a builder made, as an engine on a GPU has them made; and their cache."""
    cache, theirs = tmp_path_factory.mktemp("artifacts"), "/nowhere"
    load, loaded = PiecewiseForward._load, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_piecewise, "form_for", lambda device: ARTIFACT)
        patch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")  # else it is found out in each process, by compiling
        patch.setenv("TRITON_CACHE_DIR", theirs)
        patch.setattr(PiecewiseForward, "_load", lambda self, key: loaded.append(load(self, key)) or loaded[-1])
        key = job_for(toy, ARTIFACT, CPU, cache, 1, 0).key
        forward = PiecewiseForward(toy, CPU, options(cache))
        assert os.environ["TRITON_CACHE_DIR"] == theirs
    return SimpleNamespace(
        cache=cache, loaded=loaded[-1], key=key, forward=forward, store=Store(Cache(cache), ARTIFACT)
    )


def test_a_device_has_its_form():
    assert form_for(CPU).name == "library" and form_for(CUDA).name == "artifact"


def test_every_number_of_tokens_computes_what_the_eager_model_does(toy, built):
    how, reason = built.forward.decision
    assert how == "piecewise" and "2 pieces, 2 different, compiled to Inductor's artifacts in" in reason, reason
    for num_tokens in range(1, 129):
        got, expected = hidden_of(toy, built.forward._forward, num_tokens), hidden_of(toy, toy, num_tokens)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_what_is_captured_of_them_can_be_replayed(toy, built, monkeypatch):
    """Their results lie where the next capture reads them, for steps in any order and with other tokens."""
    monkeypatch.setattr(PiecewiseForward, "_load", lambda self, key: built.loaded)
    shapes = Captures((8, 4, 2, 1), RecordedCalls())
    forward = PiecewiseForward(toy, CPU, replace(options(built.cache), shapes=shapes))._forward
    context = ForwardContext(NaiveAttention(), None, [torch.empty(0)], toy.attention_layers)
    for size in (8, 4, 2, 1, 4, 8, 1, 2):
        x, positions = toy.embed(torch.randint(VOCAB, (size,))), torch.randperm(size)
        with torch.inference_mode(), forward_context(context):
            got, expected = forward(*shapes.inputs(x, positions)), toy(x, positions)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        if size == 1:
            shapes.seal()  # each size has been recorded


def test_a_second_start_finds_them(toy, built, monkeypatch):
    loaded = []
    monkeypatch.setattr(ARTIFACT, "load", lambda path: loaded.append(path) or len, raising=False)
    monkeypatch.setattr(forward_piecewise, "form_for", lambda device: ARTIFACT)
    monkeypatch.setattr(forward_piecewise, "Build", lambda job: pytest.fail("built again"))
    forward = PiecewiseForward(toy, CPU, options(built.cache))
    assert "compiled to Inductor's artifacts; found in the cache" in forward.decision[1] and len(loaded) == 2


def test_what_was_unpacked_goes_with_the_piece(built, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    piece = built.store.piece(built.store.program(built.key).pieces[-1])
    assert piece is not None and list(tmp_path.glob("minivllm-piece-*/*/*.py"))
    del piece
    gc.collect()
    assert list(tmp_path.glob("minivllm-piece-*")) == []


def test_a_damaged_artifact_is_not_loaded_but_built_again(built, monkeypatch):
    entry = next(built.cache.glob("piece-*"))
    path, digest = entry / ARTIFACT.file, entry.name.removeprefix("piece-")
    sound = path.read_bytes()
    path.write_bytes(sound[:1000] + b"damaged" + sound[1007:])
    monkeypatch.setattr(ARTIFACT, "load", lambda path: pytest.fail("it was loaded"), raising=False)
    assert built.store.piece(digest) is None

    def build(folder):
        (folder / ARTIFACT.file).write_bytes(sound)

    assert built.store.ensure_piece(digest, build), "it was built again"
    assert not built.store.ensure_piece(digest, build), "it is sound"


def test_nothing_is_loaded_while_warm_up_captures(toy, tmp_path, monkeypatch):
    """What a builder in the background has made: CUDA lets no thread load kernels while another one captures."""
    monkeypatch.setattr(forward_piecewise, "Build", lambda job: SimpleNamespace(wait=lambda: None, cancel=lambda: None))
    monkeypatch.setattr(PiecewiseForward, "_load", lambda self, key: loads.append(key))
    loads = []
    forward = PiecewiseForward(toy, CPU, replace(options(tmp_path), compile="background"))
    assert len(loads) == 1, "it was looked for in the cache"
    time.sleep(0.2)
    assert len(loads) == 1
    forward.key_for(1, 1, 1)
    eventually(lambda: len(loads) == 2)


def test_one_cards_pieces_are_not_anothers(toy, monkeypatch):
    card = {"name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "multi_processor_count": 132}
    others = ({}, {"name": "NVIDIA H200"}, {"major": 8}, {"multi_processor_count": 16})
    keys = []
    for change in (card | other for other in others):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, c=change: SimpleNamespace(**c))
        keys.append(job_for(toy, ARTIFACT, CUDA, None, 1, 0).key)
    assert len(set(keys)) == len(others)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**card))
    assert job_for(toy, ARTIFACT, CUDA, None, 1, 0).key == keys[0], "a second start finds what the first one made"
    assert environment(ARTIFACT, CUDA, 1) == environment(ARTIFACT, CUDA, 2), "the host's threads do not matter to it"


def test_without_what_triton_needs_there_is_a_reason(monkeypatch):
    monkeypatch.setattr("minivllm.compile.artifact.shutil.which", lambda name: None)
    assert "C compiler" in ARTIFACT.unsupported_reason(CUDA)
    monkeypatch.setattr("minivllm.compile.artifact.find_spec", lambda name: None)
    assert "triton is not installed" in ARTIFACT.unsupported_reason(CUDA)


def test_a_pool_leaves_room_for_a_builder_that_works_while_it_serves():
    room = {(c, d.type): gpu_bytes_beside(c, d) > 0 for c in ("off", "wait", "background") for d in (CPU, CUDA)}
    assert [key for key, there in room.items() if there] == [("background", "cuda")]
