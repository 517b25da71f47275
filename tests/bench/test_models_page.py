"""docs/reference/models.md matches the engine's tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from bench.models_page import page

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"


def test_the_page_of_models_is_that_of_the_tables() -> None:
    """The page is up to date; `python -m bench.models_page --write FILE` writes it."""
    written, version = PAGE.read_text(encoding="utf-8"), transformers.__version__.split(".")[:2]
    if f"of transformers {'.'.join(version)} are tried" not in written:
        pytest.skip("another transformers has other types")
    assert page() == written, "python -m bench.models_page --write docs/reference/models.md"
