"""Every field of OpenAI's, Anthropic's and vLLM's requests is declared, and the page of fields says what it does.

The packages are compared as they are installed: an older one has fewer fields, and a field that a new one brings fails
here until somebody has decided what the server does with it.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import anthropic
import openai
import pytest
from bookext import endpoint_fields, references
from bookext.references import Known, field_types
from msgspec import Struct
from pydantic import BaseModel, Field

from minivllm.serve.app import ENDPOINTS
from minivllm.serve.protocol import RequestBody, accepted, differs, doc, hint, refused

TAKING = sorted({endpoint.takes for endpoint in ENDPOINTS if endpoint.takes}, key=lambda struct: struct.__name__)


def posted(folder: str, prefix: str) -> set[str]:
    """The paths that a package's client sends bodies to."""
    source = "".join(path.read_text() for path in Path(folder, "resources").rglob("*.py"))
    return {prefix + path for path in re.findall(r'_post\(\s*"(/[^"?]+)', source)}


def missing(known: Known, structs: set[type[Struct]]) -> list[str]:
    return [
        f"{struct.__name__}.{name} ({', '.join(owners)}'s) in {struct.__module__.replace('.', '/')}.py"
        for struct, fields in known.fields.items()
        if struct in structs
        for name, owners in fields.items()
        if name not in field_types(struct)
    ]


@pytest.mark.parametrize("kind", TAKING, ids=lambda kind: kind.__name__)
def test_every_field_of_the_references_requests_is_declared(kind):
    found = missing(references.requests(), set(references.inside(kind)))
    told = "\n".join(found)
    assert not found, f"declare each, plain or as differs, accepted, hint or refused (serve/fields.py):\n{told}"


def test_every_field_of_the_references_answers_is_sent_or_said_to_be_absent():
    silent = [f"{struct.__name__}.{name}" for struct, name, why in references.absent() if not why]
    assert not silent, f"send each, or say why not in ABSENT of site/bookext/references.py: {silent}"


def test_each_endpoint_that_a_package_has_is_compared():
    """By the paths in the clients' source."""
    served = {endpoint.path: endpoint for endpoint in ENDPOINTS if endpoint.takes}
    theirs = posted(openai.__path__[0], "/v1") | posted(anthropic.__path__[0], "")
    both = theirs & served.keys()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages"} <= both
    assert both <= references.PACKAGES.keys(), "add what is missing to PACKAGES of site/bookext/references.py"
    for path in both:
        assert references.load(references.PACKAGES[path][0].takes), path


def test_what_is_compared_reaches_into_each_object():
    fields = {struct.__name__: names for struct, names in references.requests().fields.items()}
    for name, field, whose in (
        ("ChatRequest", "messages", {"OpenAI", "vLLM"}),
        ("ContentPart", "image_url", {"OpenAI"}),
        ("Message", "tool_call_id", {"OpenAI"}),
        ("CalledFunction", "arguments", {"OpenAI"}),
        ("NamedTool", "function", {"OpenAI"}),
        ("JSONSchema", "schema", {"OpenAI", "vLLM"}),
        ("InputPart", "file_id", {"OpenAI"}),
        ("InputItem", "encrypted_content", {"OpenAI"}),
        ("ToolUseBlock", "input", {"Anthropic"}),
        ("MessagesRequest", "max_tokens", {"Anthropic", "vLLM"}),
        ("StructuredOutputs", "regex", {"vLLM"}),
        ("RerankRequest", "top_n", {"vLLM"}),
    ):
        assert fields[name][field] == whose, (name, field)
    assert "betas" not in fields["MessagesRequest"]


class TheirText(TypedDict, total=False):
    type: Literal["text"]
    text: str
    new_inside: str


class TheirPicture(TypedDict, total=False):
    type: Literal["picture"]
    pixels: str


class TheirRequest(TypedDict, total=False):
    parts: list[TheirText | TheirPicture]
    new: int
    known: int


class TheirAnswer(BaseModel):
    schema_: str = Field(alias="schema")


class OurText(RequestBody, tag_field="type", tag="text"):
    text: str


class OurRequest(RequestBody):
    parts: list[OurText]
    known: Annotated[Any, refused("reasons", 0)] = None
    idle: Annotated[int | None, hint("no use")] = None
    odd: Annotated[int | None, differs("Twice as much.")] = None
    moot: Annotated[int | None, accepted()] = None
    plain: Annotated[Literal["a", "b"] | None, doc("Does it.")] = None


@pytest.fixture
def pairs(monkeypatch) -> Known:
    monkeypatch.setitem(references.OWNERS, __name__.partition(".")[0], "Theirs")
    found = Known({}, {})
    references.pair(OurRequest, TheirRequest, found, set())
    return found


def test_a_new_field_is_found_at_any_depth_and_named_with_its_file(pairs):
    named = missing(pairs, {OurRequest, OurText})
    assert [name.partition(" ")[0] for name in named] == ["OurRequest.new", "OurText.new_inside"]
    assert all("Theirs's" in name and name.endswith("test_fields.py") for name in named)
    assert pairs.variants == {(OurRequest, "parts"): {"picture"}}
    assert list(references.shape_fields(TheirAnswer)) == ["schema"]


def test_a_row_says_what_is_done_with_a_field(pairs, monkeypatch):
    monkeypatch.setattr(references, "requests", lambda: pairs)
    rows = rows_of(endpoint_fields.table(OurRequest))
    assert rows["parts"] == ["taken", "See OurText. Refused: picture.", "Theirs"]
    assert rows["known"] == ["refused", "Reasons. 0 asks for nothing.", "Theirs"]
    assert rows["idle"] == ["ignored", "No use.", ""]
    assert rows["odd"] == ["differs", "Twice as much.", ""]
    assert rows["moot"] == ["no effect", "", ""]
    assert rows_of(endpoint_fields.table(OurText))["type"] == ["taken", "text", "Theirs"]
    assert rows["plain"] == ["taken", "Does it. Values: a, b.", ""]


def test_every_field_that_is_not_taken_says_why():
    silent = [
        f"{struct.__name__}.{field.name}"
        for kind in TAKING
        for struct in references.inside(kind)
        for field in endpoint_fields.in_order(struct)
        if (said := endpoint_fields.does(field)).word in ("differs", "ignored", "refused") and not said.what
    ]
    assert not silent


class Rows(HTMLParser):
    def __init__(self, page: str):
        super().__init__()
        self.rows: list[list[str]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        elif tag == "td":
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def rows_of(page: str) -> dict[str, list[str]]:
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in Rows(page).rows if row}
