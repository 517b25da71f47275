"""What urls of a body name, brought before the body is prepared: bounded in number and in bytes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from engine.backpressure import InFlight
from engine.hosts.fetching import Allowance, FetchFailed
from engine.protocol.errors import RequestError

# Of so many bodies is in memory what was fetched for them, until they are prepared.
MAX_FETCHED = 16
MAX_FETCHED_BYTES = 512 * 2**20

Fetch = Callable[[str, Allowance], Awaitable[bytes]]


class Bringing:
    """Brings by `fetch` what urls name, each of up to `max_bytes`.

    A body that has none to fetch passes by all that wait. Before anything comes there is room for
    the most that can; what did not come of it is given back.
    """

    def __init__(
        self,
        fetch: Fetch,
        max_bytes: int,
        *,
        max_at_once: int = MAX_FETCHED,
        max_held_bytes: int = MAX_FETCHED_BYTES,
    ) -> None:
        self._fetch = fetch
        self._max_bytes = max_bytes
        self._room = InFlight(max_held_bytes, max_at_once)

    @asynccontextmanager
    async def brought(
        self, urls: Mapping[str, str], *, max_bytes: int | None = None
    ) -> AsyncIterator[dict[str, bytes]]:
        """Yield what urls name, each told with its place in the body; raises `RequestError`.

        All of them together may have `max_bytes`.
        """
        together = math.inf if max_bytes is None else max_bytes
        held = most = int(min(len(urls) * self._max_bytes, together))
        await self._room.enter(most)
        try:
            found = await self._all(urls, Allowance(together))
            held = sum(map(len, found.values()))
            self._room.release(most - held)
            yield found
        finally:
            self._room.leave(held)

    async def _all(self, urls: Mapping[str, str], allowance: Allowance) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        try:
            async with asyncio.TaskGroup() as group:
                for url, place in urls.items():
                    group.create_task(self._into(found, url, place, allowance))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return found

    async def _into(
        self, found: dict[str, bytes], url: str, place: str, allowance: Allowance
    ) -> None:
        try:
            found[url] = await self._fetch(url, allowance)
        except FetchFailed as exc:
            raise RequestError(
                f"`{place}` could not be fetched: {exc}.", param=place, code="fetch_failed"
            ) from exc
