"""The directives of the book. What they show comes from real code and committed results, or the build fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from bookext import figures, quoted, records, reference, runs

DIRECTIVES = {
    "snippet": quoted.Snippet, "compare": quoted.Compare, "predict": quoted.Predict, "exercise": quoted.Exercise,
    "switch": quoted.Switch, "codemap": quoted.Map, "questions": quoted.Questions,
    "run-output": figures.RunOutput, "chart": figures.Chart, "ratios": figures.Ratios, "ablation": figures.Ablation,
    "records": figures.Records, "measured": figures.Measured, "rerun": figures.Rerun, "sources": figures.Sources,
    "widget": figures.Widget, "runs": runs.Runs, "peers": runs.Peers, "results": runs.Results,
    "api": reference.Api, "endpoints": reference.Endpoints, "commands": reference.Commands, "fields": reference.Fields,
    "features": reference.Features, "presets": reference.Presets, "matrix": reference.Matrix,
}  # fmt: skip


def name_headings(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Sphinx gives a toctree's caption the role of a heading, and no level."""
    for part in ("body", "furo_navigation_tree"):
        if part in context:
            context[part] = context[part].replace('role="heading"', 'role="heading" aria-level="2"')


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("book_bench", str(records.BENCH), "env", [str])
    app.connect("builder-inited", lambda app: records.read_from(Path(app.config.book_bench)))
    app.connect("html-page-context", name_headings, priority=900)  # after furo's own
    app.add_role("num", figures.Num())
    for name, directive in DIRECTIVES.items():
        app.add_directive(name, directive)
    return {"version": "2", "parallel_read_safe": True, "parallel_write_safe": True}
