"""Which tests decide whether a change lands, which look deeper, and what each of these looks at.

`make test` runs the gate: every test that no area below names. `make test-all` runs the areas (tests/run_areas.py), and
`make test-all AREA=kernels` one of them. A test is in exactly one, since its area is the first that names it.
"""

from __future__ import annotations

from collections.abc import Iterable

GATE = "gate"

# An area's tests: folders, files and beginnings of tests' ids, from the repository's root.
AREAS: dict[str, tuple[str, ...]] = {
    "kernels": (
        "tests/kernels/test_interpreter.py",
        "tests/kernels/test_compiled.py",
        "tests/kernels/test_cpu_targets.py",
    ),
    "card": ("tests/card/", "tests/bench/test_gpu.py", "tests/bench/test_gpu_attention.py"),
    "conformance": ("tests/conformance/", "tests/lora/test_conformance.py", "tests/oracle/", "tests/fuzz/"),
    "chapters": ("tests/book/test_chapters.py", "tests/bench/"),
    "site": ("tests/book/test_site.py", "tests/book/test_widgets.py", "tests/serve/test_page_browser.py"),
    "fire": ("tests/fire/",),
    "attack": ("tests/attack/",),
    "clients": ("tests/clients/",),
    "compile": ("tests/compile/", "tests/models/test_moe.py::test_compiled_pieces"),
    "timing": (),  # what is marked `alone`, wherever it is
}
SANITIZE = "sanitize"  # C++ programs, not tests of pytest's: `make sanitize`
ALL = (*AREAS, SANITIZE)

# ---------------------------------------------------------------------------------------- what an area looks at

# What gives a batch its tokens, and what decides which tokens a batch has.
_FORWARD = (
    *(
        "kernels/",
        "minivllm/kernels",
        "minivllm/attention/",
        "minivllm/batch.py",
        "minivllm/compile/",
        "minivllm/kv_groups.py",
    ),
    *("minivllm/layers/", "minivllm/loading/", "minivllm/lora/", "minivllm/models/", "minivllm/parallel/"),
    *("minivllm/pooling/", "minivllm/quantization/", "minivllm/runner/", "minivllm/sampling/", "minivllm/spec_decode/"),
    *("minivllm/structured/", "minivllm/machine.py", "minivllm/files.py"),
)
_CONTROL = (
    *("minivllm/config.py", "minivllm/engine/", "minivllm/executor/", "minivllm/facts.py", "minivllm/features.py"),
    *("minivllm/kv/", "minivllm/plan.py", "minivllm/registry.py", "minivllm/request.py", "minivllm/scheduler/"),
    *("minivllm/errors.py", "minivllm/__init__.py", "minivllm/trace.py", "minivllm/waiting.py"),
)
_PROCESSES = (
    "minivllm/child.py",
    "minivllm/orphan.py",
    "minivllm/sandbox.py",
    "tests/forked.py",
    "tests/eventually.py",
)
_SERVER = ("minivllm/serve/", "minivllm/logs.py", "minivllm/upload.py", "tests/serve/conftest.py", *_PROCESSES)
_ENGINE = (*_FORWARD, *_CONTROL, *_PROCESSES)

# Files of which a change may turn an area's verdict, beside its own tests: `make test-all AREA=changed`.
SOURCES: dict[str, tuple[str, ...]] = {
    "kernels": (*_FORWARD, *_PROCESSES, "tests/kernels/", "tests/quick_interpreter.py"),
    "card": (*_ENGINE, "bench/", "tests/attention/", "tests/fake_card.py", "tests/kernels/"),
    "conformance": (
        *(*_ENGINE, "minivllm/matrix.py", "minivllm/matrix.json", "minivllm/serve/"),
        *("tests/fakes.py", "tests/lora/", "tests/grammar_driver.py", "tests/json_schemas.py", "tests/tolerances.py"),
    ),
    "chapters": (
        *(*_ENGINE, "bench/", "chapters/", "minivllm/cli/", "minivllm/serve/", "minivllm/simulate/"),
        *("tests/layer_tables.py", "tests/machine_profiles.py", "tests/simulate/", "minivllm/terminal.py"),
    ),
    "site": (
        *("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md", "bench/", "chapters/"),
        *("docs/", "site/", "tests/book/", *_ENGINE, *_SERVER, "minivllm/cli/", "minivllm/matrix.json"),
    ),
    "fire": (*_ENGINE, *_SERVER),
    "attack": (*_ENGINE, *_SERVER, "tests/fire/", "tests/grammar_bombs.py"),
    "clients": (*_ENGINE, *_SERVER, "bench/peers/", "docs/clients.md", "tests/lora/adapters.py"),
    "compile": (
        *(*_ENGINE, "tests/conformance/", "tests/lora/adapters.py", "tests/naive_attention.py", "tests/toy_model.py"),
    ),
    "timing": (*_ENGINE, "chapters/", "tests/book/"),
    SANITIZE: ("kernels/cpu/", "tests/sanitize/"),
}
# What all areas stand on.
EVERYWHERE = ("Makefile", "pyproject.toml", "setup.py", "tests/areas.py", "tests/conftest.py", "tests/run_areas.py")
# What the gate alone looks at.
GATE_ALONE = (
    *(".ci/", ".dockerignore", ".github/", ".gitignore", "LICENSE", "deploy/", "examples/", "minivllm/__main__.py"),
    *("minivllm/py.typed", "minivllm/trace_recent.py", "tests/"),
)


def area_of(nodeid: str, alone: bool = False) -> str:
    """The area of a test, or GATE. `alone`: it is marked so, since it is about time."""
    if alone:
        return "timing"
    return next((area for area, names in AREAS.items() if nodeid.startswith(names)), GATE)


def may_hold(path: str, area: str) -> bool:
    """Whether a file or folder (from the repository's root, a folder with its slash) may hold tests of this area."""
    if area == GATE:
        return not path.startswith(tuple(name for names in AREAS.values() for name in names if "::" not in name))
    return area == "timing" or any(path.startswith(name) or name.startswith(path) for name in AREAS[area])


def looks_at(area: str, path: str) -> bool:
    """Whether a change of this file (from the repository's root) may turn the area's verdict."""
    own = tuple(name.partition("::")[0] for name in AREAS.get(area, ()))
    return path.startswith((*own, *SOURCES[area], *EVERYWHERE))


def changed(paths: Iterable[str]) -> dict[str, str]:
    """The areas that look at one of these files, in their order, each with the first that it looks at."""
    paths = sorted(paths)
    first = {area: next((path for path in paths if looks_at(area, path)), None) for area in ALL}
    return {area: path for area, path in first.items() if path is not None}
