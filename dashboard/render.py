"""Templates with automatic escaping, and filters for numbers and times."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from .assets import HERE, url_of
from .trial import TRIAL_ENDING, TRIAL_ROWS

_WORDS: Final = {
    "validating": "Validating",
    "in_progress": "Running",
    "finalizing": "Finalizing",
    "completed": "Completed",
    "failed": "Failed",
    "expired": "Expired",
    "cancelling": "Cancelling",
    "cancelled": "Cancelled",
}
_UNITS: Final = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_NONE: Final = "–"
_CODE: Final = re.compile(r"`([^`\n]+)`")


def render(template: str, **values: Any) -> str:
    """Return a rendered template; a missing value is an error."""
    return _templates().get_template(template).render(**values)


def count(number: float) -> str:
    """Return a whole number with thousands separators."""
    return f"{number:,.0f}"


def short(number: float) -> str:
    """Return a number in about three digits: `950`, `12.3k`, `4.56M`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            divisor = 1e3 if unit == "k" else size
            return f"{number / divisor:.3g}{unit}" if number < 999.5 * divisor else count(number)
    return count(number)


def rate(number: float) -> str:
    """Return a rate, with one decimal while it is small."""
    return f"{number:.1f}" if number < 100 else count(number)


def money(cost: float | None) -> str:
    """Return a cost as a number, or a dash without a cost or a price."""
    if not cost:
        return _NONE
    if cost < 0.0001:
        return "< 0.0001"
    return f"{cost:,.2f}" if cost >= 1 else f"{cost:.4f}"


def duration(seconds: float) -> str:
    """Return a time span in its two largest units: `2 d 3 h`, `4 min 5 s`."""
    left = max(0, round(seconds))
    parts: list[str] = []
    for size, unit in _UNITS:
        number, left = divmod(left, size)
        if number or (unit == "s" and not parts):
            parts.append(f"{number} {unit}")
        elif parts:
            break
    return " ".join(parts[:2])


def hours(seconds: float) -> str:
    """Return seconds as hours, with two decimals while there are few."""
    number = seconds / 3600
    if 0 < number < 0.01:
        return "< 0.01"
    return f"{number:.2f}" if number < 10 else f"{number:,.1f}"


def with_code(text: str) -> Markup:
    """Return a text whose parts between backticks are code."""
    parts = _CODE.split(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if number % 2 else part
        for number, part in enumerate(parts)
    )


def moment(at: int | None) -> Markup | str:
    """Return a time as an element that the page's script converts to the local time zone."""
    if at is None:
        return _NONE
    then = datetime.fromtimestamp(at, UTC)
    return Markup('<time datetime="{}">{}</time>').format(
        then.strftime("%Y-%m-%dT%H:%M:%SZ"), then.strftime("%Y-%m-%d %H:%M UTC")
    )


def status_words(status: str) -> str:
    """Return the label of a status."""
    return _WORDS.get(status, status)


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "count": count,
        "duration": duration,
        "hours": hours,
        "moment": moment,
        "money": money,
        "rate": rate,
        "short": short,
        "status_words": status_words,
        "with_code": with_code,
    }
    environment.globals |= {
        "asset": url_of,
        "trial_rows": TRIAL_ROWS,
        "trial_ending": TRIAL_ENDING,
    }
    return environment
