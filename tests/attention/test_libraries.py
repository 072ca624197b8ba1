"""flash and flashinfer ask their libraries for what the dense float64 oracle computes, as far as stand-ins on a CPU can
tell (libraries.py)."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from types import ModuleType

import numpy as np
import pytest
import torch
from attention import libraries
from attention.batches import CPU, Case, spec
from attention.test_backends import MIXED
from tolerances import ATTENTION

from minivllm.attention import flash, flashinfer
from minivllm.attention.base import KVSpec
from minivllm.attention.flash import FlashAttention2, FlashAttention3, FlashBackend
from minivllm.attention.flashinfer import FlashInferBackend, csr_pages
from minivllm.attention.select import choose
from minivllm.errors import ConfigError
from minivllm.features import ATTENTION as REGISTRY

CUDA = torch.device("cuda")
BACKENDS = {  # and the block sizes that they take
    "flash 2": (partial(FlashBackend, library=FlashAttention2(libraries.FlashAttn2)), [256]),
    "flash 3": (partial(FlashBackend, library=FlashAttention3(libraries.FlashAttn3)), [1, 16]),
    "flashinfer": (partial(FlashInferBackend, library=libraries.FLASHINFER), [1, 16]),
}
CASES = [(name, block_size) for name, (_, sizes) in BACKENDS.items() for block_size in sizes]


@pytest.fixture(autouse=True)
def small_workspace(monkeypatch):
    monkeypatch.setattr(flashinfer, "WORKSPACE", 1024)


def right(name: str, *args, **options) -> None:
    case = Case(*args, **options)
    backend = BACKENDS[name][0]([case.spec], case.kv_spec, case.num_blocks + 1, CPU)
    out = case.run(backend)
    num_tokens = len(out) - case.padding
    torch.testing.assert_close(out[:num_tokens].double(), case.expected(), **ATTENTION[case.dtype])
    assert (out[num_tokens:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name, block_size", CASES)
def test_decodes_prefills_and_chunks_mix_in_one_batch(name, block_size, dtype):
    right(name, spec(head_size=64), MIXED, block_size, dtype, padding=3, spare_columns=5)


@pytest.mark.parametrize("options", [{"window": 1}, {"window": 17}, {"soft_cap": 2.0}, {"window": 24, "soft_cap": 0.5}])
@pytest.mark.parametrize("name, block_size", CASES)
def test_windows_and_soft_caps(name, block_size, options):
    right(name, spec(head_size=64, **options), MIXED, block_size, torch.float16)


@pytest.mark.parametrize("requests", [MIXED, [(40, 1), (16, 1)], [(0, 7), (3, 2)]], ids=str)
@pytest.mark.parametrize("name, block_size", CASES)
def test_columns_may_be_on_the_device(name, block_size, requests):
    right(name, spec(head_size=64), requests, block_size, torch.float16, padding=3, spare_columns=5, device=CPU)


@pytest.mark.parametrize("generation", [FlashAttention2(libraries.FlashAttn2), FlashAttention3(libraries.FlashAttn3)])
def test_nothing_is_waited_for_to_prepare_from_columns_on_the_device(generation, apart):
    case = Case(spec(head_size=64), MIXED, 256, torch.float16, padding=3, device=apart)
    backend = FlashBackend([case.spec], case.kv_spec, case.num_blocks + 1, apart, generation)
    assert backend.prepare(case.batch(case.now, 3)).others.tables.device == apart


@pytest.mark.parametrize("name, block_size", CASES)
def test_a_scale_of_its_own(name, block_size):
    right(name, replace(spec(head_size=64), scale=0.3), MIXED, block_size, torch.float16)


@pytest.mark.parametrize("requests", [[(0, 5)], [(40, 1)], [(3, 1), (300, 1)], [(0, 2), (31, 17)]], ids=str)
@pytest.mark.parametrize("name, block_size", CASES)
def test_steps_of_one_kind(name, block_size, requests):
    right(name, spec(7, 1, 64), requests, block_size, torch.float16)


@pytest.mark.parametrize("name, block_size", CASES)
def test_layers_of_different_windows_share_a_step(name, block_size):
    near, far = (Case(spec(head_size=64, window=w), MIXED, block_size, torch.float16) for w in (8, None))
    backend = BACKENDS[name][0]([far.spec, near.spec] * 2, far.kv_spec, far.num_blocks + 1, CPU)
    caches = [case.cache(backend) for case in (far, near)]
    meta = backend.prepare(far.batch(far.now))
    for case, kv in zip((far, near), caches, strict=True):
        q, k, v = torch.cat(case.inputs(case.now), 1).split([6, 2, 2], 1)  # views of one projection
        out = torch.empty(q.shape, dtype=q.dtype)
        backend.forward(q, k, v, kv, meta, case.spec, out)
        torch.testing.assert_close(out.double(), case.expected(), **ATTENTION[case.dtype])


def test_a_plan_that_a_later_step_replaced_is_not_run():
    case = Case(spec(head_size=64), MIXED, dtype=torch.float16)
    backend = BACKENDS["flashinfer"][0]([case.spec], case.kv_spec, case.num_blocks + 1, CPU)
    kv, meta = case.cache(backend), backend.prepare(case.batch(case.now))
    backend.prepare(case.batch(case.now))
    with pytest.raises(AssertionError, match="later step"):
        backend.forward(*case.inputs(case.now), kv, meta, case.spec, case.inputs(case.now)[0])


def test_pages_in_csr_form():
    tables = np.array([[7, 3, 0], [5, 0, 0], [1, 2, 9]], np.int32)
    indptr, indices, last = csr_pages(np.array([17, 16, 33]), tables, 16)
    assert indptr.tolist() == [0, 2, 3, 6] and indices.tolist() == [7, 3, 5, 1, 2, 9] and last.tolist() == [1, 16, 1]


@pytest.mark.parametrize("group, matrix", [(1, False), (3, False), (4, True), (5, True)])
def test_matrix_instructions_serve_decodes_of_many_query_heads(group, matrix):
    layer = spec(group, 1, 64)
    backend = BACKENDS["flashinfer"][0]([layer], KVSpec(1, 1, 64, 16, torch.float16), 4, CPU)
    assert backend.decode[layer].use_tensor_cores is matrix


@pytest.mark.parametrize(
    "name, change, what",
    [
        ("flash 2", {"block_size": 16}, "kv.block_size=256"),
        ("flash 2", {"dtype": torch.float32}, "model.dtype"),
        ("flash 3", {"head_size": 20}, "steps of 8"),
        ("flash 3", {"head_size": 264}, "up to 256"),
        ("flashinfer", {"head_size": 80}, "64, 128, 256"),
        ("flashinfer", {"dtype": torch.float32}, "model.dtype"),
    ],
)
def test_what_a_library_cannot_do_is_refused_with_what_to_change(name, change, what):
    sizes = {"head_size": 64, "block_size": 256, "dtype": torch.float16} | change
    with pytest.raises(ConfigError, match=what):
        BACKENDS[name][0]([spec(head_size=sizes["head_size"])], KVSpec(1, 2, **sizes), 4, CPU)


@pytest.mark.parametrize("name", ["flash", "flashinfer"])
def test_on_a_cpu_they_are_refused(name):
    with pytest.raises(ConfigError, match=f"attention={name} cannot run here: its kernels need a CUDA device"):
        choose(name, CPU, [spec()], REGISTRY)


@pytest.fixture
def a_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


@pytest.mark.parametrize("name, extra", [("flash", r"minivllm\[flash\]"), ("flashinfer", r"minivllm\[flashinfer\]")])
def test_a_missing_library_is_refused_with_the_extra_that_has_it(a_card, monkeypatch, name, extra):
    for module in (flash, flashinfer):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=extra):
        choose(name, CUDA, [spec()], REGISTRY)


@pytest.mark.parametrize("name", ["flash,triton", "triton,flash"])
def test_a_pair_names_the_extra_of_the_one_that_is_missing(a_card, monkeypatch, name):
    monkeypatch.setattr(flash, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"attention={name} cannot run here: .*minivllm\[flash\]"):
        choose(name, CUDA, [spec()], REGISTRY)


@pytest.mark.parametrize(
    "installed, capability, kind",
    [
        ({"flash_attn_interface", "flash_attn"}, (9, 0), FlashAttention3),
        ({"flash_attn_interface", "flash_attn"}, (8, 0), FlashAttention2),
        ({"flash_attn"}, (9, 0), FlashAttention2),
    ],
)
def test_the_generation_follows_from_the_card_and_from_what_is_installed(monkeypatch, installed, capability, kind):
    for name in installed:
        module = ModuleType(name)
        module.flash_attn_with_kvcache = None
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flash, "find_spec", lambda name: name in installed or None)
    assert type(flash.load_library(capability)) is kind


@pytest.mark.parametrize("generation, kind", [(2, FlashAttention2), (3, FlashAttention3)])
def test_a_generation_can_be_asked_for(monkeypatch, generation, kind):
    for name in ("flash_attn_interface", "flash_attn"):
        module = ModuleType(name)
        module.flash_attn_with_kvcache = None
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flash, "find_spec", lambda name: True)
    assert type(flash.load_library((9, 0), generation)) is kind
    with pytest.raises(ImportError, match="Hopper"):
        flash.load_library((8, 0), 3)


def test_a_package_of_flash_attention_4_alone_is_not_taken_for_2(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setattr(flash, "find_spec", lambda name: name == "flash_attn" or None)
    with pytest.raises(ImportError, match="minivllm"):
        flash.load_library((10, 0))
