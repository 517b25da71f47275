"""Finds the rows of a shard: in the segments of its commit, or before that in its parts.

The parts of a running shard are listed, and the header of each is read once. If the rows of a
retry were merged, they are in the files of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from tidemill.batch.errors import BadPart, HandlerError
from tidemill.batch.merged_rows import RowRun, decode_merged_index, merged_key
from tidemill.batch.model import Batch, Shard, ShardStatus
from tidemill.batch.object_keys import part_prefix
from tidemill.batch.parts import RowKind
from tidemill.batch.result_kinds import ERRORS, KINDS, OUTPUT, ResultKind, has_merged_rows
from tidemill.batch.results_object import GONE_CODE

from ..aws.calls import Operation
from ..aws.sync import Aws
from ..deployment import Deployment
from ..errors import NotThere
from ..observability import logger
from .part_cache import PartCache, PartRows, Place

T = TypeVar("T")

# Limits of one reply: an API Lambda has half a minute, and a small share of a vCPU.
MAX_HEADS: Final = 512
_ALL_KINDS: Final = frozenset(RowKind)


class WorkGone(HandlerError):
    """Parts and segments were deleted: only the batch's files contain the rows."""

    code = GONE_CODE


class NotIndexed(HandlerError):
    """More parts than one reply may read; they are cached, so that the next reply continues."""

    code = "not_indexed"


class ByteRange(NamedTuple):
    """Bytes `start` to `end` (exclusive) of an object."""

    key: str
    start: int
    end: int


