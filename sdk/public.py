"""Decorator for the names that `from tidemill import …` provides."""

from __future__ import annotations

from typing import Any, TypeVar

_Public = TypeVar("_Public", bound=Any)


def public(item: _Public) -> _Public:
    """Set `__module__` to `tidemill`, the name that tracebacks and `help` show."""
    item.__module__ = "tidemill"
    return item
