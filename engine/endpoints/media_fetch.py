"""Media fetch: downloads the media of URLs in a body, with limits on number and bytes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar, TypeVarTuple

from tidemill.net.fetch import ByteBudget, Fetcher, FetchFailed, FetchLimits
from tidemill.protocol.audio import FILE
from tidemill.protocol.errors import InternalError, RequestError
from tidemill.protocol.fetched_urls import FILE_URL, fetched_urls
from tidemill.protocol.in_flight import InFlightLimiter
from tidemill.protocol.urls import is_object

from ..config import ReadObject
from .endpoint import BodyCheck, FetchStep

# Limits on bodies, and on bytes of fetched media, that wait in memory to be prepared.
MAX_FETCHED = 16
MAX_FETCHED_BYTES = 512 * 2**20

Fetch = Callable[[str, ByteBudget], Awaitable[bytes]]
_Value = TypeVar("_Value")
_Arguments = TypeVarTuple("_Arguments")


def fetch_from(limits: FetchLimits, read_object: ReadObject | None) -> Fetch:
    """Return the fetch of media by URL; without `read_object` S3 objects are refused."""
    fetcher = Fetcher(limits)

    async def fetch(url: str, allowance: ByteBudget) -> bytes:
        if not is_object(url):
            return await fetcher.fetch(url, allowance)
        if read_object is None:
            raise FetchFailed("s3:// URLs are disabled (--allowed-media-buckets)")
        return await read_object(url, limits.max_bytes, allowance)

    return fetch


async def in_thread(function: Callable[[*_Arguments], _Value], *arguments: *_Arguments) -> _Value:
    """Return a function's value, computed in a thread: the search of a body may take long."""
    return await asyncio.to_thread(function, *arguments)


class MediaFetcher:
    """Fetches media by their URLs, each of up to `max_bytes`.

    A body without URLs never waits. The largest possible size is reserved before a fetch; the rest
    is released after it.
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
        """Yield the media of URLs, given with their places in the body; raise `RequestError`.

        The media may have `max_bytes` in total.
        """
        together = math.inf if max_bytes is None else max_bytes
        reserved = most = int(min(len(urls) * self._max_bytes, together))
        await self._in_flight.acquire(most)
        try:
            media = await self._all(urls, ByteBudget(together))
            reserved = sum(map(len, media.values()))
            self._in_flight.release_bytes(most - reserved)
            yield media
        finally:
            self._in_flight.release(reserved)

    async def _all(self, urls: Mapping[str, str], allowance: ByteBudget) -> dict[str, bytes]:
        media: dict[str, bytes] = {}
        try:
            async with asyncio.TaskGroup() as group:
                for url, place in urls.items():
                    group.create_task(self._into(media, url, place, allowance))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return media

    async def _into(
        self, media: dict[str, bytes], url: str, place: str, allowance: ByteBudget
    ) -> None:
        try:
            media[url] = await self._fetch(url, allowance)
        except FetchFailed as exc:
            message = f"`{place}` could not be fetched: {exc}."
            if exc.is_of_service:
                raise InternalError(message, code="fetch_failed") from exc
            raise RequestError(message, param=place, code="fetch_failed") from exc


class RecordingFetcher:
    """Fetches recordings; a body with an inline recording never waits."""

    def __init__(self, fetcher: MediaFetcher) -> None:
        self._fetcher = fetcher

    def step_after(self, check: BodyCheck) -> FetchStep:
        """Return the fetch step of an endpoint, which checks the body first."""

        @asynccontextmanager
        async def fetched(body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
            url = fetched_urls(body).get(FILE_URL)
            if url is None:
                yield body
                return
            check(body)
            async with self._fetcher.fetched({url: FILE_URL}) as media:
                yield body | {FILE: media[url]}

        return fetched
