"""Failures of event loop callbacks, which asyncio only logs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def callback_failures(note: Callable[[BaseException], object]) -> Iterator[None]:
    """Pass the exceptions of callbacks of the running loop to `note` while entered.

    A callback that fails may have been the only one to handle a request's end, so its owner must
    stop waiting for that.
    """
    loop = asyncio.get_running_loop()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        failure = context.get("exception")
        if "handle" in context and failure is not None:
            note(failure)
        else:
            loop.default_exception_handler(context)

    previous = loop.get_exception_handler()
    loop.set_exception_handler(handle)
    try:
        yield
    finally:
        loop.set_exception_handler(previous)
