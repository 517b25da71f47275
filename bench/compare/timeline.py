"""KV cache use and running sequences over a run, planned and in the file's order, as an SVG.

    python -m bench.compare.timeline out/bench/e.jsonl --model out/bench/46m \
        --kv-cache-memory 160M --svg docs/images/plan-e.svg

Each way runs once, in a separate process, whose metrics are read four times a second.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

SAMPLE_SECONDS = 0.25
WIDTH, HEIGHT, LEFT, TOP, GAP = 760, 110, 60, 46, 44
WAYS = {"plan": "#2563eb", "--no-plan": "#dc2626"}
URL = re.compile(r"metrics are at (\S+)")
METRICS = ("running_sequences", "kv_cache_usage_ratio", "waiting_sequences")
TITLES = ("running sequences", "KV cache in use, %")


class Point(NamedTuple):
    """The engine's metrics at some seconds after the first request."""

    seconds: float
    running: float
    kv_cache_usage: float
    waiting: float


def run(source: str, flags: Sequence[str]) -> list[Point]:
    """Run a file and return its engine's metrics during the run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tidemill", "run", source, "--any-model", *flags]
        command += ["-o", f"{folder}/rows.jsonl", "--enable-metrics", "--port", "0"]
        log = Path(folder) / "log.txt"
        with log.open("wb") as file, subprocess.Popen(command, stderr=file) as process:
            points = list(sample_metrics(process, log))
        if process.returncode:
            raise SystemExit(
                f"the run ended with exit status {process.returncode}: {log.read_text()[-500:]}"
            )
    return points


def sample_metrics(process: subprocess.Popen[bytes], log: Path) -> Iterator[Point]:
    """Yield a point now and then, from the start of the engine until the process ends."""
    began = None
    while process.poll() is None:
        time.sleep(SAMPLE_SECONDS)
        if (url := URL.search(log.read_text(encoding="utf-8"))) is None:
            continue
        try:
            with urlopen(url[1], timeout=5) as answer:  # noqa: S310 - of our own process
                text = answer.read().decode()
        except (URLError, OSError):
            continue
        found = [re.search(rf"^tidemill_{name} (\S+)$", text, re.MULTILINE) for name in METRICS]
        running, usage, waiting = (0.0 if match is None else float(match[1]) for match in found)
        if running and began is None:
            began = time.monotonic()
        if began is not None:
            yield Point(time.monotonic() - began, running, 100 * usage, waiting)


def render_svg(ways: dict[str, list[Point]]) -> Iterator[str]:
    """Yield the lines of an SVG: one panel per metric, one curve per way."""
    height = TOP + 2 * (HEIGHT + GAP)
    last = max(points[-1].seconds for points in ways.values())
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 40} {height}">'
    yield "<style>text { font: 12px sans-serif }</style>"
    yield f'<rect width="{LEFT + WIDTH + 40}" height="{height}" fill="#fff"/>'
    for number, (name, points) in enumerate(ways.items()):
        x = LEFT + 180 * number
        yield f'<rect x="{x}" y="8" width="12" height="12" fill="{WAYS[name]}"/>'
        yield f'<text x="{x + 18}" y="18">{name}: {points[-1].seconds:.0f} s</text>'
    for panel, title in enumerate(TITLES):
        base = TOP + panel * (HEIGHT + GAP) + HEIGHT
        most = max(1.0, *(point[panel + 1] for points in ways.values() for point in points))
        yield f'<text x="{LEFT}" y="{base - HEIGHT - 6}" font-weight="bold">{title}</text>'
        for share in (0.0, 0.5, 1.0):
            y = base - share * HEIGHT
            yield f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}" stroke="#ddd"/>'
            yield f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{share * most:.0f}</text>'
        for name, points in ways.items():
            across, up = WIDTH / last, HEIGHT / most
            places = (
                f"{LEFT + across * point.seconds:.1f},{base - up * point[panel + 1]:.1f}"
                for point in points
            )
            yield f'<polyline points="{" ".join(places)}" fill="none" stroke="{WAYS[name]}"/>'
        for tick in range(5):
            at = LEFT + WIDTH * tick / 4
            yield f'<text x="{at}" y="{base + 14}" fill="#666">{last * tick / 4:.0f} s</text>'
    yield "</svg>"


def mean_running(points: Sequence[Point]) -> float:
    """Return the mean number of running sequences."""
    return sum(point.running for point in points) / max(1, len(points))


def full_points(points: Sequence[Point]) -> list[Point]:
    """Return the points from the peak of running sequences until no other waits."""
    first = max(range(len(points)), key=lambda at: points[at].running)
    last = max((at for at, point in enumerate(points) if point.waiting), default=first)
    return [*points[min(first, last) : last + 1]]


def main() -> None:
    """Run a file in both ways and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--svg", type=Path, required=True)
    arguments, flags = parser.parse_known_args()
    ways = {
        name: run(arguments.file, [*flags, *([] if name == "plan" else [name])]) for name in WAYS
    }
    arguments.svg.write_text("\n".join(render_svg(ways)) + "\n", encoding="utf-8")
    for name, points in ways.items():
        usage = sum(point.kv_cache_usage for point in points) / len(points)
        running, seconds = mean_running(points), points[-1].seconds
        print(f"{name}: {seconds:.1f} s, {running:.0f} sequences, {usage:.0f} % in the mean")
        most, full = max(point.running for point in points), mean_running(full_points(points))
        print(f"  while others wait {full:.0f} of {most:.0f} sequences, {full / most:.1%}")


if __name__ == "__main__":
    main()
