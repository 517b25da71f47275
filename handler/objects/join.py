"""Objects joined to one by a multipart upload, which any run can go on with where one stopped."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, NamedTuple

from handler.aws.bucket import Bucket
from handler.aws.sync import Aws
from handler.batch.kinds import SealedSegment
from handler.objects.upload_plan import UploadPart, plan_upload

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Each holds at most one segment of about 16 MiB.
_NUM_THREADS = 8
_BUFFER_BYTES = 2**20


class Joining(NamedTuple):
    """One object in the making: its key, the upload's id, and what it is made of."""

    key: str
    id: str
    segments: Sequence[SealedSegment]


def send_missing(
    aws: Aws, bucket: Bucket, joining: Joining, check: Callable[[], None]
) -> dict[int, str]:
    """Send what is not there yet, a few parts at once, and return the ETags of all.

    `check` is called before each part; what it raises passes through. Raises NotThere when the
    upload is gone. Nobody else may have sent other bytes to it.
    """
    there = aws.run(bucket.list_uploaded(joining.key, joining.id))
    etags: dict[int, str] = {}
    missing: list[UploadPart] = []
    for part in plan_upload([segment.num_bytes for segment in joining.segments]):
        etag, num_bytes = there.get(part.number, ("", -1))
        if num_bytes == part.num_bytes:
            etags[part.number] = etag
        else:
            missing.append(part)
    return etags | _send(aws, bucket, joining, missing, check)


def _send(
    aws: Aws,
    bucket: Bucket,
    joining: Joining,
    parts: Sequence[UploadPart],
    check: Callable[[], None],
) -> dict[int, str]:
    etags: dict[int, str] = {}
    in_flight: dict[Future[str], UploadPart] = {}

    def collect(limit: int) -> None:
        while len(in_flight) > limit:
            for future in wait(in_flight, return_when=FIRST_COMPLETED).done:
                etags[in_flight.pop(future).number] = future.result()

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for part in parts:
            check()
            in_flight[pool.submit(_send_part, aws, bucket, joining, part)] = part
            collect(_NUM_THREADS - 1)
        collect(0)
    return etags


def _send_part(aws: Aws, bucket: Bucket, joining: Joining, part: UploadPart) -> str:
    segments = joining.segments[part.first : part.end]
    if part.is_copy:
        copy = bucket.copy_part(joining.key, joining.id, part.number, segments[0].key)
        return aws.run(copy)
    with open_joined(segments, lambda key: aws.run(bucket.get(key))) as body:
        return aws.run(bucket.upload_part(joining.key, joining.id, part.number, body))


def open_joined(
    segments: Sequence[SealedSegment], get: Callable[[str], bytes]
) -> io.BufferedReader:
    """Return the segments' bytes in a row; one object is held at a time, and it can be sought."""
    # Buffered, because S3 takes no short chunk in the middle of a part.
    return io.BufferedReader(_Joined(segments, get), _BUFFER_BYTES)


class _Joined(io.RawIOBase):
    def __init__(self, segments: Sequence[SealedSegment], get: Callable[[str], bytes]) -> None:
        self._segments = segments
        self._get = get
        self._position = 0
        self._held: tuple[str, bytes] | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        size = sum(segment.num_bytes for segment in self._segments)
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer).cast("B")
        start = 0
        for segment in self._segments:
            offset = self._position - start
            if offset < segment.num_bytes:
                data = self._bytes_of(segment)[offset : offset + len(view)]
                view[: len(data)] = data
                self._position += len(data)
                return len(data)
            start += segment.num_bytes
        return 0

    def _bytes_of(self, segment: SealedSegment) -> bytes:
        if self._held is None or self._held[0] != segment.key:
            self._held = None
            data = self._get(segment.key)
            if len(data) != segment.num_bytes:
                raise OSError(f"{segment.key} has {len(data):,} bytes, not {segment.num_bytes:,}")
            self._held = (segment.key, data)
        return self._held[1]
