"""Breadth is named where it is."""

from __future__ import annotations

import re
from pathlib import Path

from tests.breadth import ONE_IN

ROOT = Path(__file__).parents[1]


def test_every_name_is_that_of_a_test() -> None:
    """A test that was renamed or moved is named as it is now."""
    strays = [
        f"{path}::{test}"
        for path, tests in ONE_IN.items()
        for test in tests
        if not re.search(rf"\bdef {test}\(", (ROOT / path).read_text(encoding="utf-8"))
    ]
    assert strays == []
