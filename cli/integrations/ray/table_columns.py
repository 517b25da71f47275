"""Table columns: a recipe over batches of a table that come in any order, on any engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from tidemill.protocol.routes import CHAT_COMPLETIONS, COMPLETIONS

Rows = Callable[[Iterable[tuple[int, bytes]]], Awaitable[list[bytes]]]
"""Asks an engine for the rows of numbered lines."""

_WRITTEN = (CHAT_COMPLETIONS, COMPLETIONS)
_MAX_NUMBER: Final = 2**63 - 1
_ROW = r"^(Line|Row) \d+: "
