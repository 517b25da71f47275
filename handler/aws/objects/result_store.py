"""Result store: cached replies of one scope, in packs below a prefix of a bucket.

Packs are immutable and can be read by anyone with access to the prefix. Their indexes are read
into a local database, and a pack is read as a whole when it contains a requested reply. If the
bucket fails, work continues without the store: errors are raised as `CacheError`.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from threading import RLock
from typing import IO, Final, NamedTuple, Protocol
from uuid import uuid4

from tidemill.batch.result_key import CacheError, Kept, Scope, unsealed
from tidemill.batch.result_pack import (
    Entry,
    PackName,
    decode_index,
    encode_pack,
    index_size,
    pack_name,
    parse_pack_name,
    scope_folder,
)

from ...errors import AwsError, NotThere
from ..bucket import Bucket, ObjectHead
from ..calls import Operation, T

PACK_BYTES: Final = 16 * 2**20
_MAX_PACKS: Final = 4096
"""Maximum number of a scope's newest packs searched; 100 files a day make fewer in a month."""

_LOCAL_BYTES: Final = 2**32
_REFRESH_SECONDS: Final = 30.0
_TRIM_SECONDS: Final = 600.0
_NUM_THREADS: Final = 16
_MAX_WRITES: Final = 4
_TABLE: Final = """
CREATE TABLE results (
    key BLOB PRIMARY KEY, pack INTEGER NOT NULL, start INTEGER NOT NULL, size INTEGER NOT NULL
) WITHOUT ROWID;
"""


class Drive(Protocol):
    """Runs operations, in any thread."""

    def __call__(self, operation: Operation[T]) -> T:
        """Return the operation's result; raises AwsError."""


