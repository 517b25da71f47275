"""Weekly hours in UTC, such as `Mon-Fri 07:00-18:00, Sat 08:00-12:00`. No I/O, no clock."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_DAY, _TIME = f"({'|'.join(_DAYS)})", r"([01]\d|2[0-3]|24(?=:00)):([0-5]\d)"
_SPAN = re.compile(rf"(?:{_DAY}(?:-{_DAY})? )?{_TIME}-{_TIME}")
_MINUTES_OF_DAY = 24 * 60
_MINUTES_OF_WEEK = 7 * _MINUTES_OF_DAY
# The first day of Unix time was a Thursday.
_EPOCH_MINUTE = 3 * _MINUTES_OF_DAY


@dataclass(frozen=True, slots=True)
class WeeklyHours:
    """Spans of the week, each from one minute of it to another, which may be in the next week."""

    spans: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse comma-separated spans; one without days is for every day, and empty text is always.

        A span that ends before it begins ends on the next day. Raises ValueError.
        """
        spans: list[tuple[int, int]] = []
        for part in text.split(",") if text else ["00:00-24:00"]:
            match = _SPAN.fullmatch(part.strip())
            if match is None:
                raise ValueError(f"{part.strip()!r} is not a span such as Mon-Fri 07:00-18:00")
            first, last, *times = match.groups()
            begin, end = (int(hour) * 60 + int(minute) for hour, minute in (times[:2], times[2:]))
            if begin >= end:
                end += _MINUTES_OF_DAY
            start = _DAYS.index(first) if first else 0
            stop = _DAYS.index(last or first) if first else len(_DAYS) - 1
            for day in range(start, start + (stop - start) % len(_DAYS) + 1):
                offset = day % len(_DAYS) * _MINUTES_OF_DAY
                spans.append((offset + begin, offset + end))
        return cls(tuple(spans))

    def covers(self, at: float) -> bool:
        """Say whether a time (Unix seconds) is in one of the spans."""
        minute = (int(at // 60) + _EPOCH_MINUTE) % _MINUTES_OF_WEEK
        moments = (minute, minute + _MINUTES_OF_WEEK)
        return any(begin <= moment < end for begin, end in self.spans for moment in moments)


def number_at(number: int, hours: str, now: float) -> int:
    """Return a number during these hours, and 0 outside of them."""
    return number if number and WeeklyHours.parse(hours).covers(now) else 0
