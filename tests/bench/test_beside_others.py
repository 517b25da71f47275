"""Others on the machine: as many as asked for, and none left behind."""

from __future__ import annotations

import os

import pytest

from bench.beside_others import busy
from bench.processes import descendants


def fails_beside(count: int, before: set[int]) -> None:
    """Fail beside so many others, which must be there."""
    with busy(count):
        assert len(set(descendants(os.getpid())) - before) == count
        raise ValueError("no")


def test_the_others_are_gone_afterwards() -> None:
    """Also where what they were there for fails."""
    before = set(descendants(os.getpid()))
    with pytest.raises(ValueError, match="no"):
        fails_beside(2, before)
    assert set(descendants(os.getpid())) <= before
