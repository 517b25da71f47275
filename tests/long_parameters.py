"""Parameters that only `make test-all` adds; tests/breadth.py thins out grids of equal ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def with_long(values: Iterable[Any], more: Iterable[Any]) -> list[Any]:
    """Return values as parameters, and more of them that are marked `long`; tuples are several."""
    return [
        *values,
        *(
            pytest.param(*(value if type(value) is tuple else (value,)), marks=pytest.mark.long)
            for value in more
        ),
    ]
