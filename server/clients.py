"""Whoever asked, and may go away before there is an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

_ValueT = TypeVar("_ValueT")


class ClientGone(BaseException):
    """Nobody waits for the answer any more: no fault, which no handler of faults may answer."""


async def while_here(receive: Receive, work: Coroutine[Any, Any, _ValueT]) -> _ValueT:
    """Return what the work comes to; raises `ClientGone`, with the work ended, once nobody waits.

    The body must have been read.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
