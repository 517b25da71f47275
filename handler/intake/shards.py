"""Records shards while the file is still being read, a few at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from handler.batch.model import Shard

_NUM_THREADS = 4
_MAX_PENDING = 32


class ShardWriter:
    """Calls `put` for each shard in threads; a context manager, left when all calls have ended.

    What a call raises is raised by the next `write` that waits for it, or by `drain`.
    """

    def __init__(self, put: Callable[[Shard], None]) -> None:
        self._put = put
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="shards")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def write(self, shard: Shard) -> None:
        """Begin to record a shard; waits while many are on their way."""
        self._pending.append(self._pool.submit(self._put, shard))
        while len(self._pending) > _MAX_PENDING:
            self._pending.popleft().result()

    def drain(self) -> None:
        """Return when every shard is recorded."""
        while self._pending:
            self._pending.popleft().result()
