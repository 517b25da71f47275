"""Parallel download of large objects from S3 to files, in byte ranges."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from botocore.exceptions import BotoCoreError, ClientError
from s3transfer.exceptions import RetriesExceededError, S3DownloadFailedError
from s3transfer.manager import TransferConfig, TransferManager
from s3transfer.subscribers import BaseSubscriber
from s3transfer.utils import OSUtils

from ...aws.calls import Call, translate
from ...errors import AwsError, ObjectChanged

_LOOK_SECONDS = 1.0
_CONFIG = TransferConfig(
    # Small objects use ranges, too: only range requests are conditional on the ETag.
    multipart_threshold=1,
    multipart_chunksize=16 * 2**20,
    max_request_concurrency=16,
)


class DownloadItem(NamedTuple):
    """A listed object, and the file to write it to."""

    key: str
    etag: str
    num_bytes: int
    path: Path


def download(
    client: Any, bucket: str, objects: Sequence[DownloadItem], on_progress: Callable[[int], None]
) -> None:
    """Write each object to its file atomically, if it is unchanged since it was listed.

    A kill leaves only temporary files next to these, with a suffix of eight digits.
    `on_progress` is called before the first request and then about every second, in the caller's
    thread, with the number of bytes downloaded.
    Raises AwsError or OSError of the first failure; ObjectChanged for an object that has changed.
    The others are then cancelled, also when `on_progress` or a signal handler raises. Their threads
    are not joined, not even at process exit: a silent network may block them for long.
    """
    executors: list[_DaemonThreads] = []

    def make_executor(max_workers: int) -> Executor:
        executors.append(_DaemonThreads(max_workers))
        return executors[-1]

    manager = TransferManager(client, _CONFIG, _DurableFiles(), make_executor)
    counter = _Counter()
    pending: dict[Any, DownloadItem] = {}
    try:
        on_progress(0)
        for wanted in objects:
            subscribers = [_Pin(wanted), counter]
            transfer = manager.download(
                bucket, wanted.key, str(wanted.path), subscribers=subscribers
            )
            pending[transfer] = wanted
        while pending:
            counter.has_news.wait(_LOOK_SECONDS)
            counter.has_news.clear()
            for transfer in [transfer for transfer in pending if transfer.done()]:
                _check(transfer, bucket, pending.pop(transfer))
            on_progress(counter.num_bytes)
    finally:
        for transfer in pending:
            transfer.cancel()
        for executor in executors:
            executor.end()


def _check(transfer: Any, bucket: str, wanted: DownloadItem) -> None:
    """Raise the error of a transfer, as one of this package's errors."""
    call = Call("s3", "get_object", {"Bucket": bucket, "Key": wanted.key})
    try:
        transfer.result()
    except (ClientError, BotoCoreError) as exc:
        raise translate(exc, call) from exc
    except S3DownloadFailedError as exc:  # only for an ETag
        raise ObjectChanged(str(exc)) from exc
    except RetriesExceededError as exc:
        raise AwsError(f"s3 get_object: {wanted.key} broke off: {exc.last_exception}") from exc
    num_bytes = wanted.path.stat().st_size
    if num_bytes != wanted.num_bytes:
        wanted.path.unlink()
        raise ObjectChanged(f"{wanted.key} has {num_bytes} bytes, not {wanted.num_bytes}")


class _DaemonThreads(Executor):
    """Threads that end after `end`, and with the process."""

    def __init__(self, max_workers: int) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, daemon=True) for _ in range(max_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        """Run a call in a thread."""
        future: Future[Any] = Future()
        self._calls.put((future, partial(call, *args, **options)))
        return future

    def end(self) -> None:
        """End each thread after the queued calls; waits for none."""
        for _ in self._threads:
            self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as exc:  # noqa: BLE001 - raised again in the caller
                    future.set_exception(exc)


class _DurableFiles(OSUtils):  # type: ignore[misc]
    """Renames a file only after it is durable, so that a power loss leaves no partial one."""

    def rename_file(self, current_filename: str, new_filename: str) -> None:
        """Make the bytes durable, then the name."""
        with Path(current_filename).open("rb") as file:
            os.fsync(file.fileno())
        super().rename_file(current_filename, new_filename)


class _Pin(BaseSubscriber):  # type: ignore[misc]
    """Pins a transfer to an object's size and ETag, which saves a request."""

    def __init__(self, wanted: DownloadItem) -> None:
        self._wanted = wanted

    def on_queued(self, future: Any, **_: object) -> None:
        """Set size and ETag before the transfer starts."""
        future.meta.provide_transfer_size(self._wanted.num_bytes)
        future.meta.provide_object_etag(self._wanted.etag)


class _Counter(BaseSubscriber):  # type: ignore[misc]
    """Counts downloaded bytes of many threads; `has_news` is set whenever a transfer ends."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.has_news = threading.Event()
        self._lock = threading.Lock()

    def on_progress(self, bytes_transferred: int, **_: object) -> None:
        """Add bytes; negative when a range is restarted."""
        with self._lock:
            self.num_bytes += bytes_transferred

    def on_done(self, **_: object) -> None:
        """Wake the waiting thread."""
        self.has_news.set()
