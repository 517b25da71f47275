"""The plot of `bench.fleet_week`: workers, GPU hours and delays over a week, as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

_COLOURS = ("#2563eb", "#dc2626")
_WIDTH, _LEFT, _RIGHT = 860, 56, 12
_PANEL, _GAP, _TOP = 120, 34, 46
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MIN_MINUTES, _MAX_MINUTES = 1.0, 1440.0
Point = tuple[float, float]


class Drawn(NamedTuple):
    """What one policy came to: (hour, workers, GPU hours so far), and (hour, minutes) of files."""

    samples: Sequence[tuple[float, int, float]]
    delays: Sequence[Point]


def plot(drawn: Mapping[str, Drawn]) -> str:
    """Return the picture: workers of each policy, hours of both, delays of both."""
    num_panels = len(drawn) + 2
    height = _TOP + num_panels * (_PANEL + _GAP)
    most = max((count for each in drawn.values() for _, count, _ in each.samples), default=1) or 1
    hours = max((total for each in drawn.values() for _, _, total in each.samples), default=1) or 1
    pieces = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}">',
        "<style>text { font: 12px sans-serif }</style>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        *_legend(list(drawn)),
    ]
    top = _TOP
    for (name, each), colour in zip(drawn.items(), _COLOURS, strict=False):
        points = [(hour, count / most) for hour, count, _ in each.samples]
        pieces += _frame(top, f"workers: {name}", ((0, "0"), (1, str(most))))
        pieces.append(_area(points, top, colour))
        top += _PANEL + _GAP
    pieces += _frame(top, "GPU hours paid", ((0, "0"), (1, f"{hours:,.0f}")))
    for each, colour in zip(drawn.values(), _COLOURS, strict=False):
        pieces.append(
            _line([(hour, total / hours) for hour, _, total in each.samples], top, colour)
        )
    top += _PANEL + _GAP
    ticks = [
        (_of_minutes(minutes), word)
        for minutes, word in ((1, "1 min"), (10, "10"), (60, "1 h"), (1440, "24 h"))
    ]
    pieces += _frame(top, "how long each file took", ticks)
    for each, colour in zip(drawn.values(), _COLOURS, strict=False):
        points = [(hour, _of_minutes(minutes)) for hour, minutes in each.delays]
        pieces += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}" fill-opacity="0.6"/>'
            for x, y in map(_place(top), points)
        ]
    return "\n".join([*pieces, "</svg>", ""])


def _of_minutes(minutes: float) -> float:
    """Return the height of a delay, by its logarithm."""
    share = math.log(max(minutes, _MIN_MINUTES) / _MIN_MINUTES) / math.log(
        _MAX_MINUTES / _MIN_MINUTES
    )
    return min(1.0, share)


def _place(top: int) -> Callable[[Point], Point]:
    scale = (_WIDTH - _LEFT - _RIGHT) / (24 * len(_DAYS))
    return lambda point: (
        _LEFT + min(point[0], 24 * len(_DAYS)) * scale,
        top + _PANEL * (1 - point[1]),
    )


def _legend(names: Sequence[str]) -> Iterator[str]:
    for number, (name, colour) in enumerate(zip(names, _COLOURS, strict=False)):
        x = _LEFT + 180 * number
        yield f'<rect x="{x}" y="8" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 18}" y="18">{name}</text>'


def _frame(top: int, title: str, ticks: Sequence[tuple[float, str]]) -> Iterator[str]:
    place = _place(top)
    for share, word in ticks:
        _, y = place((0, share))
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{word}</text>'
    for number, day in enumerate(_DAYS):
        x, y = place((24 * number, 0))
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{y:.1f}" stroke="#eee"/>'
        yield f'<text x="{x + 4:.1f}" y="{y + 14:.1f}" fill="#666">{day}</text>'
    yield f'<text x="{_LEFT + 4}" y="{top - 4}" font-weight="bold">{title}</text>'


def _area(points: Sequence[Point], top: int, colour: str) -> str:
    base = [(points[0][0], 0.0), *points, (points[-1][0], 0.0)] if points else []
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(_place(top), base))
    return f'<polygon points="{path}" fill="{colour}" fill-opacity="0.7"/>'


def _line(points: Sequence[Point], top: int, colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(_place(top), points))
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
