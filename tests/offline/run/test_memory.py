"""Memory grows with a file by its plan alone."""

from __future__ import annotations

from pathlib import Path

from bench.kernels.host_path import ROWS, measure, table


def test_a_long_file_takes_the_memory_of_a_short_one(tmp_path: Path) -> None:
    """Only its plan grows, by about 370 bytes per line; the benchmark runs 1,000,000 lines."""
    short, long = (measure(lines, ROWS[0], tmp_path) for lines in (2_000, 16_000))
    plan_bytes = 450 * (long.lines - short.lines)
    assert long.peak_bytes <= 1.2 * short.peak_bytes + plan_bytes
    assert long.written_bytes > 7 * short.written_bytes
    assert table([short, long]).count("\n") == 3
