"""Bar charts of docs/explanation/benchmarks.md, drawn from the figures in `charts.json`.

    python -m bench.charts [--folder docs/images]

Each chart is an SVG file. Below each group is the first series in relation to the best other one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict

FIGURES = Path(__file__).with_suffix(".json")
WIDTH, HEIGHT, LEFT, TOP = 760, 220, 20, 66
COLOURS = ("#2563eb", "#f59e0b", "#9ca3af")


class Chart(TypedDict):
    """One chart: bars of several series in groups."""

    title: str
    note: str
    series: list[str]
    groups: dict[str, list[int]]


def charts() -> dict[str, Chart]:
    """Return the charts by the names of their files."""
    figures: dict[str, Chart] = json.loads(FIGURES.read_text(encoding="utf-8"))
    return figures


def render(chart: Chart) -> str:
    """Return a chart as SVG."""
    return "\n".join([*_frame(chart), *_bars(chart), "</svg>"]) + "\n"


def _frame(chart: Chart) -> Iterator[str]:
    width, height = 2 * LEFT + WIDTH, TOP + HEIGHT + 66
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'role="img" font-family="sans-serif" font-size="12">'
    )
    yield f"<title>{chart['title']}</title>"
    yield f'<rect width="{width}" height="{height}" fill="#fff"/>'
    yield f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">{chart["title"]}</text>'
    for number, name in enumerate(chart["series"]):
        x = LEFT + 190 * number
        yield f'<rect x="{x}" y="32" width="12" height="12" fill="{COLOURS[number]}"/>'
        yield f'<text x="{x + 18}" y="42">{name}</text>'
    yield f'<text x="{LEFT}" y="{height - 8}" fill="#555">{chart["note"]}</text>'


def _bars(chart: Chart) -> Iterator[str]:
    groups, base = chart["groups"], TOP + HEIGHT
    scale = HEIGHT / max(value for values in groups.values() for value in values)
    room = WIDTH / len(groups)
    bar = min(60.0, room * 0.84 / len(chart["series"]))
    for number, (name, values) in enumerate(groups.items()):
        middle = LEFT + room * (number + 0.5)
        for place, value in enumerate(values):
            x, tall = middle + bar * (place - len(values) / 2), scale * value
            yield (
                f'<rect x="{x:.1f}" y="{base - tall:.1f}" width="{bar - 2:.1f}" '
                f'height="{tall:.1f}" fill="{COLOURS[place]}"/>'
            )
            yield (
                f'<text x="{x + bar / 2 - 1:.1f}" y="{base - tall - 4:.1f}" font-size="8" '
                f'text-anchor="middle">{value:,}</text>'
            )
        ratio = f"{values[0] / max(values[1:]):.2f} ×"
        yield f'<text x="{middle:.1f}" y="{base + 16}" text-anchor="middle">{name}</text>'
        yield (
            f'<text x="{middle:.1f}" y="{base + 32}" text-anchor="middle" '
            f'font-weight="bold">{ratio}</text>'
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the charts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    folder = parser.parse_args(arguments).folder
    for name, chart in charts().items():
        (folder / f"{name}.svg").write_text(render(chart), encoding="utf-8")


if __name__ == "__main__":
    main()
