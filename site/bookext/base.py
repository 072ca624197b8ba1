"""What the book's directives share."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from bookext import quotes, records
from minivllm.errors import UserError

USED = "book_sources"  # in the document's temporary data: the sources that this page has shown so far
# What a page's author did wrong. ValueError: a format that does not fit; UserError: a trace that cannot be read.
EXPECTED = (quotes.QuoteError, records.RecordError, ValueError, UserError)


class Directive(SphinxDirective):
    """A directive whose failures name the line of the page."""

    has_content = True
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        try:
            return self.build()
        except EXPECTED as e:
            raise self.error(str(e)) from None

    def build(self) -> list[nodes.Node]:
        raise NotImplementedError

    def box(self, kind: str, *children: nodes.Node) -> nodes.container:
        return nodes.container("", *children, classes=[kind])

    def parsed(self, lines: list[str]) -> list[nodes.Node]:
        return self.parse_text_to_nodes("\n".join(lines))

    def caption(self) -> nodes.container:
        return self.box("caption", *self.parsed(list(self.content)))

    def parts(self) -> list[list[str]]:
        """The content, split at lines of `+++`."""
        found: list[list[str]] = [[]]
        for line in self.content:
            if line.strip() == "+++":
                found.append([])
            else:
                found[-1].append(line)
        return found

    def used(self, source: str) -> dict[str, Any]:
        """The results of a source, which the page's list of sources will name."""
        self.env.current_document.setdefault(USED, {})[source] = True
        for path in records.files(source):
            self.env.note_dependency(str(path))
        return records.load(source)

    def picked(self, place: str) -> Any:
        """The value at `source:path`."""
        source, _, path = place.partition(":")
        return records.pick(self.used(source)["results"], path)

    def quoted(self, reference: str) -> list[nodes.Node]:
        found = quotes.quote(reference)
        self.env.note_dependency(str(quotes.ROOT / found.path))
        where = nodes.paragraph("", "", classes=["quote-from"])
        where += [nodes.literal(text=found.path), nodes.Text(f", line {found.line}")]
        return [where, nodes.literal_block(found.code, found.code, language="python")]

    def folded(self, title: str, children: list[nodes.Node]) -> list[nodes.Node]:
        return [html(f"<details><summary>{title}</summary>"), *children, html("</details>")]


class OfCode(Directive):
    """One that is made of what the code has imported: no file is known that its page depends on, so every build reads
    that page again."""

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()
        return super().run()


def html(text: str) -> nodes.raw:
    return nodes.raw("", text, format="html")


def picture(text: str) -> nodes.raw:
    """HTML that is looked at: without its tags, what stands in it is no sentence, and the search need not know it."""
    return nodes.raw("", text, format="html", classes=["no-search"])
