"""The reference says of a symbol what its source says."""

from __future__ import annotations

import ast
import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from bookext import endpoint_fields, reference, references

import minivllm
from minivllm import matrix
from minivllm.serve.app import ENDPOINTS

ROOT = Path(__file__).parent.parent.parent

SOURCE = '''
class A:
    """What it is.

    one: the first.
    two, three: the others, with `code`.

        x = 1
    """

    size: int = 3  # how many
    # Of two lines
    # above it:
    name: str  # and behind.

    def __init__(self, size: int = 3, *, name: str): ...

    @property
    def twice(self) -> int: ...

    async def run(self, many: dict[str, list[int]], what: tuple[str, ...] = ("a", "b"), when: float = 0.0) -> list[str]:
        """Runs."""

    def _hidden(self): ...
'''


@pytest.fixture(scope="module")
def shown() -> str:
    (node,) = ast.parse(SOURCE).body
    assert reference.described(ast.parse("class B(A): ...").body[0], [])[0].astext() == "class B(A)"
    return "\n".join(part.astext() for part in reference.described(node, SOURCE.splitlines()))


def test_signatures_are_as_they_are_called(shown):
    assert "A(size: int=3, *, name: str)" in shown and "self" not in shown and "_hidden" not in shown
    assert "\ntwice: int" in shown
    assert "async run(\n    many: dict[str, list[int]],\n    what: tuple[str, ...]=('a', 'b')," in shown


def test_fields_come_with_their_comments_and_docstrings_in_paragraphs(shown):
    assert "<code>size</code>" in shown and "<td>how many" in shown
    assert "<td>Of two lines above it: and behind." in shown
    assert "one: the first.\ntwo, three: the others, with code." in shown


def test_a_schemas_type_is_said_in_a_word():
    for schema, word in (
        ({"$ref": "#/components/schemas/Tool"}, "Tool"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string | null"),
        ({"type": "array", "items": {"type": "integer"}}, "[integer]"),
        ({"enum": ["a", "b"]}, "a | b"),
        ({}, "any"),
    ):
        assert reference.kind_of(schema) == word, json.dumps(schema)


def test_a_cell_of_the_matrix_never_looks_better_than_its_worst_pair():
    works, conflict, fails, untested = matrix.WORKS, matrix.CONFLICT, matrix.FAILS, matrix.UNTESTED
    assert reference.summary([works, works]) == "works"
    assert reference.summary([works, conflict]) == "partly" and reference.summary([conflict]) == "never"
    assert reference.summary([works, untested]) == "untested" and reference.summary([works, untested, fails]) == "fails"


def test_every_page_of_the_reference_has_what_it_promises(built):
    pages = {path.stem: path.read_text() for path in (built / "docs" / "reference").glob("*.html")}
    assert "max_num_batched_tokens" in pages["options"] and "pairs that cannot be" in pages["options"]
    assert "/v1/chat/completions" in pages["server"] and "usage: python -m minivllm" in pages["server"]
    assert "num_computed_tokens" in pages["parts"] and "repetition_penalty" in pages["python"]


def test_the_page_of_fields_has_every_field_of_every_request_once(built):
    page = (built / "docs" / "reference" / "fields.html").read_text()
    for kind in {struct for e in ENDPOINTS if e.takes for struct in references.inside(e.takes)}:
        assert page.count(f'id="{endpoint_fields.anchor(kind)}"') == 1, kind
        assert page.count(endpoint_fields.table(kind)), kind
    assert version("openai") in page and references.vllm()["version"] in page
    assert "<code>OutputReasoning.encrypted_content</code>" in page


def api_of(page: str) -> list[ast.ClassDef]:
    places = re.findall(r"\{api\} (\S+)::(\w+)", (ROOT / "docs" / "reference" / page).read_text())
    return [
        node
        for path, name in places
        for node in ast.parse((ROOT / path).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]


def test_every_public_name_is_in_the_reference_and_says_what_it_takes():
    shown = api_of("python.md")
    assert set(minivllm.__all__) - {"__version__"} <= {node.name for node in shown}
    silent = [node.name for node in shown if not ast.get_docstring(node)]
    silent += [
        f"{node.name}.{child.name}"
        for node in shown
        for child in node.body
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and not child.name.startswith("_")
        if len(child.args.args) + len(child.args.kwonlyargs) > 1 and not ast.get_docstring(child)
    ]
    assert not silent, silent
