"""The parts of one large upload: several at once, each tried again until it is there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import IO

import httpx

from cli.api.client import Client
from cli.api.http import fault_of, may_pass, retry_after
from cli.api.objects import Upload
from cli.api.patience import Patience
from cli.errors import BadInput, ServerRefused

_NUM_THREADS = 4
_URLS_AT_ONCE = 16
_CHUNK_BYTES = 2**18
_PATIENCE_SECONDS = 300.0


class _Stopped(Exception):
    """Another part has failed for good, or a signal came."""


class PartsSender:
    """Sends the missing parts of an open file; `show` is told of bytes sent, from any thread."""

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
        """Return when all parts are there; raises CliError when one cannot be sent.

        Nobody waits then, or when a signal comes, for the other parts: their threads end at their
        next bytes, or with the process.
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
        """Send parts until none is left, and tell how that ended."""
        failure: Exception | None = None
        try:
            # Taking one from an iterator of a list is one step of the interpreter.
            for number in left:
                self._send(number)
        except Exception as exc:  # noqa: BLE001 - the main thread raises it
            failure = exc
        ends.put(failure)

    def _send(self, number: int) -> None:
        patience = Patience(_PATIENCE_SECONDS, self._wait)
        while True:
            sent = _Counted(self._show)
            try:
                response = self._put(number, sent)
            except httpx.TransportError as exc:
                fault, asked = fault_of(exc), None
            else:
                if response.is_success:
                    return
                fault, asked = self._fault_in(response), retry_after(response)
            sent.take_back()
            patience.bear(f"part {number:,} of the upload did not arrive: {fault}", asked)

    def _wait(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise _Stopped

    def _put(self, number: int, sent: _Counted) -> httpx.Response:
        start = (number - 1) * self._upload.part_bytes
        size = min(self._upload.part_bytes, self._num_bytes - start)
        return self._client.put(self._url_of(number), self._chunks(start, size, sent), size)

    def _chunks(self, start: int, size: int, sent: _Counted) -> Iterator[bytes]:
        end = start + size
        while start < end:
            if self._stop.is_set():
                raise _Stopped
            # Several threads read one file: each says where.
            data = os.pread(self._file.fileno(), min(_CHUNK_BYTES, end - start), start)
            if not data:
                raise BadInput("the file became shorter while it was uploaded: begin again")
            start += len(data)
            yield data
            sent.add(len(data))

    def _url_of(self, number: int) -> str:
        """Return a url for a part: they are fetched in groups, as late as possible."""
        with self._lock:
            if number not in self._urls:
                place = self._missing.index(number)
                wanted = self._missing[place : place + _URLS_AT_ONCE]
                self._urls.update(self._client.part_urls(self._upload.id, wanted))
            return self._urls.pop(number)

    @staticmethod
    def _fault_in(response: httpx.Response) -> str:
        """Return what storage said that may pass: a url that has expired is another one then."""
        words = f"HTTP {response.status_code} {response.reason_phrase}".rstrip()
        if response.status_code == 403 or may_pass(response):
            return words
        raise ServerRefused(
            f"the storage does not take a part of the upload: {words}", status=response.status_code
        )


class _Counted:
    """Tells of the bytes of one try, and takes them back when it was for nothing."""

    def __init__(self, show: Callable[[int], object]) -> None:
        self._show = show
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Tell of more bytes."""
        self._num_bytes += num_bytes
        self._show(num_bytes)

    def take_back(self) -> None:
        """Tell that they are not there."""
        self._show(-self._num_bytes)
        self._num_bytes = 0


def bytes_there(upload: Upload, num_bytes: int) -> int:
    """Return how much of a file of so many bytes has arrived."""
    sizes = (
        min(upload.part_bytes, num_bytes - (number - 1) * upload.part_bytes)
        for number in upload.uploaded
    )
    return sum(size for size in sizes if size > 0)
