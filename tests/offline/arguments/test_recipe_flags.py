"""Flags of recipes."""

from __future__ import annotations

from tidemill.batch.table.questions import LAYOUTS, TABLE_LAYOUT
from tidemill.offline.arguments import recipe_flags


def test_layouts_of_the_flags_are_those_of_recipes() -> None:
    """Help lists them without loading recipes; the default comes first."""
    assert (TABLE_LAYOUT, *(one for one in LAYOUTS if one != TABLE_LAYOUT)) == recipe_flags._LAYOUTS
