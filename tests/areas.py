"""Which tests decide whether a change lands, and which look deeper.

`make test` runs the gate: every test that no area below names. `make test-all` runs the areas too, and
`make test-all AREA=kernels` one of them. A test is in exactly one of the two, since an area is the first that names it.
"""

from __future__ import annotations

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