class ResultStore:
    """Cached replies of a scope below `prefix`, at most `max_bytes` in all scopes together.

    Thread-safe. Its index and the packs that it has read are in a temporary folder until `close`;
    the packs take at most 4 GiB. The oldest packs of all scopes are removed to make room.
    `num_damaged` counts entries and replies that fail their checksum; they are treated as
    missing.
    """

    def __init__(
        self,
        drive: Drive,
        bucket: Bucket,
        prefix: str,
        scope: Scope,
        max_bytes: int,
        *,
        tmp_dir: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_damaged = 0
        self._drive = drive
        self._bucket = bucket
        self._prefix = prefix
        self._scope = scope
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = RLock()
        self._new: dict[bytes, Kept] = {}
        self._num_new_bytes = 0
        self._run_id, self._num_written = uuid4().hex, 0
        self._packs: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._numbers = count()
        self._local: dict[int, IO[bytes]] = {}  # packs on this machine, the latest last
        self._num_local_bytes = 0
        self._refreshed_at = self._trimmed_at = float("-inf")
        self._writes: deque[Future[None]] = deque()
        self._held = ExitStack()
        self._writer = self._held.enter_context(ThreadPoolExecutor(1))
        with _raising():
            folder = self._held.enter_context(TemporaryDirectory(dir=tmp_dir))
            self._folder = Path(folder)
            self._index = sqlite3.connect(self._folder / "index", check_same_thread=False)
            self._held.callback(self._index.close)
            self._index.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;")
            self._index.executescript(_TABLE)

    def find(self, key: bytes, digest: str, created: int) -> bytes | None:
        """Return the JSON of a stored reply, with the line's digest and creation time filled in."""
        with self._lock, _raising():
            if (new := self._new.get(key)) is not None:
                return new.reply_for(digest, created)
            self._refresh()
            place = self._index.execute(
                "SELECT pack, start, size FROM results WHERE key = ?", (key,)
            ).fetchone()
            kept = None if place is None else self._read(key, *place)
        return None if kept is None else kept.reply_for(digest, created)

    def add(self, key: bytes, digest: str, created: int, body: bytes) -> None:
        """Add the reply to a line of a digest; a pack is written once there are 16 MiB of them.

        A thread writes it; the caller waits only before the fifth pack. The next call raises the
        thread's errors.
        """
        with self._lock:
            self._new[key] = Kept(digest, created, body)
            self._num_new_bytes += len(body)
            if self._num_new_bytes >= PACK_BYTES:
                self._start_write()
            self._collect_writes(_MAX_WRITES)

    def _start_write(self) -> None:
        new, self._new, self._num_new_bytes = self._new, {}, 0
        source = f"{self._run_id}-{self._num_written:06}"
        self._num_written += 1
        self._writes.append(self._writer.submit(self.write, source, new))

    def _collect_writes(self, most: int) -> None:
        """Wait until at most that many packs are being written; raises the first error."""
        while self._writes and (self._writes[0].done() or len(self._writes) > most):
            self._writes.popleft().result()

    def write(self, source: str, replies: Mapping[bytes, Kept]) -> None:
        """Write a pack of these replies; `source` is unique to them."""
        if not replies:
            return
        with _raising():
            key = self._prefix + pack_name(self._scope, source, len(replies))
            self._drive(self._bucket.put(key, encode_pack(replies), "application/octet-stream"))
            if self._clock() >= self._trimmed_at + _TRIM_SECONDS:
                self._trimmed_at = self._clock()
                trim_packs(self._drive, self._bucket, self._prefix, self._max_bytes)

    def close(self) -> None:
        """Write the added replies, and delete the local files."""
        with self._held, self._lock:
            for pack in [*self._local]:
                self._drop(pack)
            self._start_write()
            self._collect_writes(0)

    def _refresh(self) -> None:
        """Read the indexes of new packs, and forget deleted packs."""
        if self._clock() < self._refreshed_at + _REFRESH_SECONDS:
            return
        self._refreshed_at = self._clock()
        folder = scope_folder(self._scope)
        packs = list_packs(self._drive, self._bucket, self._prefix, folder)
        packs.sort(key=lambda pack: pack.head.modified)
        listed = {pack.head.key: pack for pack in packs[-_MAX_PACKS:]}
        for key in self._packs.keys() - listed.keys():
            self._forget(self._packs[key])
        new = [pack for key, pack in listed.items() if key not in self._packs]
        with ThreadPoolExecutor(_NUM_THREADS) as pool, self._index:
            # The newest of several packs with a result is read: it may replace a damaged one.
            for pack, entries in zip(new, pool.map(self._read_index, new), strict=True):
                if entries is None:
                    continue
                number = self._packs[pack.head.key] = next(self._numbers)
                self._names[number] = pack.head.key
                self.num_damaged += pack.name.num_results - len(entries)
                self._index.executemany(
                    f"INSERT OR REPLACE INTO results VALUES (?, {number}, ?, ?)",  # noqa: S608 - a number of ours
                    entries,
                )

    def _read_index(self, pack: Pack) -> list[Entry] | None:
        """Return the valid entries of a pack; None if the pack is gone."""
        size = min(index_size(pack.name.num_results), pack.head.num_bytes)
        try:
            index = self._drive(self._bucket.get_range(pack.head.key, 0, size)) if size else b""
        except NotThere:
            return None
        return [*decode_index(index)]

    def _read(self, key: bytes, pack: int, start: int, size: int) -> Kept | None:
        if pack not in self._local:
            try:
                data = self._drive(self._bucket.get(self._names[pack]))
            except NotThere:
                self._forget(pack)
                return None
            while self._local and self._num_local_bytes + len(data) > _LOCAL_BYTES:
                self._drop(next(iter(self._local)))
            self._num_local_bytes += len(data)
            file = self._local[pack] = TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - until it is dropped
            file.write(data)
        descriptor = self._local[pack].fileno()
        is_inside = start + size <= os.fstat(descriptor).st_size
        kept = unsealed(key, os.pread(descriptor, size, start)) if is_inside else None
        self.num_damaged += kept is None
        return kept

    def _drop(self, pack: int) -> None:
        """Delete a pack's local copy."""
        with self._local.pop(pack) as file:
            self._num_local_bytes -= file.seek(0, os.SEEK_END)

    def _forget(self, pack: int) -> None:
        del self._packs[self._names.pop(pack)]
        with self._index:
            self._index.execute("DELETE FROM results WHERE pack = ?", (pack,))
        if pack in self._local:
            self._drop(pack)


class Pack(NamedTuple):
    """A pack in a bucket, with the facts that its name encodes."""

    head: ObjectHead
    name: PackName


def list_packs(drive: Drive, bucket: Bucket, prefix: str, folder: str = "") -> list[Pack]:
    """Return the packs in a folder below a prefix; the folder may contain other objects."""
    found: list[Pack] = []
    after, is_more = "", True
    while is_more:
        page, is_more = drive(bucket.list_page(prefix + folder, after))
        after = page[-1].key if page else after
        named = ((head, parse_pack_name(head.key.removeprefix(prefix))) for head in page)
        found += [Pack(head, name) for head, name in named if name is not None]
    return found


def trim_packs(drive: Drive, bucket: Bucket, prefix: str, max_bytes: int) -> None:
    """Remove the oldest packs below a prefix until all take no more than `max_bytes`."""
    heads = [pack.head for pack in list_packs(drive, bucket, prefix)]
    excess = sum(head.num_bytes for head in heads) - max_bytes
    heads.sort(key=lambda head: head.modified)
    drive(bucket.delete_all([*_oldest(heads, excess)]))


def _oldest(heads: Iterable[ObjectHead], num_bytes: int) -> Iterator[str]:
    """Yield the keys of the first objects that take at least that many bytes together."""
    for head in heads:
        if num_bytes <= 0:
            return
        yield head.key
        num_bytes -= head.num_bytes


@contextmanager
def _raising() -> Iterator[None]:
    """Raise errors of the bucket and of this machine as CacheError."""
    try:
        yield
    except (AwsError, OSError, sqlite3.Error) as exc:
        raise CacheError(f"stored results are unavailable: {exc}") from exc
