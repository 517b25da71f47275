"""Client disconnects: work is cancelled when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

_ValueT = TypeVar("_ValueT")


class ClientDisconnected(BaseException):
    """The client has disconnected; a BaseException, so that no error handler answers it."""


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, _ValueT]) -> _ValueT:
    """Return the result of work; raises `ClientDisconnected`, with the work cancelled.

    The body must have been read.
    """
    working = asyncio.create_task(work)
    disconnect = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, disconnect):
            task.cancel()
        await asyncio.gather(working, disconnect, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
