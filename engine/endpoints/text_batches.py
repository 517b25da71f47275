"""Tokenization of many bodies' texts together, in a thread that releases the GIL.

A short text takes less time than moving to a thread, but thousands of them fill the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ..heap_trim import schedule_trim
from .text_draft import TextDraft

MAX_BATCH_BYTES = 2**18

_Value = TypeVar("_Value")


class _Waiting(NamedTuple):
    draft: TextDraft[Any]
    num_bytes: int
    encodings: asyncio.Future[list[Any] | None]


class TextBatcher:
    """Tokenizes the texts of drafts in the order of their arrival, a batch at a time.

    A batch has the texts that arrived in one turn of the event loop, or while the batch before was
    tokenized, and at most `max_bytes`. One draft alone is tokenized on the loop if it is short.
    """

    def __init__(self, short_bytes: int, max_bytes: int = MAX_BATCH_BYTES) -> None:
        self._short_bytes, self._max_bytes = short_bytes, max_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tidemill-tokenizer")
        self._waiting: deque[_Waiting] = deque()
        self._busy: asyncio.AbstractEventLoop | None = None  # the loop that awaits a batch
        self.seconds = 0.0  # of all batches

    async def read(self, draft: TextDraft[_Value], num_bytes: int) -> _Value:
        """Return the value of a draft of `num_bytes`; raise its own errors only."""
        if not draft.texts:
            return draft.complete([])
        loop = asyncio.get_running_loop()
        waiting = _Waiting(draft, num_bytes, loop.create_future())
        self._waiting.append(waiting)
        if self._busy is not loop:
            self._busy = loop
            loop.call_soon(self._start, loop)
        encodings = await waiting.encodings
        # A text that cannot be tokenized fails its batch: each draft is then read by itself.
        return draft.read() if encodings is None else draft.complete(encodings)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        while batch := self._next_batch():
            if len(batch) > 1 or batch[0].num_bytes > self._short_bytes:
                work = loop.run_in_executor(self._thread, self._encode, batch)
                work.add_done_callback(partial(self._end, loop, batch))
                return
            self._hand_out(batch, None)
        self._busy = None

    def _next_batch(self) -> list[_Waiting]:
        """Take the first drafts with the same tokenizer that fit into a batch."""
        batch: list[_Waiting] = []
        num_bytes, waiting = 0, self._waiting
        while waiting:
            draft, size, encodings = waiting[0]
            is_first = not batch
            if not is_first and (
                num_bytes + size > self._max_bytes or _kind(draft) != _kind(batch[0].draft)
            ):
                break
            waiting.popleft()
            if not encodings.done():  # otherwise its row was aborted
                batch.append(_Waiting(draft, size, encodings))
                num_bytes += size
        return batch

    def _encode(self, batch: Sequence[_Waiting]) -> list[Any]:
        began, draft = time.perf_counter(), batch[0].draft
        texts = [text for one in batch for text in one.draft.texts]
        encodings = draft.reader.read(texts, add_special_tokens=draft.add_special_tokens)
        self.seconds += time.perf_counter() - began
        return encodings

    def _end(
        self,
        loop: asyncio.AbstractEventLoop,
        batch: Sequence[_Waiting],
        done: asyncio.Future[list[Any]],
    ) -> None:
        has_failed = done.cancelled() or done.exception() is not None
        self._hand_out(batch, None if has_failed else done.result())
        schedule_trim()
        self._start(loop)

    def _hand_out(self, batch: Sequence[_Waiting], encodings: list[Any] | None) -> None:
        start = 0
        for draft, _, own in batch:
            stop = start + len(draft.texts)
            if not own.done():
                own.set_result(None if encodings is None else encodings[start:stop])
            start = stop


def _kind(draft: TextDraft[Any]) -> tuple[int, bool]:
    return id(draft.reader), draft.add_special_tokens
