"""Cascade of a shard: the first model's drafts, and the lines that the second model answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidemill.protocol.contract import Usage

from .file.decided_row import DecidedRow
from .file.escalated_line import escalated_line
from .file.lines import RawLine
from .model import Batch, Shard
from .parts import FinishedRow, RowPlace


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
        if found is None or found.learnt is None:
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

    def replaces(self, row: FinishedRow) -> bool:
        """Return whether a line's draft is better than this row: the second model has failed."""
        return self._is_second and not row.is_success

    def with_draft(self, row: FinishedRow, draft: bytes) -> FinishedRow:
        """Return the first model's answer with the error in the second one's row, if there is one.

        The tokens of the second model count.
        """
        assert self._escalation is not None
        first, second = DecidedRow.parse(draft), DecidedRow.parse(row.row)
        if first.body is None:
            return row
        kept = first.or_second(second, self._escalation.name)
        return row._replace(row=kept.data, is_success=True, has_escalation_error=True)

    def row_of_draft(self, place: RowPlace, draft: bytes, reason: Mapping[str, str]) -> FinishedRow:
        """Return the row of a line that the second model did not run, with the reason.

        Its tokens are counted as a draft's tokens.
        """
        assert self._escalation is not None
        row = FinishedRow(place.line, draft, place.is_success, Usage(), is_reused=place.is_reused)
        first = DecidedRow.parse(draft)
        if first.body is None:
            return row
        kept = first.with_escalation_error(self._escalation.name, reason)
        return row._replace(row=kept.data, has_escalation_error=True)
