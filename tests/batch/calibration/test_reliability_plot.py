"""Tests of the reliability plot."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from tidemill.batch.calibration.answers import Options
from tidemill.batch.calibration.calibration import QuestionFit
from tidemill.batch.calibration.reliability_plot import reliability_svg

_SVG = "{http://www.w3.org/2000/svg}"


def test_each_measured_question_has_a_plot_with_its_figures() -> None:
    """Points are at confidence and accuracy; names of questions are escaped."""
    reports = []
    for name in ("<a> & \x00", "b"):
        fit = QuestionFit(Options(name, "predicate", ("true", "false")))
        for number in range(20):
            fit.add((0.9, 0.1), int(number >= 10))
        reports.append(fit.report(fit.batch_map([0.5, 0.5])))
    reports.append({"name": "c", "problem": "it has no gold answers"})
    svg = reliability_svg(reports)
    assert svg is not None
    root = ET.fromstring(svg)  # noqa: S314
    assert root.get("role") == "img"
    assert root.findtext(f"{_SVG}title") == "Accuracy of decisions by their confidence"
    text = root.findtext(f"{_SVG}desc") or ""
    assert "<a> & �: accuracy 50.0% before" in text
    assert "prefers-color-scheme: dark" in svg
    panels = root.findall(f"{_SVG}g")
    assert len(panels) == 2
    points = [
        each for each in panels[1].iter(f"{_SVG}circle") if each.find(f"{_SVG}title") is not None
    ]
    assert [(each.get("class"), each.get("cx"), each.get("cy")) for each in points] == [
        ("before", "180.0", "100.0"),
        ("after", "100.0", "100.0"),
    ]
    assert reliability_svg(reports[2:]) is None
