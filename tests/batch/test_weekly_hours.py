"""Weekly hours, as configured."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tidemill.batch.weekly_hours import WeeklyHours


def at(day: int, hour: int, minute: int = 0) -> float:
    """Return a time in the week of Monday, 2 January 2023."""
    return datetime(2023, 1, 1 + day, hour, minute, tzinfo=UTC).timestamp()


MON, WED, FRI, SAT, SUN = 1, 3, 5, 6, 7


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("", [at(MON, 0), at(SUN, 23, 59)], []),
        (
            "Mon-Fri 07:00-18:00",
            [at(MON, 7), at(FRI, 17, 59)],
            [at(MON, 6, 59), at(WED, 18), at(SAT, 12)],
        ),
        ("07:30-08:00", [at(SUN, 7, 30), at(WED, 7, 59)], [at(WED, 7, 29), at(WED, 8)]),
        ("Mon 08:00-09:00, Sat 10:00-12:00", [at(MON, 8), at(SAT, 11)], [at(MON, 11), at(SAT, 8)]),
        # Past midnight, and past the end of the week.
        ("Sun 22:00-06:00", [at(SUN, 23), at(MON, 5, 59)], [at(MON, 6), at(SAT, 23)]),
        ("Sat-Mon 00:00-24:00", [at(SAT, 0), at(SUN, 12), at(MON, 23)], [at(FRI, 23), at(WED, 0)]),
    ],
)
def test_a_time_is_inside_or_outside(text: str, inside: list[float], outside: list[float]) -> None:
    """It is exact to the minute, in UTC."""
    hours = WeeklyHours.parse(text)
    assert all(hours.covers(moment) for moment in inside)
    assert not any(hours.covers(moment) for moment in outside)


@pytest.mark.parametrize(
    "text",
    [
        "Mon",
        "weekdays 07:00-18:00",
        "7:00-18:00",
        "07:00-18:00,",
        "25:00-26:00",
        "18:00-24:30",
        "24:59-06:00",
    ],
)
def test_invalid_spans_are_refused(text: str) -> None:
    """The error shows an example."""
    with pytest.raises(ValueError, match="is not a span such as Mon-Fri 07:00-18:00"):
        WeeklyHours.parse(text)
