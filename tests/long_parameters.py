"""Parameters of which `make test` runs only some: the others are marked `long`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, values: Iterable[Any]) -> list[Any]:
    """Return values as parameters, with all but one in `count` marked `long`.

    Use it if another test proves each of them, and this one meets them another way.
    """
    return [
        pytest.param(value, marks=[pytest.mark.long] if place % count else [])
        for place, value in enumerate(values)
    ]


def with_long(values: Iterable[Any], more: Iterable[Any]) -> list[Any]:
    """Return values as parameters, and more of them that are marked `long`; tuples are several."""
    return [
        *values,
        *(
            pytest.param(*(value if type(value) is tuple else (value,)), marks=pytest.mark.long)
            for value in more
        ),
    ]
