"""The directives of the book. What they show comes from real code and committed results, or the build fails."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish

from bookext import endpoint_fields, figures, quoted, records, reference, runs

DIRECTIVES = {
    "snippet": quoted.Snippet, "compare": quoted.Compare, "predict": quoted.Predict, "exercise": quoted.Exercise,
    "switch": quoted.Switch, "codemap": quoted.Map, "questions": quoted.Questions,
    "run-output": figures.RunOutput, "chart": figures.Chart, "ratios": figures.Ratios, "ablation": figures.Ablation,
    "records": figures.Records, "measured": figures.Measured, "rerun": figures.Rerun, "sources": figures.Sources,
    "widget": figures.Widget, "runs": runs.Runs, "peers": runs.Peers, "results": runs.Results,
    "api": reference.Api, "endpoints": reference.Endpoints, "commands": reference.Commands, "fields": reference.Fields,
    "features": reference.Features, "presets": reference.Presets, "matrix": reference.Matrix,
    "endpoint-fields": endpoint_fields.EndpointFields, "absent-fields": endpoint_fields.AbsentFields,
    "references": endpoint_fields.References,
}  # fmt: skip


def name_headings(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Sphinx gives a toctree's caption the role of a heading, and no level."""
    for part in ("body", "furo_navigation_tree"):
        if part in context:
            context[part] = context[part].replace('role="heading"', 'role="heading" aria-level="2"')


def leave_widgets_out(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Of a page that no document is behind, the search: it loads the index, and has no widget."""
    if doctree is None:
        for files in ("css_files", "script_files"):
            context[files] = [
                file for file in context[files] if not str(file.filename or "").startswith("_static/widgets.")
            ]


COMMIT = re.compile("[0-9a-f]{12}")  # as a record's table shows it
_stem = SearchEnglish({}).stem
SAYS_NOTHING = """
    above alone also another any ask asked asks b back because become becomes before begin begins behind beside
    besides c can come comes differ different does during else even ever every far find finds first four get gets
    give gives go goes half hold holds k keep keeps kept kind kinds know knows last leave leaves left less lie lies
    like long longer look looks m made make makes many may mean means much must need needs never next nobody none
    nothing now once one ones only others own part parts place places r right s said say says see sees several show
    shown shows since small stand stands stay stays still take taken takes themselves thing things three together
    true turn turns two use used uses v very want wants way ways whole whose why without written yet
"""


class SearchWords(SearchEnglish):
    """What the search knows: words. A commit's hash is none, nor what begins with a digit, a figure of some run, or
    with an underscore, a name that is private to the code that is quoted. Nor what is on most pages and says nothing:
    the index is loaded whole, and such a word lists all of them."""

    # Of each its stem, too: a word whose stem says nothing is asked for as it stands, by Sphinx and by who searches.
    stopwords = frozenset(SearchEnglish.stopwords) | {f for word in SAYS_NOTHING.split() for f in (word, _stem(word))}

    def word_filter(self, word: str) -> bool:
        figure = word[:1].isdigit() or COMMIT.fullmatch(word) is not None
        return not (figure or word.startswith("_")) and super().word_filter(word.lower())


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("book_bench", str(records.BENCH), "env", [str])
    app.connect("builder-inited", lambda app: records.read_from(Path(app.config.book_bench)))
    app.connect("html-page-context", name_headings, priority=900)  # after furo's own
    app.connect("html-page-context", leave_widgets_out)
    app.add_search_language(SearchWords)
    app.add_role("num", figures.Num())
    for name, directive in DIRECTIVES.items():
        app.add_directive(name, directive)
    return {"version": "2", "parallel_read_safe": True, "parallel_write_safe": True}
