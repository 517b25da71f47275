"""Reliability plot: the accuracy of decisions by their confidence, as an SVG."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from xml.sax.saxutils import escape

_SIDE: Final = 200
_LEFT: Final = 52
_TOP: Final = 46
_WIDTH: Final = 276
_HEIGHT: Final = 330
_COLUMNS: Final = 3
_MAX_RADIUS: Final = 9.0
_MIN_RADIUS: Final = 2.5
_MAX_NAME_CHARS: Final = 32
_INVALID: Final = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_STYLE: Final = """\
  text { font: 12px system-ui, sans-serif; fill: #24292f; }
  .name { font-weight: 600; }
  .frame, .even { fill: none; stroke: #8c959f; }
  .even { stroke-dasharray: 4 3; }
  .before { fill: none; stroke: #8c959f; stroke-width: 1.5; }
  .after { fill: #0969da; fill-opacity: .8; }
  .back { fill: #ffffff; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .after { fill: #58a6ff; }
    .back { fill: #0d1117; }
  }
"""


def reliability_svg(reports: Sequence[Mapping[str, Any]]) -> str | None:
    """Return one plot for each measured question, before and after; None without any.

    `reports` are those of `QuestionFit.report`. A point is a group of gold rows with similar
    confidence, and its area their number.
    """
    measured = [report for report in reports if "after" in report]
    if not measured:
        return None
    num_columns = min(_COLUMNS, len(measured))
    width, height = num_columns * _WIDTH, -(-len(measured) // _COLUMNS) * _HEIGHT
    text = " ".join(map(_described, measured))
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="title desc"',
        f'  viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        '<title id="title">Accuracy of decisions by their confidence</title>',
        f'<desc id="desc">{_clean(text)}</desc>',
        f"<style>\n{_STYLE}</style>",
        f'<rect class="back" width="{width}" height="{height}"/>',
    ]
    for place, report in enumerate(measured):
        row, column = divmod(place, num_columns)
        lines.append(f'<g transform="translate({column * _WIDTH + _LEFT} {row * _HEIGHT + _TOP})">')
        lines += _panel(report)
        lines.append("</g>")
    return "\n".join((*lines, "</svg>\n"))


def _described(report: Mapping[str, Any]) -> str:
    before, after = report["before"], report["after"]
    return (
        f"{report['name']}: accuracy {before['accuracy']:.1%} before and {after['accuracy']:.1%} "
        f"after calibration, expected calibration error {before['calibration_error']:.3f} before "
        f"and {after['calibration_error']:.3f} after, {report['measured_rows']:,} gold rows."
    )


def _panel(report: Mapping[str, Any]) -> Iterator[str]:
    name = report["name"]
    shown = name if len(name) <= _MAX_NAME_CHARS else f"{name[: _MAX_NAME_CHARS - 1]}…"
    errors = (
        f"error {report['before']['calibration_error']:.3f} → "
        f"{report['after']['calibration_error']:.3f}, {report['measured_rows']:,} gold rows"
    )
    yield f'<text class="name" x="0" y="-26">{_clean(shown)}</text>'
    yield f'<text x="0" y="-9">{errors}</text>'
    yield f'<rect class="frame" width="{_SIDE}" height="{_SIDE}"/>'
    yield f'<line class="even" x1="0" y1="{_SIDE}" x2="{_SIDE}" y2="0"/>'
    for at in (0, 0.5, 1):
        end = at * _SIDE
        yield f'<text x="{end:.0f}" y="{_SIDE + 16}" text-anchor="middle">{at:g}</text>'
        yield f'<text x="-6" y="{_SIDE - end + 4:.0f}" text-anchor="end">{at:g}</text>'
    yield f'<text x="{_SIDE / 2:.0f}" y="{_SIDE + 33}" text-anchor="middle">confidence</text>'
    turned = f"translate(-32 {_SIDE / 2:.0f}) rotate(-90)"
    yield f'<text transform="{turned}" text-anchor="middle">accuracy</text>'
    yield f'<circle class="before" cx="30" cy="{_SIDE + 52}" r="5"/>'
    yield f'<text x="40" y="{_SIDE + 56}">before</text>'
    yield f'<circle class="after" cx="110" cy="{_SIDE + 52}" r="5"/>'
    yield f'<text x="120" y="{_SIDE + 56}">calibrated</text>'
    for time in ("before", "after"):
        yield from _points(report[time]["bins"], time)


def _points(bins: Sequence[Mapping[str, Any]], kind: str) -> Iterator[str]:
    most = max(each["num_rows"] for each in bins)
    for each in bins:
        radius = max(_MIN_RADIUS, _MAX_RADIUS * (each["num_rows"] / most) ** 0.5)
        x, y = each["confidence"] * _SIDE, (1 - each["accuracy"]) * _SIDE
        yield (
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"><title>confidence '
            f"{each['confidence']:.2f}, accuracy {each['accuracy']:.2f}, {each['num_rows']:,} rows"
            "</title></circle>"
        )


def _clean(text: str) -> str:
    return escape(_INVALID.sub("�", text))
