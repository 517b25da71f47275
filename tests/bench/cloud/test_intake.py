"""Cost of intake: one core is measured, the rest is added up."""

from __future__ import annotations

import pytest

from bench.cloud.intake import Lines, Rates, measure, simulate

RATES = Rates(60_000, 1_000_000)


def test_lines_have_the_requested_length() -> None:
    """They are requests with unique ids, whatever pieces they are read in."""
    lines = Lines(300)
    assert len(lines.line(7)) == 300
    stream = lines.open()
    data = b"".join(stream.read(size) for size in (1, 700, 499))
    assert data == b"".join(lines.line(number) for number in range(4))


def test_one_core_is_measured() -> None:
    """A range of a megabyte, of which every id is searched."""
    found = measure(1000, 2**20)
    assert found.scanned > 0
    assert found.searched > 0


def test_ten_to_the_ninth_lines_take_less_than_twenty_minutes() -> None:
    """Fifty runs are enough, even if each reaches only half of the expected rate."""
    assert simulate(10**9, 1000, 50, RATES).total < 20 * 60
    assert simulate(10**9, 1000, 50, Rates(30_000, 500_000)).total < 20 * 60


@pytest.mark.parametrize("num_lines", [10**6, 10**9])
def test_more_runs_are_quicker_and_cost_the_same(num_lines: int) -> None:
    """A file of a few ranges gains nothing from more runs than it has of those."""
    few, many = (simulate(num_lines, 1000, num_runs, RATES) for num_runs in (4, 400))
    assert few.price == many.price
    assert (many.scan < few.scan / 20) == (num_lines > 10**6)
