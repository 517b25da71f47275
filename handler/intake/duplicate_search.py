"""Duplicate search: finds repeated custom ids in the scans of a file, one share in each run.

Nothing of it lies on the disk of a run, and in its memory no more than one share.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from tidemill.batch.batch_object import MAX_LISTED_ERRORS
from tidemill.batch.errors import HandlerError
from tidemill.batch.file.duplicate_ids import Duplicates, Share, find_repeated
from tidemill.batch.intake_progress import WorkUnit

from ..aws.calls import Operation
from ..aws.sync import Aws
from .scan_store import ScanStore, read_each
from .scan_summary import ScanSummary, decode_offsets, offsets_range


def search_duplicates(
    aws: Aws, found: ScanStore, survey: ScanSummary, number: int, look: Callable[[], None]
) -> Duplicates:
    """Return the repeated ids of one share; `look` is called every second or so."""
    scans = [WorkUnit.named(name) for name in survey.scans]
    share = Share.nth(number, survey.num_shares)
    rows = decode_offsets(aws.run(found.get_places(*offsets_range(share, len(scans)))), len(scans))

    def data_of(number: int) -> Operation[bytes]:
        return _ids_of(found, scans[number], rows[0][number], rows[-1][number])

    ids = list(read_each(aws, data_of, len(scans), look))
    repeated = Duplicates()
    for start, end in pairwise(rows):
        pieces = _pieces(ids, rows[0], start, end)
        numbered = _checking(zip(pieces, survey.shifts, strict=True), look)
        in_partition = find_repeated(numbered, share.slice_number, share.num_slices)
        repeated = repeated.plus(in_partition, MAX_LISTED_ERRORS)
    return repeated


def _ids_of(found: ScanStore, unit: WorkUnit, start: int, end: int) -> Operation[bytes]:
    if end == start:
        return b""
    data = yield from found.get_ids(unit, start, end)
    if len(data) != end - start:
        raise HandlerError(f"the ids of {unit} end before byte {end:,}")
    return data


def _pieces(
    ids: Iterable[bytes], base: array[int], start: array[int], end: array[int]
) -> Iterator[bytes]:
    """Yield the bytes of one partition, scan by scan."""
    for data, zero, first, last in zip(ids, base, start, end, strict=True):
        yield data[first - zero : last - zero]


def _checking(
    pieces: Iterable[tuple[bytes, int]], look: Callable[[], None]
) -> Iterator[tuple[bytes, int]]:
    for piece in pieces:
        look()
        yield piece
