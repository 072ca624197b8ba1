"""Rules: compiled pieces compute what the eager model does, for any number of tokens, without being compiled again;
what is in the cache is loaded without a compiler; a damaged library is never loaded."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest
import torch
from naive_attention import hidden_of

from minivllm import LLM, SamplingParams
from minivllm.compile.forms import form_for
from minivllm.compile.program import Bound
from minivllm.compile.store import Store, environment, program_key
from minivllm.compile.trace import skeleton
from minivllm.loading import load_model
from minivllm.loading.cache import Cache
from minivllm.runner import compile_job, forward_piecewise
from minivllm.runner.compile_job import Build, job_for
from minivllm.runner.forward import ForwardOptions

CPU = torch.device("cpu")
LIBRARY = form_for(CPU)
HERE = environment(LIBRARY, CPU, 1)
TINY = {"model.dtype": "float32", "kv.num_blocks": 60, "executor.num_threads": 1}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = [[5, 6, 7], [9] * 40, list(range(3, 120))]


def generate(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def tiny_llm(**overrides) -> LLM:
    return LLM("dummy:tiny", overrides={**TINY, **overrides})


@pytest.fixture(scope="module")
def wanted():
    with tiny_llm() as llm:
        return generate(llm)


def how(llm: LLM) -> tuple[str, str]:
    return next((d.value, d.reason) for d in llm.decisions if d.field == "runner.forward")


def test_every_number_of_tokens_computes_what_the_eager_model_does(tiny, bound):
    for num_tokens in range(1, 131):
        got, expected = hidden_of(tiny, bound, num_tokens), hidden_of(tiny, tiny, num_tokens)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("mode", ["off", "wait", "background"])
@pytest.mark.parametrize("graphs", ["none", "piecewise"])
def test_greedy_tokens_are_those_of_the_eager_model(mode, graphs, compiled, wanted):
    with tiny_llm(**{"runner.forward": "piecewise", "runner.compile": mode, "runner.graphs": graphs}) as llm:
        assert how(llm)[0] == "piecewise"
        assert generate(llm) == wanted


@pytest.mark.parametrize("quantization, dense_copy", [("int8", True), ("int4", True), ("int4", False)])
@pytest.mark.parametrize("mode", ["off", "wait"])
def test_pieces_around_packed_weights_give_the_eager_models_tokens(mode, quantization, dense_copy):
    packed = {"model.quantization": quantization, "model.dense_copy": dense_copy}
    with tiny_llm(**packed, **{"runner.forward": "eager"}) as llm:
        wanted = generate(llm)
    with tiny_llm(
        **packed, **{"runner.forward": "piecewise", "runner.compile": mode, "runner.graphs": "piecewise"}
    ) as llm:
        assert how(llm)[0] == "piecewise"
        assert generate(llm) == wanted


def test_a_program_does_not_depend_on_where_packed_weights_lie():
    models = [load_model("dummy:tiny", torch.bfloat16, torch.device("cpu"), quantization="int8").model for _ in "ab"]
    for model in models:
        model.layers[0].mlp.down.method.limit.tokens = 16  # measured
    keys = {program_key(model, HERE) for model in models}
    assert len(keys) == 1 and skeleton(models[0])
    assert program_key(load_model("dummy:tiny", torch.bfloat16, "cpu", quantization="none").model, HERE) not in keys


def test_the_keyword_chooses_the_forward():
    with LLM("dummy:tiny", compile="off", overrides=TINY) as llm:
        assert llm.config.runner.forward == "auto"


SECOND_PROCESS = """
import sys
from minivllm import LLM, SamplingParams
llm = LLM("dummy:tiny", compile="wait", overrides={overrides})
assert "found in the cache" in str(llm.decisions), llm.decisions
assert not any(name.startswith("torch._inductor") for name in sys.modules), "Inductor was imported"
outputs = llm.generate({prompts}, SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
print([list(output.outputs[0].token_ids) for output in outputs])
"""


def test_a_second_process_needs_no_compiler(compiled, wanted, tmp_path):
    code = SECOND_PROCESS.format(overrides=TINY, prompts=PROMPTS)
    env = os.environ | {"PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(wanted)


@pytest.fixture
def own_cache(tiny, compiled, tmp_path, monkeypatch):
    """An engine cache of this test's own, holding the pieces and the program of dummy:tiny."""
    key = program_key(tiny, HERE)
    root = tmp_path / "compiled"
    for name in [
        f"program-{key}",
        *(f"piece-{piece}" for piece in Store(Cache(compiled), LIBRARY).program(key).pieces),
    ]:
        shutil.copytree(compiled / name, root / name)
    monkeypatch.setattr("minivllm.engine.build.worker.default_cache_dir", lambda: tmp_path)
    return root


def test_a_damaged_library_is_not_loaded_but_built_again(own_cache, compiled):
    entry = next(own_cache.glob("piece-*"))
    digest = entry.name.removeprefix("piece-")
    store = Store(Cache(own_cache), LIBRARY)
    assert store.piece(digest) is not None
    with open(entry / LIBRARY.file, "r+b") as file:
        file.seek(1000)
        file.write(b"damaged")
    assert store.piece(digest) is None

    def build(folder):
        shutil.copy(compiled / entry.name / LIBRARY.file, folder)

    assert store.ensure_piece(digest, build) and store.piece(digest) is not None
    assert not store.ensure_piece(digest, build), "it was sound"
    assert [p.name for p in own_cache.iterdir() if p.name.endswith(".tmp")] == []


@pytest.mark.parametrize("graphs", ["none", "piecewise"])
def test_the_pieces_are_swapped_in_between_two_steps(graphs, own_cache, wanted, caplog, monkeypatch):
    """The builder finds the pieces and has the program to make: it traces, which takes some seconds."""
    monkeypatch.setattr(forward_piecewise, "BACKGROUND_NICE", 0)  # other tests may leave it no time at all
    shutil.rmtree(next(own_cache.glob("program-*")))
    caplog.set_level(logging.INFO, "minivllm")
    with tiny_llm(**{"runner.forward": "piecewise", "runner.compile": "background", "runner.graphs": graphs}) as llm:
        assert how(llm)[0] == "eager" and "being built in the background and will be swapped in" in how(llm)[1]
        forward = llm._core.executor.worker.runner.forward
        end = time.monotonic() + 200
        while not isinstance(forward._forward, Bound) and time.monotonic() < end:
            assert generate(llm) == wanted
        assert isinstance(forward._forward, Bound), caplog.text
        assert generate(llm) == wanted
    assert "found in the cache" in caplog.text and "from this step on the model runs as compiled pieces" in caplog.text


def test_without_a_compiler_the_model_stays_eager_and_says_why(wanted, tmp_path, monkeypatch):
    monkeypatch.setattr("minivllm.engine.build.worker.default_cache_dir", lambda: tmp_path)
    monkeypatch.setattr("minivllm.compile.library.shutil.which", lambda name: None)
    for mode in ("wait", "background"):
        with tiny_llm(**{"runner.forward": "piecewise", "runner.compile": mode}) as llm:
            assert how(llm)[0] == "eager" and "C++ compiler" in how(llm)[1]
            assert generate(llm) == wanted


@pytest.mark.parametrize("mode", ["wait", "background"])
def test_a_builder_that_fails_leaves_the_model_eager(mode, wanted, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("minivllm.engine.build.worker.default_cache_dir", lambda: tmp_path)
    monkeypatch.setattr(compile_job, "skeleton", lambda model: b"no pickle")
    monkeypatch.setattr(forward_piecewise, "BACKGROUND_NICE", 0)
    with tiny_llm(**{"runner.forward": "piecewise", "runner.compile": mode}) as llm:
        end = time.monotonic() + 100
        while "the model stays eager" not in caplog.text and time.monotonic() < end:
            time.sleep(0.1)
        assert "the builder ended with exit code 1" in caplog.text and "Unpickling" in caplog.text
        assert generate(llm) == wanted


@pytest.mark.parametrize("mode", ["wait", "background"])
def test_a_model_that_cannot_be_sent_to_a_builder_stays_eager(mode, tiny, tmp_path):
    tiny.norm.not_data = lambda: None
    try:
        options = ForwardOptions(mode, max_tokens=64, num_threads=1, cache=tmp_path)
        decision = forward_piecewise.PiecewiseForward(tiny, torch.device("cpu"), options).decision
    finally:
        del tiny.norm.not_data
    assert decision[0] == "eager" and "cannot be sent" in decision[1] and "lambda" in decision[1]


def test_the_builder_ends_with_its_engine_and_leaves_no_file(tmp_path, short_folder, tiny, monkeypatch):
    files = short_folder
    monkeypatch.setattr(tempfile, "tempdir", str(files))
    build = Build(job_for(tiny, LIBRARY, CPU, tmp_path, num_threads=1, nice=19))
    process = build._process
    process.stdin.close()  # as the kernel does when the engine is killed
    assert process.wait(60) == 1
    assert list(files.iterdir()) == []
    build = Build(job_for(tiny, LIBRARY, CPU, tmp_path, num_threads=1, nice=19))
    process = build._process
    assert list(files.iterdir())
    del build
    assert process.wait(60) < 0
    assert list(files.iterdir()) == []


def test_a_builder_that_hangs_is_ended(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(compile_job, "SILENT_SECONDS", 0.5)
    build = Build(job_for(tiny, LIBRARY, CPU, tmp_path, num_threads=1, nice=0))
    build._process.send_signal(signal.SIGSTOP)
    assert build.wait() == "the builder has said nothing for 0.5 s, and was ended"


# ---------------------------------------------------------------- the real model


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_greedy_tokens_of_the_default_model_in_fp32_are_those_of_eager():
    if (why := LIBRARY.unsupported_reason(CPU)) is not None:
        pytest.skip(why)
    prompts = ["The history of the printing press begins in", "def fibonacci(n):\n    ", "1, 1, 2, 3, 5, 8, 13,"]
    tokens = {}
    for mode in ("off", "wait"):
        options = {"kv.num_blocks": 60, "executor.num_threads": 1}
        with LLM(compile=mode, dtype="float32", overrides=options) as llm:
            assert mode == "off" or how(llm)[0] == "piecewise"
            outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
            tokens[mode] = [list(output.outputs[0].token_ids) for output in outputs]
    assert tokens["wait"] == tokens["off"]
