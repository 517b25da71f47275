"""Formatting of numbers and times."""

from __future__ import annotations

import pytest

from tidemill.dashboard import render


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (950, "950"),
        (9999, "9,999"),
        (12345, "12.3k"),
        (999499, "999k"),
        (4560000, "4.56M"),
        (1500000000, "1.5G"),
    ],
)
def test_large_numbers_are_short(number: int, text: str) -> None:
    """About three digits, so that a column of them can be compared at a glance."""
    assert render.short(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.6, "1 min"),
        (75, "1 min 15 s"),
        (3600, "1 h"),
        (3661, "1 h 1 min"),
        (90000, "1 d 1 h"),
        (-5, "0 s"),
    ],
)
def test_time_spans_have_two_units(seconds: float, text: str) -> None:
    """The two largest units that are not zero are shown, in descending order."""
    assert render.duration(seconds) == text


@pytest.mark.parametrize(
    ("cost", "text"),
    [(None, "–"), (0, "–"), (0.00001, "< 0.0001"), (0.0123, "0.0123"), (1234.5, "1,234.50")],
)
def test_costs(cost: float | None, text: str) -> None:
    """There is no cost without a price or GPU time; a tiny cost is not shown as zero."""
    assert render.money(cost) == text


def test_a_moment_is_put_into_the_readers_zone_by_the_page() -> None:
    """The element holds the time itself, and words for who runs no script."""
    text = '<time datetime="2026-01-02T03:04:05Z">2026-01-02 03:04 UTC</time>'
    assert render.moment(1_767_323_045) == text
    assert render.moment(None) == "–"
