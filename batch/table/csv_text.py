"""Rows as CSV or TSV text, which any reader reads back."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any, Literal


def csv_text(rows: Sequence[Sequence[Any]], delimiter: str = ",") -> str:
    """Return rows as text; nulls are empty cells."""
    text = _text(rows, delimiter, csv.QUOTE_MINIMAL)
    if "\r" in text:
        # Python before 3.13 leaves it unquoted, and readers would end the row there.
        text = _text(rows, delimiter, csv.QUOTE_ALL)
    return text


def _text(rows: Sequence[Sequence[Any]], delimiter: str, quoting: Literal[0, 1]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n", quoting=quoting)
    writer.writerows(rows)
    return text.getvalue()
