"""Media fetch: media that urls of a body name, bounded in number and bytes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tidemill.net.fetch import ByteBudget, FetchFailed
from tidemill.protocol.audio import FILE, FILE_URL
from tidemill.protocol.errors import RequestError
from tidemill.protocol.fetched_urls import fetched_urls
from tidemill.protocol.in_flight import InFlightLimiter

from .endpoint import BodyCheck, FetchStep

# Bodies, and bytes, whose fetched media are in memory until they are prepared.
MAX_FETCHED = 16
MAX_FETCHED_BYTES = 512 * 2**20

Fetch = Callable[[str, ByteBudget], Awaitable[bytes]]


class MediaFetcher:
    """Fetches media by their urls, each of up to `max_bytes`.

    A body without urls never waits. Before a fetch the largest possible size is reserved; the rest
    is released behind it.
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
        self._in_flight = InFlightLimiter(max_held_bytes, max_at_once)

    @asynccontextmanager
    async def fetched(
        self, urls: Mapping[str, str], *, max_bytes: int | None = None
    ) -> AsyncIterator[dict[str, bytes]]:
        """Yield the media of urls, each with its place in the body; raises `RequestError`.

        All of them together may have `max_bytes`.
        """
        together = math.inf if max_bytes is None else max_bytes
        held = most = int(min(len(urls) * self._max_bytes, together))
        await self._in_flight.acquire(most)
        try:
            found = await self._all(urls, ByteBudget(together))
            held = sum(map(len, found.values()))
            self._in_flight.release_bytes(most - held)
            yield found
        finally:
            self._in_flight.release(held)

    async def _all(self, urls: Mapping[str, str], allowance: ByteBudget) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        try:
            async with asyncio.TaskGroup() as group:
                for url, place in urls.items():
                    group.create_task(self._into(found, url, place, allowance))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return found

    async def _into(
        self, found: dict[str, bytes], url: str, place: str, allowance: ByteBudget
    ) -> None:
        try:
            found[url] = await self._fetch(url, allowance)
        except FetchFailed as exc:
            raise RequestError(
                f"`{place}` could not be fetched: {exc}.", param=place, code="fetch_failed"
            ) from exc


class RecordingFetcher:
    """Fetches recordings; a body with an inline recording never waits."""

    def __init__(self, fetcher: MediaFetcher) -> None:
        self._bringing = fetcher

    def step_after(self, check: BodyCheck) -> FetchStep:
        """Return the fetch step of an endpoint, behind its check of the body."""

        @asynccontextmanager
        async def fetched(body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
            url = fetched_urls(body).get(FILE_URL)
            if url is None:
                yield body
                return
            check(body)
            async with self._bringing.fetched({url: FILE_URL}) as found:
                yield body | {FILE: found[url]}

        return fetched
