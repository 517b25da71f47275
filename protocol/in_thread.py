"""Work on many bytes, which runs in a thread so that the event loop keeps turning."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

_ValueT = TypeVar("_ValueT")

LONG_BYTES: Final = 100_000
"""More bytes are processed in a thread."""


async def in_thread_if_long(function: Callable[[bytes], _ValueT], data: bytes) -> _ValueT:
    """Return a function's result for bytes; many bytes are processed in a thread."""
    return await asyncio.to_thread(function, data) if len(data) > LONG_BYTES else function(data)
