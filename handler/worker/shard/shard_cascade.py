"""Cascade of a shard: the first model's drafts, and the lines that the second model answers."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.batch.file.decided_row import DecidedRow
from tidemill.batch.file.escalated_line import escalated_line
from tidemill.batch.file.lines import RawLine
from tidemill.batch.model import Batch, Shard
from tidemill.batch.parts import RowPlace


class ShardCascade:
    """Part of a shard in the cascade of its batch; without a cascade, every row is final."""

    def __init__(self, batch: Batch, shard: Shard) -> None:
        self._escalation = batch.escalation
        self._is_second = batch.escalation is not None and shard.is_escalated

    @property
    def has_drafts(self) -> bool:
        """Return whether the first model may have written drafts."""
        return self._escalation is not None

    def sure_lines(self, part: bytes, places: Sequence[RowPlace]) -> list[int]:
        """Return the lines whose draft in a part became final when the threshold was learnt."""
        found = self._escalation
        if found is None or found.learnt is None or not self._is_second:
            return []
        return [
            place.line
            for place in places
            if DecidedRow.parse(part[place.start : place.end]).is_sure(found.threshold)
        ]

    def is_draft(self, raw: RawLine, row: bytes) -> bool:
        """Return whether the second model answers a line again after this row of the first one."""
        if self._escalation is None or self._is_second:
            return False
        return DecidedRow.parse(row).is_escalated(raw, self._escalation.threshold)

    def line_of(self, raw: RawLine) -> RawLine:
        """Return a line as the engine gets it."""
        found = self._escalation
        if found is None or not self._is_second:
            return raw
        return escalated_line(raw, found.by, found.name)

    def row_of(self, raw: RawLine, row: bytes) -> bytes:
        """Return the engine's row with the IDs of the original line."""
        if not self._is_second:
            return row
        return row.replace(self.line_of(raw).digest.encode(), raw.digest.encode())
