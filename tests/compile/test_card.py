"""Rules of what is built for a card, found out without one (tests/fake_card.py): every kernel compiles for it, in one
configuration; norm, gate and residual are fused; another process finds the binaries; a wrapper can be captured."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed: minivllm[gpu], Linux only"
)
SCRIPT = Path(__file__).parent.parent / "fake_card.py"
ELF = b"\x7fELF".hex()


def on_the_card(task: str, folder: Path) -> dict:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TORCHINDUCTOR_CACHE_DIR": str(folder / task)}
    for name in ("TRITON_INTERPRET", "TRITON_CACHE_DIR"):
        env.pop(name, None)
    command = [sys.executable, str(SCRIPT), task, str(folder / "cache")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("card")


@pytest.fixture(scope="module")
def built(folder):
    return on_the_card("build", folder)


def test_every_kernel_is_compiled_for_the_card_and_none_is_left_to_be_timed(built):
    names = {kernel["name"] for kernel in built["kernels"]}
    assert names and {kernel["configurations"] for kernel in built["kernels"]} == {1}
    assert built["binaries"] == dict.fromkeys(names, ELF)
    assert {(target["backend"], target["arch"]) for target in built["targets"]} == {("cuda", 90)}


def test_what_lies_between_two_products_is_one_kernel(built):
    """Three pieces. The first gathers the rotation; each other has: residual and norm, gate, then norm and rotation or
    residual and norm. Without a hint of the number of tokens nothing is fused, and there are 15."""
    counts = [len(set(re.findall(r"\b(triton_\w+)\.run\(", wrapper))) for wrapper in built["wrappers"]]
    assert sorted(counts)[:2] == [3, 3] and sorted(counts)[2] <= 5, counts


def test_a_wrapper_does_nothing_that_a_capture_forbids(built):
    for wrapper in built["wrappers"]:
        body = re.sub(r"#.*", "", wrapper.partition("def call(self, args):")[2].partition("return (")[0])
        made = set(re.findall(r"\b(empty_\w+|aten\.\w+|torch\.ops\.\w+)", body))
        assert made == {"empty_strided_cuda"}, "it allocates on the device and nowhere else, and calls no other library"
        assert not re.search(r"\.item\(|\.cpu\(|synchronize|\.copy_\(|assert_size_stride", body)


def test_another_process_finds_the_binaries(built, folder):
    found = on_the_card("load", folder)
    assert found["pieces"] == 3
    assert {kernel["name"] for kernel in found["kernels"]} == {kernel["name"] for kernel in built["kernels"]}
