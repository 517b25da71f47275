"""Scan summary: a whole file's numbers of lines and shards, models and offsets, from its scans.

No I/O: scans come in order, as values.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from tidemill.batch.batch_object import MAX_LISTED_ERRORS
from tidemill.batch.file.duplicate_ids import NUM_PARTITIONS, RECORD_BYTES, Share, count_shares
from tidemill.batch.file.lines import endless_line
from tidemill.batch.intake_progress import WorkUnit
from tidemill.batch.model import Shard
from tidemill.batch.validation import Findings

from .scan import PlannedShard, ScanResult


@dataclass(slots=True)
class ScanSummary:
    """Summary of a file's scans.

    `scans` are the units that scanned it, in order. The `n`th scan's local line numbers are shifted
    by `shifts[n]`; its first shard is `first_shards[n]`, whose last entry is the number of shards.
    `num_ids` is the number of IDs searched for duplicates.
    """

    findings: Findings = field(default_factory=Findings)
    scans: list[str] = field(default_factory=list)
    shifts: list[int] = field(default_factory=list)
    first_shards: list[int] = field(default_factory=lambda: [0])
    num_ids: int = 0
    num_lines: int = 0

    @property
    def num_shards(self) -> int:
        """Return the number of shards of the file."""
        return self.first_shards[-1]

    @property
    def num_shares(self) -> int:
        """Return the number of shares into which the search for duplicates is divided."""
        return count_shares(self.num_ids)

    def add(self, unit: WorkUnit, scanned: ScanResult) -> None:
        """Add the next scan's results; FormatError for a scan with a line that never ends."""
        # Line 1 of any range but the first is the last line of the ranges before.
        shift = self.num_lines - 1 if self.shifts else 0
        if scanned.endless is not None:
            raise endless_line(scanned.endless + shift)
        self.scans.append(str(unit))
        self.shifts.append(shift)
        self.num_lines = shift + scanned.last_line
        self.first_shards.append(self.num_shards + len(scanned.cuts))
        self.num_ids += sum(scanned.ids)
        self._add_findings(scanned.findings, shift)

    def _add_findings(self, found: Findings, shift: int) -> None:
        whole = self.findings
        whole.num_rows += found.num_rows
        whole.model = whole.model or found.model
        whole.endpoint = whole.endpoint or found.endpoint
        whole.num_errors += found.num_errors
        whole.expected += found.expected
        whole.unknown.merge(found.unknown, shift)
        room = MAX_LISTED_ERRORS - len(whole.errors)
        whole.errors += [
            replace(error, line=error.line + shift if error.line else None)
            for error in found.errors[: max(0, room)]
        ]


def scans_of_other_models(models: Iterable[str | None]) -> list[int]:
    """Return the scans that assumed another model than the file's, which the first scan finds."""
    numbered = [(number, model) for number, model in enumerate(models) if model is not None]
    return [number for number, model in numbered if model != numbered[0][1]]


def shards_of(
    batch_id: str, cuts: Iterable[PlannedShard], *, first: int, shift: int, expires: int | None
) -> Iterator[Shard]:
    """Yield the shards of a scan, given the number of its first shard in the file."""
    for number, cut in enumerate(cuts, first):
        yield Shard(
            batch_id,
            number,
            cut.first_line + shift,
            cut.num_rows,
            cut.start,
            cut.end,
            expires=expires,
            expected=cut.expected,
        )


class IdOffsets:
    """Offsets of each partition of ids in the object of each scan, partition by partition.

    So the search for duplicates in one partition reads only that part of each object.
    """

    def __init__(self) -> None:
        self._starts: list[array[int]] = []

    def add(self, counts: Sequence[int]) -> None:
        """Add the number of IDs in each partition of the next scan."""
        sizes = (count * RECORD_BYTES for count in counts)
        self._starts.append(array("Q", accumulate(sizes, initial=0)))

    def dump(self) -> bytes:
        """Return the offsets as bytes, for `decode_offsets`."""
        rows = range(NUM_PARTITIONS + 1)
        return b"".join(array("Q", (each[row] for each in self._starts)).tobytes() for row in rows)


def offsets_range(share: Share, num_scans: int) -> tuple[int, int]:
    """Return the range of bytes of `IdOffsets.dump` for a share: its first, and its end."""
    row = 8 * num_scans
    return share.first * row, (share.end + 1) * row


def decode_offsets(data: bytes, num_scans: int) -> list[array[int]]:
    """Return those bytes as lists: where each partition begins in each scan, and its end."""
    starts = array("Q", data)
    return [starts[first : first + num_scans] for first in range(0, len(starts), num_scans)]
