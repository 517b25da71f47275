"""Large objects from S3 to files, many ranges of many of them at once."""

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

from handler.aws.calls import Call, translate
from handler.errors import AwsError, ObjectChanged

_LOOK_SECONDS = 1.0
_CONFIG = TransferConfig(
    # Every object goes in ranges, also a small one: only those are asked for by their ETag.
    multipart_threshold=1,
    multipart_chunksize=16 * 2**20,
    max_request_concurrency=16,
)


class Wanted(NamedTuple):
    """An object as it was listed, and the file that it becomes."""

    key: str
    etag: str
    num_bytes: int
    path: Path


def download(
    client: Any, bucket: str, objects: Sequence[Wanted], watch: Callable[[int], None]
) -> None:
    """Write each object to its file, whole or not at all, and only if it is still what was listed.

    A kill leaves files beside these, with a suffix of eight digits, and nothing else.
    `watch` is called before the first byte is asked for and then about every second, in the
    caller's thread, with the bytes that have come.
    Raises AwsError or OSError for the first that fails; ObjectChanged for one that is another now.
    The others are then given up, as they are when `watch` raises or a signal's handler does. Their
    threads are not waited for, not even by a process that ends: a silent network holds them long.
    """
    executors: list[_DaemonThreads] = []

    def make_executor(max_workers: int) -> Executor:
        executors.append(_DaemonThreads(max_workers))
        return executors[-1]

    manager = TransferManager(client, _CONFIG, _DurableFiles(), make_executor)
    counter = _Counter()
    pending: dict[Any, Wanted] = {}
    try:
        watch(0)
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
            watch(counter.num_bytes)
    finally:
        for transfer in pending:
            transfer.cancel()
        for executor in executors:
            executor.end()


def _check(transfer: Any, bucket: str, wanted: Wanted) -> None:
    """Raise what a transfer has raised, in the words of this package."""
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
        """Let a thread make a call."""
        future: Future[Any] = Future()
        self._calls.put((future, partial(call, *args, **options)))
        return future

    def end(self) -> None:
        """End each thread after the calls that came before; waits for none."""
        for _ in self._threads:
            self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as exc:  # noqa: BLE001 - raised again where it is asked for
                    future.set_exception(exc)


class _DurableFiles(OSUtils):  # type: ignore[misc]
    """Gives a file its name only when a loss of power cannot make it less than whole."""

    def rename_file(self, current_filename: str, new_filename: str) -> None:
        """Make the bytes durable, then the name."""
        with Path(current_filename).open("rb") as file:
            os.fsync(file.fileno())
        super().rename_file(current_filename, new_filename)


class _Pin(BaseSubscriber):  # type: ignore[misc]
    """Tells a transfer what its object is, which saves asking and refuses any other."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted

    def on_queued(self, future: Any, **_: object) -> None:
        """Tell it before it begins."""
        future.meta.provide_transfer_size(self._wanted.num_bytes)
        future.meta.provide_object_etag(self._wanted.etag)


class _Counter(BaseSubscriber):  # type: ignore[misc]
    """Counts what comes in, from many threads; `has_news` is set whenever a transfer ends."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.has_news = threading.Event()
        self._lock = threading.Lock()

    def on_progress(self, bytes_transferred: int, **_: object) -> None:
        """Add bytes; fewer than none when a range begins again."""
        with self._lock:
            self.num_bytes += bytes_transferred

    def on_done(self, **_: object) -> None:
        """Wake the one who waits."""
        self.has_news.set()
