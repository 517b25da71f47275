"""Standard error of an engine's process: passed on as it comes, its last words kept."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Final

_MAX_BYTES: Final = 4_000
_MAX_LINES: Final = 20
_READ_BYTES: Final = 2**16
# For a process that has ended; a child of it may live on, and holds the pipe.
_END_SECONDS: Final = 1.0
_STDERR: Final = 2


class StderrTail:
    """Pipe for the standard error of a process, and the thread that reads it.

    The process is to have `writer_fd`, and nobody else.
    """

    def __init__(self) -> None:
        reader, self.writer_fd = os.pipe()
        self._tail = b""
        self._ended: Future[None] = Future()
        threading.Thread(
            target=self._pass_on, args=(reader,), name="tidemill-stderr", daemon=True
        ).start()

    async def last_words(self) -> str:
        """Return the last lines, once the process has ended; bounded."""
        await asyncio.wait([asyncio.wrap_future(self._ended)], timeout=_END_SECONDS)
        text = self._tail.decode(errors="replace").strip()
        return "\n".join(text.splitlines()[-_MAX_LINES:])

    def _pass_on(self, reader: int) -> None:
        while data := os.read(reader, _READ_BYTES):
            self._tail = (self._tail + data)[-_MAX_BYTES:]
            with suppress(OSError):  # ours is closed or full
                os.write(_STDERR, data)
        os.close(reader)
        self._ended.set_result(None)
