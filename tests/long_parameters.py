"""Parameters of which `make test` takes some: the others are marked `long`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, values: Iterable[Any]) -> list[Any]:
    """Return values as parameters, all but the first of each so many marked `long`.

    For what another test proves of every one of them, and is met here another way.
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
