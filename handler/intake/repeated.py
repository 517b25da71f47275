"""Repeated custom ids in what the runs over a file have left: found share by share, in many runs.

Nothing of it lies on the disk of a run, and in its memory no more than one share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.batchfile.duplicates import (
    HEADER_BYTES,
    NUM_PARTITIONS,
    Duplicates,
    SavedIds,
    Share,
    count_shares,
    repeated_in,
)
from handler.aws.calls import Operation
from handler.batch.keys import ids_key
from handler.batch.wire import MAX_LISTED_ERRORS
from handler.errors import HandlerError
from handler.moves.turn import RESERVE_SECONDS, ComeBack, Run

# Of ids, on the processor of a Lambda: a quarter of what one core of a server does.
_SEARCHED_PER_SECOND = 500_000


@dataclass(slots=True)
class Search:
    """How far the search has come: so many shares are done, and what they had."""

    num_done: int = 0
    found: Duplicates = field(default_factory=Duplicates)


def find_saved(
    run: Run,
    offsets: Sequence[int],
    search: Search,
    *,
    num_ids: int,
    has_progressed: bool,
    look: Callable[[], None],
    keep: Callable[[], None],
) -> Duplicates:
    """Go on with a search for repeated ids in the objects that end at `offsets`, to its end.

    Raises ComeBack when the time is nearly over, but for the first share of a run that has not
    progressed otherwise. `look` is called every second or so, `keep` when a share is done that is
    not the last.
    """
    saved = run.aws.run_all(_read_header(run, offset) for offset in offsets)
    num_shares = count_shares(num_ids)
    # Slices of a partition are told apart by going through all of it.
    seconds = num_ids / min(num_shares, NUM_PARTITIONS) / _SEARCHED_PER_SECOND
    while search.num_done < num_shares:
        if has_progressed and run.time_left() < RESERVE_SECONDS + seconds:
            raise ComeBack
        share = Share.of(search.num_done, num_shares)
        pieces = run.aws.run_all(
            _read_share(run, offset, where, share)
            for offset, where in zip(offsets, saved, strict=True)
        )
        for partition in zip(*pieces, strict=True):
            found = repeated_in(_each(partition, look), share.slice_number, share.num_slices)
            search.found = search.found.plus(found, MAX_LISTED_ERRORS)
        search.num_done += 1
        if search.num_done < num_shares:
            keep()
        has_progressed = True
    return search.found


def _each(pieces: Iterable[bytes], look: Callable[[], None]) -> Iterator[bytes]:
    for piece in pieces:
        look()
        yield piece


def _read_header(run: Run, offset: int) -> Operation[SavedIds]:
    return SavedIds((yield from _read(run, offset, 0, HEADER_BYTES)))


def _read_share(run: Run, offset: int, saved: SavedIds, share: Share) -> Operation[list[bytes]]:
    start, end = saved.range_of(share)
    data = (yield from _read(run, offset, start, end)) if end > start else b""
    return saved.split(data, share)


def _read(run: Run, offset: int, start: int, end: int) -> Operation[bytes]:
    key = ids_key(run.batch.id, offset)
    data = yield from run.deployment.bucket.get_range(key, start, end)
    if len(data) != end - start:
        raise HandlerError(f"{key} ends before byte {end:,}")
    return data
