"""Joins objects to one by a multipart upload, which any run can resume."""

from __future__ import annotations

import io
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from threading import BoundedSemaphore, Event
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tidemill.batch.parts import Slice
from tidemill.batch.result_kinds import SealedSegment

from ..bucket import Bucket
from ..sync import Aws
from .upload_plan import S3_LIMITS, Group, UploadPart, plan_groups, plan_upload

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Most parts are copied inside S3; each part that is sent takes up to 10 MiB of memory.
_NUM_THREADS = 64
_NUM_SENT_AT_ONCE = 24
_LOOK_SECONDS = 1.0
_BUFFER_BYTES = 2**20

_sending = BoundedSemaphore(_NUM_SENT_AT_ONCE)
Task = TypeVar("Task")
Result = TypeVar("Result")


class JoinUpload(NamedTuple):
    """An object being written: its key, the upload's ID, and its segments."""

    key: str
    id: str
    segments: Sequence[SealedSegment]


def send_missing(
    aws: Aws, bucket: Bucket, joining: JoinUpload, check: Callable[[], None]
) -> dict[int, str]:
    """Upload the missing parts concurrently, and return the ETags of all.

    `check` is called before each part and while waiting for parts; its exceptions propagate.
    Raises NotThere if the upload is gone. No other caller may have sent different bytes to it.
    """
    there = aws.run(bucket.list_uploaded(joining.key, joining.id))
    etags: dict[int, str] = {}
    missing: list[UploadPart] = []
    for part in plan_upload((segment.num_bytes for segment in joining.segments), S3_LIMITS):
        etag, num_bytes = there.get(part.number, ("", -1))
        if num_bytes == part.num_bytes:
            etags[part.number] = etag
        else:
            missing.append(part)

    def send(part: UploadPart, _: Event) -> tuple[int, str]:
        return part.number, _send_part(aws, bucket, joining, part)

    return etags | dict(_each(send, missing, check))


def join_groups(
    aws: Aws,
    bucket: Bucket,
    segments: Sequence[SealedSegment],
    prefix: str,
    check: Callable[[], None],
) -> Sequence[SealedSegment]:
    """Return inputs for one upload: the segments, or intermediate objects joined from them.

    Their keys contain their byte ranges of the whole, so objects from other runs are found again,
    and writing one twice changes nothing. `check` is as with `send_missing`.
    """
    sizes = array("Q", (segment.num_bytes for segment in segments))
    groups = list(plan_groups(sizes, S3_LIMITS))
    if not groups:
        return segments
    there = aws.run(bucket.list_sizes(prefix))
    joined = [
        SealedSegment(f"{prefix}{group.start:015}-{group.num_bytes:011}", group.num_bytes)
        for group in groups
    ]
    missing = [
        (group, segment)
        for group, segment in zip(groups, joined, strict=True)
        if there.get(segment.key) != segment.num_bytes
    ]

    def make(task: tuple[Group, SealedSegment], is_over: Event) -> None:
        group, made = task
        _make_object(aws, bucket, made.key, segments[group.first : group.end], is_over)

    _each(make, missing, check)
    return joined


def _make_object(
    aws: Aws, bucket: Bucket, key: str, segments: Sequence[SealedSegment], is_over: Event
) -> None:
    """Join segments to one object; nothing if the whole is already finished."""
    upload = JoinUpload(key, aws.run(bucket.create_work_upload(key)), segments)
    etags: dict[int, str] = {}
    for part in plan_upload((segment.num_bytes for segment in segments), S3_LIMITS):
        if is_over.is_set():
            aws.run(bucket.abort_upload(key, upload.id))
            return
        etags[part.number] = _send_part(aws, bucket, upload, part)
    aws.run(bucket.complete_upload(key, upload.id, etags))


def _each(
    do: Callable[[Task, Event], Result], tasks: Iterable[Task], check: Callable[[], None]
) -> list[Result]:
    """Return the results in no particular order; calls run concurrently.

    If `check` or a call raises, the event cancels the calls in progress, and they are awaited.
    """
    rest = iter(tasks)
    results: list[Result] = []
    in_flight: set[Future[Result]] = set()
    is_over = Event()
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        try:
            while True:
                for task in islice(rest, _NUM_THREADS - len(in_flight)):
                    check()
                    in_flight.add(pool.submit(do, task, is_over))
                if not in_flight:
                    return results
                done, in_flight = wait(in_flight, _LOOK_SECONDS, FIRST_COMPLETED)
                results += [future.result() for future in done]
                if not done:
                    check()
        finally:
            is_over.set()


def _send_part(aws: Aws, bucket: Bucket, joining: JoinUpload, part: UploadPart) -> str:
    if part.is_copy:
        [(index, start, end)] = part.pieces
        key, num_bytes = joining.segments[index]
        span = None if end - start == num_bytes else (start, end)
        return aws.run(bucket.copy_part(joining.key, joining.id, part.number, key, span))
    slices = [Slice(joining.segments[index].key, start, end) for index, start, end in part.pieces]
    with _sending, open_joined(slices, lambda piece: aws.run(bucket.get_range(*piece))) as body:
        return aws.run(bucket.upload_part(joining.key, joining.id, part.number, body))


def open_joined(slices: Sequence[Slice], get: Callable[[Slice], bytes]) -> io.BufferedReader:
    """Return the slices' concatenated bytes as a seekable file that holds one slice at a time."""
    # Buffered, because S3 accepts no short read within a part.
    return io.BufferedReader(_Joined(slices, get), _BUFFER_BYTES)


class _Joined(io.RawIOBase):
    def __init__(self, slices: Sequence[Slice], get: Callable[[Slice], bytes]) -> None:
        self._slices = slices
        self._get = get
        self._position = 0
        self._held: tuple[Slice, bytes] | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        size = sum(piece.end - piece.start for piece in self._slices)
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer).cast("B")
        start = 0
        for piece in self._slices:
            offset, num_bytes = self._position - start, piece.end - piece.start
            if offset < num_bytes:
                data = self._bytes_of(piece)[offset : offset + len(view)]
                view[: len(data)] = data
                self._position += len(data)
                return len(data)
            start += num_bytes
        return 0

    def _bytes_of(self, piece: Slice) -> bytes:
        if self._held is None or self._held[0] != piece:
            self._held = None
            data = self._get(piece)
            if len(data) != piece.end - piece.start:
                raise OSError(f"{piece.key} has no bytes {piece.start:,} to {piece.end:,}")
            self._held = (piece, data)
        return self._held[1]
