"""The charts of docs/explanation/benchmarks.md."""

from __future__ import annotations

from pathlib import Path

from bench.charts import charts, render

DOCS = Path(__file__).parents[2] / "docs"


def test_the_charts_are_drawn_from_the_figures() -> None:
    """After a change of `bench/charts.json`: `make charts`."""
    for name, chart in charts().items():
        written = (DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8")
        assert render(chart) == written, "make charts"


def test_the_page_contains_every_figure_of_the_charts() -> None:
    """Each group is a row of a table, with all of its values."""
    page = (DOCS / "explanation" / "benchmarks.md").read_text(encoding="utf-8")
    rows = [[cell.strip("* ") for cell in row.split("|")] for row in page.splitlines()]
    for chart in charts().values():
        for group, values in chart["groups"].items():
            wanted = {group, *(f"{value:,}" for value in values)}
            cells = [{cell.partition(" (")[0] for cell in row} for row in rows]
            assert any(wanted <= row for row in cells), group
