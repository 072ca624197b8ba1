import pytest
import torch

from minivllm.compile.forms import form_for
from minivllm.compile.program import Bound
from minivllm.compile.store import Store, environment, program_key
from minivllm.compile.trace import tensors_of
from minivllm.loading import load_model
from minivllm.loading.cache import Cache, default_cache_dir
from minivllm.runner.forward import ForwardOptions
from minivllm.runner.forward_piecewise import PiecewiseForward

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def tiny():
    """dummy:tiny in fp32, eager."""
    return load_model("dummy:tiny", torch.float32, CPU).model


@pytest.fixture(scope="session")
def compiled(tiny):
    """The cache that the engine uses, with dummy:tiny's pieces for one thread in it: built at most once a machine."""
    if (why := form_for(CPU).unsupported_reason(CPU)) is not None:
        pytest.skip(why)
    cache = default_cache_dir() / "compiled"
    forward = PiecewiseForward(tiny, CPU, ForwardOptions("wait", max_tokens=64, num_threads=1, cache=cache))
    assert forward.decision[0] == "piecewise", forward.decision
    return cache


@pytest.fixture(scope="session")
def bound(tiny, compiled):
    """dummy:tiny as compiled pieces."""
    store = Store(Cache(compiled), form_for(CPU))
    program = store.program(program_key(tiny, environment(store.form, CPU, 1)))
    return Bound(program, store.pieces(program), tensors_of(tiny), dict(tiny.named_modules()))