@dataclass(slots=True)
class RowFinder:
    """Finds the rows of one batch for one reply, within its limits.

    `versions` are those of the objects that may be replaced. `guess` returns ranges that
    probably contain the rows of a shard; they are read together with its index. Raises WorkGone for
    a batch whose files were deleted.
    """

    aws: Aws
    deployment: Deployment
    batch: Batch
    cache: PartCache
    heads_left: int = MAX_HEADS
    versions: dict[str, str | None] = field(default_factory=dict)
    guess: Callable[[Shard], Iterable[ByteRange]] = lambda _: ()
    _guessed: dict[ByteRange, bytes] = field(default_factory=dict)
    _keys: dict[int, list[str]] = field(default_factory=dict)
    _files: dict[ResultKind, str] = field(default_factory=dict)
    _is_merged: bool = False

    def __post_init__(self) -> None:
        self._is_merged = has_merged_rows(self.batch)
        if self._is_merged:
            self._find_files()

    def may_have_rows(self, shard: Shard, kinds: Collection[RowKind] = _ALL_KINDS) -> bool:
        """Return whether a shard may have such rows, perhaps ones that the table does not know."""
        if self._is_merged:
            return True
        if shard.status is not ShardStatus.DONE:
            return shard.fence > 0
        has_failed = bool(shard.error_sizes) and RowKind.FAILED in kinds
        if RowKind.WHOLE in kinds:
            return has_failed or bool(shard.output_sizes)
        is_truncated = bool(shard.output_sizes) and shard.progress.truncated > 0
        return has_failed or (is_truncated and RowKind.TRUNCATED in kinds)

    def list_objects(self, shards: Sequence[Shard]) -> None:
        """List the objects that contain the rows of these shards, concurrently."""
        running: list[Shard] = []
        for shard in shards:
            if self._is_merged:
                index = merged_key(self.batch, shard.number)
                self._keys[shard.number] = [_rows_of(index, kind) for kind in KINDS]
            elif shard.status is ShardStatus.DONE:
                self._keys[shard.number] = [key for kind in KINDS for key in _segments(kind, shard)]
            else:
                running.append(shard)
        bucket, batch_id = self.deployment.bucket, self.batch.id
        listed = self.aws.run_all(
            bucket.list_keys(part_prefix(batch_id, shard.number)) for shard in running
        )
        for shard, keys in zip(running, listed, strict=True):
            # The owner's rows first: an older owner's late part may contain such a line too.
            self._keys[shard.number] = sorted(keys, reverse=True)

    def load(self, shards: Sequence[Shard]) -> None:
        """List the objects of these shards and read their indexes concurrently, as far as possible.

        Raises WorkGone if sealed rows are missing.
        """
        self.list_objects(shards)
        with suppress(NotIndexed):
            self._read_indexes([shard for shard in shards if self._unknown(shard)])

    def read(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return these bytes; raises NotThere."""
        found = {wanted: self._known(wanted) for wanted in ranges}
        missing = [wanted for wanted, data in found.items() if data is None]
        found |= zip(missing, self.aws.run_all(map(self._read, missing)), strict=True)
        return [found[wanted] or b"" for wanted in ranges]

    def _known(self, wanted: ByteRange) -> bytes | None:
        """Return bytes that were read together with an index, or None."""
        for each, data in self._guessed.items():
            if each.key == wanted.key and each.start <= wanted.start and wanted.end <= each.end:
                return data[wanted.start - each.start : wanted.end - each.start]
        return None

    def _read(self, wanted: ByteRange) -> Operation[bytes]:
        bucket, version = self.deployment.bucket, self.versions.get(wanted.key)
        return (yield from bucket.get_range(*wanted, version))

    def _unknown(self, shard: Shard) -> list[str]:
        """Return the objects of a listed shard whose rows are unknown."""
        return [key for key in self._keys[shard.number] if self.cache.part(key) is None]

    def find(
        self, shard: Shard, kinds: Collection[RowKind] = _ALL_KINDS
    ) -> dict[int, tuple[str, Place]]:
        """Return object and place of each row of a listed shard, by its line.

        Rows of other kinds are left out. Raises NotIndexed, and WorkGone if sealed rows are
        missing.
        """
        if self._unknown(shard):
            self._read_indexes([shard])
        if self._is_merged:
            return self._find_merged(shard, kinds)
        found: dict[int, tuple[str, Place]] = {}
        for key in self._keys[shard.number]:
            part = self.cache.part(key)
            if part is None:
                continue
            if shard.status is ShardStatus.DONE and kinds != _ALL_KINDS:
                found |= {place.line: (key, place) for place in part.of_kinds(kinds)}
                continue
            for place in part:
                found.setdefault(place.line, (key, place))
        if kinds == _ALL_KINDS:
            return found
        return {line: row for line, row in found.items() if row[1].kind in kinds}

    def _find_files(self) -> None:
        """Find the files of a merged batch."""
        ids = {kind: file_id for kind in KINDS if (file_id := kind.field(self.batch, "file_id"))}
        found = self.aws.run_all(map(self.deployment.files.get_file, ids.values()))
        for (kind, file_id), file in zip(ids.items(), found, strict=True):
            if file is None:
                raise WorkGone(f"file {file_id} of {self.batch.id}")
            self._files[kind] = file.key
            self.versions[file.key] = file.version_id

    def _find_merged(
        self, shard: Shard, kinds: Collection[RowKind]
    ) -> dict[int, tuple[str, Place]]:
        """Return the same for a batch with the rows of a retry."""
        index = merged_key(self.batch, shard.number)
        parts = {kind: self.cache.part(_rows_of(index, kind)) for kind in self._files}
        return {
            place.line: (self._files[kind], place)
            for kind, part in parts.items()
            if part is not None
            for place in part.of_kinds(kinds)
        }

    def _read_indexes(self, shards: Sequence[Shard]) -> None:
        if self._is_merged:
            self._read_merged(shards)
            return
        self._read_seals([shard for shard in shards if shard.status is ShardStatus.DONE])
        running = (shard for shard in shards if shard.status is not ShardStatus.DONE)
        self._read_heads([key for shard in running for key in self._unknown(shard)])

    def _read_merged(self, shards: Sequence[Shard]) -> None:
        keys = [merged_key(self.batch, shard.number) for shard in shards]
        some = self._take(keys)
        try:
            read = self.aws.run_all(map(self.deployment.bucket.get, some))
            indexes = [decode_merged_index(each) for each in read]
        except (BadPart, NotThere) as exc:
            raise WorkGone(f"merged rows of {self.batch.id}") from exc
        for key, index in zip(some, indexes, strict=True):
            runs: list[tuple[ResultKind, RowRun, RowKind]] = [
                (OUTPUT, index.output, RowKind.SUCCESS),
                (ERRORS, index.errors, RowKind.FAILED),
            ]
            for kind, run, row_kind in runs:
                rows = PartRows.from_segment(run.rows, row_kind, start=run.start)
                self.cache.put_part(_rows_of(key, kind), rows)
        self._check_all_read(some, keys)

    def _read_seals(self, shards: Sequence[Shard]) -> None:
        some = self._take(shards)
        ranges = [each for shard in some for each in self.guess(shard)]
        bucket = self.deployment.bucket
        reads: list[Operation[Any]] = [*map(bucket.read_seal, some), *map(self._read, ranges)]
        try:
            read = self.aws.run_all(reads)
        except (BadPart, NotThere) as exc:
            raise WorkGone(f"sealed rows of {self.batch.id}") from exc
        self._guessed = dict(zip(ranges, read[len(some) :], strict=True))
        for shard, seal in zip(some, read, strict=False):
            truncated = frozenset(seal.truncated or ())
            success = RowKind.SUCCESS if seal.truncated is None else RowKind.WHOLE
            for key, rows in zip(_segments(OUTPUT, shard), seal.output, strict=True):
                self.cache.put_part(key, PartRows.from_segment(rows, success, truncated))
            for key, rows in zip(_segments(ERRORS, shard), seal.errors, strict=True):
                self.cache.put_part(key, PartRows.from_segment(rows, RowKind.FAILED))
        self._check_all_read(some, shards)

    def _read_heads(self, keys: Sequence[str]) -> None:
        some = self._take(keys)
        read = self.aws.run_all(self._read_head(key) for key in some)
        for key, rows in zip(some, read, strict=True):
            self.cache.put_part(key, rows)
        self._check_all_read(some, keys)

    def _take(self, items: Sequence[T]) -> Sequence[T]:
        """Return as many of the indexes as this reply may still read."""
        some = items[: self.heads_left]
        self.heads_left -= len(some)
        return some

    def _check_all_read(self, some: Sequence[object], items: Sequence[object]) -> None:
        if len(some) < len(items):
            raise NotIndexed(f"{len(items) - len(some)} indexes of {self.batch.id}")

    def _read_head(self, key: str) -> Operation[PartRows]:
        """Return the rows of a part; none if it is unreadable, or was deleted in the meantime."""
        try:
            return PartRows.from_part((yield from self.deployment.bucket.read_head(key)))
        except (BadPart, NotThere) as exc:
            logger.error("part unreadable", batch_id=self.batch.id, key=key, reason=str(exc))
        return PartRows.from_part(())


def _segments(kind: ResultKind, shard: Shard) -> list[str]:
    return [segment.key for segment in kind.segments_of(shard)]


def _rows_of(index: str, kind: ResultKind) -> str:
    """Return the cache key of the rows of one kind in a merged index."""
    return f"{index}/{kind.name}"
