"""Repeated custom ids in what the scans of a file have left: one share of them, in one run.

Nothing of it lies on the disk of a run, and in its memory no more than one share.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from engine.batchfile.duplicates import Duplicates, Share, repeated_in
from handler.aws.calls import Operation
from handler.aws.sync import Aws
from handler.batch.intake import Unit
from handler.batch.wire import MAX_LISTED_ERRORS
from handler.errors import HandlerError
from handler.intake.found import Found, each
from handler.intake.survey import Survey, bytes_of, rows_of


def search(
    aws: Aws, found: Found, survey: Survey, number: int, look: Callable[[], None]
) -> Duplicates:
    """Return the repeated ids of one share; `look` is called every second or so."""
    scans = [Unit.named(name) for name in survey.scans]
    share = Share.of(number, survey.num_shares)
    rows = rows_of(aws.run(found.get_places(*bytes_of(share, len(scans)))), len(scans))

    def data_of(number: int) -> Operation[bytes]:
        return _ids_of(found, scans[number], rows[0][number], rows[-1][number])

    ids = list(each(aws, data_of, len(scans), look))
    repeated = Duplicates()
    for start, end in pairwise(rows):
        pieces = _pieces(ids, rows[0], start, end)
        numbered = _looking(zip(pieces, survey.shifts, strict=True), look)
        in_partition = repeated_in(numbered, share.slice_number, share.num_slices)
        repeated = repeated.plus(in_partition, MAX_LISTED_ERRORS)
    return repeated


def _ids_of(found: Found, unit: Unit, start: int, end: int) -> Operation[bytes]:
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


def _looking(
    pieces: Iterable[tuple[bytes, int]], look: Callable[[], None]
) -> Iterator[tuple[bytes, int]]:
    for piece in pieces:
        look()
        yield piece
