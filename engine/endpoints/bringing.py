"""What urls of a body name, brought before the body is prepared: only so many at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from engine.hosts.fetching import FetchFailed
from engine.protocol.errors import RequestError

# Of so many bodies is in memory what was fetched for them, until they are prepared.
MAX_FETCHED = 16

Fetch = Callable[[str], Awaitable[bytes]]


class Bringing:
    """Brings by `fetch` what urls name; a body that has none to fetch passes by all that wait."""

    def __init__(self, fetch: Fetch, *, max_at_once: int = MAX_FETCHED) -> None:
        self._fetch = fetch
        self._room = asyncio.Semaphore(max_at_once)

    @asynccontextmanager
    async def brought(
        self, urls: Mapping[str, str], *, max_bytes: int | None = None
    ) -> AsyncIterator[dict[str, bytes]]:
        """Yield what urls name, each told with its place in the body; raises `RequestError`.

        All of them together may have `max_bytes`.
        """
        async with self._room:
            found: dict[str, bytes] = {}
            try:
                async with asyncio.TaskGroup() as group:
                    for url, place in urls.items():
                        group.create_task(self._into(found, url, place, max_bytes))
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
            yield found

    async def _into(
        self, found: dict[str, bytes], url: str, place: str, max_bytes: int | None
    ) -> None:
        try:
            found[url] = await self._fetch(url)
        except FetchFailed as exc:
            raise RequestError(
                f"`{place}` could not be fetched: {exc}.", param=place, code="fetch_failed"
            ) from exc
        if max_bytes is not None and sum(map(len, found.values())) > max_bytes:
            raise RequestError(
                f"`{place}` and what else the request names are larger than {max_bytes:,} bytes"
                " together.",
                param=place,
            )
