"""Cascade of a shard: the first model's drafts, and the lines that the second model answers."""

from __future__ import annotations

from pydantic_core import from_json, to_json

from tidemill.batch.file.decided_row import DecidedRow
from tidemill.batch.file.lines import RawLine
from tidemill.batch.model import Batch, Shard


class ShardCascade:
    """Part of a shard in the cascade of its batch; without a cascade, every row is final."""

    def __init__(self, batch: Batch, shard: Shard) -> None:
        self._escalation = batch.escalation
        self._is_second = batch.escalation is not None and shard.is_escalated

    def is_draft(self, raw: RawLine, row: bytes) -> bool:
        """Return whether the second model answers a line again after this row of the first one."""
        if self._escalation is None or self._is_second:
            return False
        return DecidedRow.parse(row).is_escalated(raw, self._escalation.below)

    def line_of(self, raw: RawLine) -> RawLine:
        """Return a line as the engine gets it: the second model's name replaces the first one's."""
        if self._escalation is None or not self._is_second:
            return raw
        line = from_json(raw.data)
        line["body"]["model"] = self._escalation.name
        return RawLine(raw.number, to_json(line, inf_nan_mode="constants"))

    def row_of(self, raw: RawLine, row: bytes) -> bytes:
        """Return the engine's row with the IDs of the original line."""
        if not self._is_second:
            return row
        return row.replace(self.line_of(raw).digest.encode(), raw.digest.encode())
