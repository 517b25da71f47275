"""The names in tests/breadth.py exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.breadth import ONE_IN

ROOT = Path(__file__).parents[1]


def test_every_name_is_that_of_a_test() -> None:
    """A renamed or moved test must be renamed there too."""
    strays = [
        f"{path}::{test}"
        for path, tests in ONE_IN.items()
        for test in tests
        if not re.search(rf"\bdef {test}\(", (ROOT / path).read_text(encoding="utf-8"))
    ]
    assert strays == []
