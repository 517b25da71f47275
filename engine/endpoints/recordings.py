"""What `file_url` names, brought before its request is prepared: only so many at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from engine.endpoints.endpoint import Check, Fetched
from engine.hosts.fetching import FetchFailed
from engine.protocol.audio import FILE, FILE_URL
from engine.protocol.errors import RequestError

# Each is at most one file of the largest size in memory, until its request is prepared.
MAX_FETCHED = 16

Fetch = Callable[[str], Awaitable[bytes]]


class FileUrls:
    """Brings recordings by `fetch`; a body that holds its own passes by all that wait."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._room = asyncio.Semaphore(MAX_FETCHED)

    def after(self, check: Check) -> Fetched:
        """Return the step of an endpoint that can tell without a recording what is wrong."""

        @asynccontextmanager
        async def fetched(body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
            url = body.get(FILE_URL)
            if not isinstance(url, str) or url[:5].lower() == "data:":
                yield body
                return
            check(body)
            async with self._room:
                yield body | {FILE: await self._brought(url)}

        return fetched

    async def _brought(self, url: str) -> bytes:
        try:
            return await self._fetch(url)
        except FetchFailed as exc:
            raise RequestError(
                f"`{FILE_URL}` could not be fetched: {exc}.", param=FILE_URL, code="fetch_failed"
            ) from exc
