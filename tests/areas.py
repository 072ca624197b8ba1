"""Which tests decide whether a change lands, which look deeper, and what each of these looks at.

`make test` runs the gate: every test that no area below names. `make test-all` runs the areas (tests/run_areas.py), and
`make test-all AREA=kernels` one of them. A test is in exactly one, since its area is the first that names it.
"""

from __future__ import annotations

from collections.abc import Iterable

GATE = "gate"
CHECK = "check"

# An area's tests: folders, files and beginnings of tests' ids, from the repository's root.
AREAS: dict[str, tuple[str, ...]] = {
    "kernels": (
        "tests/kernels/test_interpreter.py",
        "tests/kernels/test_compiled.py",
        "tests/kernels/test_cpu_targets.py",
    ),
    "card": ("tests/card/", "tests/bench/test_gpu.py", "tests/bench/test_gpu_attention.py"),
    "conformance": ("tests/conformance/", "tests/lora/test_conformance.py", "tests/oracle/"),
    "chapters": ("tests/book/test_chapters.py", "tests/bench/"),
    "site": (
        *("tests/book/test_site_browser.py", "tests/book/test_widgets_browser.py", "tests/serve/test_page_browser.py"),
    ),
    "fire": ("tests/fire/",),
    "clients": ("tests/clients/",),
    "templates": ("tests/templates/",),
    "compile": ("tests/compile/", "tests/models/test_moe.py::test_compiled_pieces"),
    "timing": (),  # what is marked `alone`, wherever it is
}
SANITIZE = "sanitize"  # C++ programs, not tests of pytest's: `make sanitize`
ALL = (*AREAS, SANITIZE)

# Of the gate, what says in seconds that code, pages and tests hold to the rules of the house: `make check`.
CHECKS = (
    *("tests/book/test_fields.py", "tests/book/test_quotes.py", "tests/book/test_reference.py"),
    *("tests/book/test_runs.py", "tests/book/test_site.py", "tests/book/test_spelling.py"),
    *(
        "tests/test_areas.py",
        "tests/test_ci.py",
        "tests/test_known.py::test_there",
        "tests/test_deploy.py",
        "tests/test_layers_of_the_house.py",
    ),
    *("tests/test_lock.py", "tests/test_matrix.py", "tests/test_protocols.py", "tests/test_security.py"),
    *("tests/test_readme.py::test_e", "tests/test_readme.py::test_python_that_is_not_run"),
    *("tests/test_readme.py::test_the_layers", "tests/test_readme.py::test_the_readme_is"),
    *("tests/test_readme.py::test_the_row", "tests/test_readme.py::test_the_table"),
)

# ---------------------------------------------------------------------------------------- what an area looks at


def _paths(names: str, of: str = "") -> tuple[str, ...]:
    return tuple(of + name for name in names.split())


# What gives a batch its tokens; what decides which tokens a batch has; what starts processes; what answers clients.
_FORWARD = (
    "kernels/",
    *_paths(
        "attention/ batch.py compile/ file_keys.py files.py kernels kv_groups.py layers/ loading/ lora/", of="minivllm/"
    ),
    *_paths("machine.py models/ parallel/ pooling/ quantization/ runner/ sampling/ spec_decode/", of="minivllm/"),
    *_paths("patterns.py structured/", of="minivllm/"),
)
_CONTROL = (
    *_paths("__init__.py config.py engine/ errors.py executor/ facts.py features.py kv/ plan.py", of="minivllm/"),
    *_paths("registry.py request.py scheduler/ trace.py waiting.py", of="minivllm/"),
)
_PROCESSES = (
    *_paths("child.py orphan.py sandbox.py wanted.py", of="minivllm/"),
    *_paths("eventually.py forked.py steps.py", of="tests/"),
)
_SERVER = (*_paths("logs.py serve/ upload.py", of="minivllm/"), "tests/serve/conftest.py", *_PROCESSES)
_ENGINE = (*_FORWARD, *_CONTROL, *_PROCESSES)

# Files of which a change may turn an area's verdict, beside its own tests: `make test-all AREA=changed`.
SOURCES: dict[str, tuple[str, ...]] = {
    "kernels": (*_FORWARD, *_PROCESSES, "tests/kernels/", "tests/quick_interpreter.py"),
    "card": (*_ENGINE, "bench/", "tests/attention/", "tests/fake_card.py", "tests/kernels/"),
    "conformance": (
        *(*_ENGINE, "minivllm/matrix.py", "minivllm/matrix.json", "minivllm/serve/"),
        *("tests/fakes.py", "tests/lora/", "tests/grammar_driver.py", "tests/json_schemas.py", "tests/tolerances.py"),
        *("tests/loading/gguf_fixture.py", "tests/models/"),
    ),
    "chapters": (
        *(*_ENGINE, "bench/", "chapters/", "minivllm/cli/", "minivllm/serve/", "minivllm/simulate/"),
        *(
            "tests/layer_tables.py",
            "tests/machine_profiles.py",
            "tests/models/",
            "tests/operator_tables.py",
            "tests/simulate/",
            "minivllm/terminal.py",
        ),
    ),
    "site": (
        *("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md", "bench/", "chapters/"),
        *("docs/", "site/", "tests/book/", *_ENGINE, *_SERVER, "minivllm/cli/", "minivllm/matrix.json"),
    ),
    "fire": (*_ENGINE, *_SERVER),
    "clients": (*_ENGINE, *_SERVER, "bench/peers/", "docs/clients.md", "tests/lora/adapters.py"),
    "templates": ("minivllm/engine/", "minivllm/errors.py", "tests/tiny_tokenizers.py"),
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
    *(
        ".ci/",
        ".dockerignore",
        ".githooks/",
        ".github/",
        ".gitignore",
        "LICENSE",
        "deploy/",
        "examples/",
        "minivllm/__main__.py",
    ),
    *("minivllm/py.typed", "minivllm/trace_recent.py", "tests/"),
)


def area_of(nodeid: str, alone: bool = False) -> str:
    """The area of a test, or GATE. `alone`: it is marked so, since it is about time."""
    if alone:
        return "timing"
    return next((area for area, names in AREAS.items() if nodeid.startswith(names)), GATE)


def belongs(nodeid: str, area: str, alone: bool = False) -> bool:
    """Whether a run of this area, of GATE or of CHECK runs a test."""
    of = area_of(nodeid, alone)
    return of == GATE and nodeid.startswith(CHECKS) if area == CHECK else of == area


def may_hold(path: str, area: str) -> bool:
    """Whether a file or folder (from the repository's root, a folder with its slash) may hold tests of this area. CHECK
    reads the whole gate, and compares what two processes make of it (tests/same_tests.py)."""
    if area in (GATE, CHECK):
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
