"""Multipart upload: sends parts in parallel, each retried with backoff."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import IO

import httpx

from tidemill.net.backoff import retry_after
from tidemill.offline.console.backoff import Backoff
from tidemill.offline.console.errors import BadInput, ServerRefused

from ..api.client import Client
from ..api.http import fault_of, is_transient
from ..api.objects import Upload

_NUM_THREADS = 4
_URLS_AT_ONCE = 16
_CHUNK_BYTES = 2**18
_RETRY_SECONDS = 300.0


class _Stopped(Exception):
    """Another part failed permanently, or a signal arrived."""


class PartsSender:
    """Sends the missing parts of an open file; threads report sent bytes to `show`."""

    def __init__(
        self,
        client: Client,
        upload: Upload,
        file: IO[bytes],
        num_bytes: int,
        show: Callable[[int], object],
    ) -> None:
        self._client = client
        self._upload = upload
        self._file = file
        self._num_bytes = num_bytes
        self._show = show
        self._stop = Event()
        self._lock = Lock()
        self._urls: dict[int, str] = {}
        num_parts = -(-num_bytes // upload.part_bytes)
        self._missing = [n for n in range(1, num_parts + 1) if n not in upload.uploaded]

    def run(self) -> None:
        """Send all parts; raises CliError when one cannot be sent.

        After an error or a signal, the other threads are not joined: they stop at their next chunk,
        or with the process.
        """
        ends: SimpleQueue[Exception | None] = SimpleQueue()
        left = iter(self._missing)
        for _ in range(_NUM_THREADS):
            Thread(target=self._work, args=(left, ends), daemon=True).start()
        try:
            for _ in range(_NUM_THREADS):
                if (failure := ends.get()) is not None:
                    raise failure
        finally:
            self._stop.set()

    def _work(self, left: Iterator[int], ends: SimpleQueue[Exception | None]) -> None:
        """Send parts until none is left; put None or the error into `ends`."""
        failure: Exception | None = None
        try:
            # `next` of a list iterator is atomic under the GIL.
            for number in left:
                self._send(number)
        except Exception as exc:  # noqa: BLE001 - the main thread raises it
            failure = exc
        ends.put(failure)

    def _send(self, number: int) -> None:
        backoff = Backoff(_RETRY_SECONDS, self._wait)
        while True:
            sent = _AttemptProgress(self._show)
            try:
                response = self._put(number, sent)
            except httpx.TransportError as exc:
                fault, retry_seconds = fault_of(exc), None
            else:
                if response.is_success:
                    return
                fault = self._fault_in(response)
                retry_seconds = retry_after(response.headers)
            sent.retract()
            backoff.wait(f"part {number:,} of the upload failed: {fault}", retry_seconds)

    def _wait(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise _Stopped

    def _put(self, number: int, sent: _AttemptProgress) -> httpx.Response:
        start = (number - 1) * self._upload.part_bytes
        size = min(self._upload.part_bytes, self._num_bytes - start)
        return self._client.put(self._url_of(number), self._chunks(start, size, sent), size)

    def _chunks(self, start: int, size: int, sent: _AttemptProgress) -> Iterator[bytes]:
        end = start + size
        while start < end:
            if self._stop.is_set():
                raise _Stopped
            # `pread`, because several threads read one file.
            data = os.pread(self._file.fileno(), min(_CHUNK_BYTES, end - start), start)
            if not data:
                raise BadInput("the file was truncated during the upload: submit it again")
            start += len(data)
            yield data
            sent.add(len(data))

    def _url_of(self, number: int) -> str:
        """Return the presigned URL of a part; URLs are requested in groups, as late as possible."""
        with self._lock:
            if number not in self._urls:
                place = self._missing.index(number)
                wanted = self._missing[place : place + _URLS_AT_ONCE]
                self._urls.update(self._client.part_urls(self._upload.id, wanted))
            return self._urls.pop(number)

    @staticmethod
    def _fault_in(response: httpx.Response) -> str:
        """Return a transient storage error, such as an expired URL; raises for other errors."""
        words = f"HTTP {response.status_code} {response.reason_phrase}".rstrip()
        if response.status_code == 403 or is_transient(response):
            return words
        raise ServerRefused(
            f"part of the upload was rejected: storage returned {words}",
            status=response.status_code,
        )


class _AttemptProgress:
    """Progress of one attempt, retracted when it fails."""

    def __init__(self, show: Callable[[int], object]) -> None:
        self._show = show
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Report sent bytes."""
        self._num_bytes += num_bytes
        self._show(num_bytes)

    def retract(self) -> None:
        """Subtract the reported bytes again."""
        self._show(-self._num_bytes)
        self._num_bytes = 0


def bytes_there(upload: Upload, num_bytes: int) -> int:
    """Return the number of uploaded bytes of a file of `num_bytes`."""
    sizes = (
        min(upload.part_bytes, num_bytes - (number - 1) * upload.part_bytes)
        for number in upload.uploaded
    )
    return sum(size for size in sizes if size > 0)
