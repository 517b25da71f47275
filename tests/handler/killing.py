"""Processes that end between two of their requests to AWS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tidemill.handler.aws.sync import Aws


class Killed(BaseException):
    """The end of a process, which no code can catch in time."""


def is_killed_after(num_calls: int, aws: Aws, run: Callable[[], object]) -> bool:
    """End this process after that many requests; return whether that happened.

    All threads of the process end with it. The driver is as it was afterwards.
    """
    numbers = iter(range(100_000))

    class Dying:
        def __init__(self, client: Any) -> None:
            self._client = client

        def __getattr__(self, name: str) -> Any:
            if next(numbers) >= num_calls:
                raise Killed
            return getattr(self._client, name)

    clients = aws.clients
    aws.clients = {service: Dying(client) for service, client in clients.items()}
    try:
        run()
    except Killed:
        return True
    finally:
        aws.clients = clients
    return False
