"""Cells without a text, apart from Arrow's types: templates are compiled without Arrow too."""

from __future__ import annotations

from typing import NamedTuple


class NoText(NamedTuple):
    """A cell that a template cannot print, with advice."""

    what: str
    way: str = ""
