"""What `file_url` names, brought before its request is prepared."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from engine.endpoints.bringing import Bringing
from engine.endpoints.endpoint import Check, Fetched
from engine.protocol.audio import FILE, FILE_URL
from engine.protocol.urls import is_inline


class FileUrls:
    """Brings recordings; a body that holds its own passes by all that wait."""

    def __init__(self, bringing: Bringing) -> None:
        self._bringing = bringing

    def after(self, check: Check) -> Fetched:
        """Return the step of an endpoint that can tell without a recording what is wrong."""

        @asynccontextmanager
        async def fetched(body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
            url = body.get(FILE_URL)
            if not isinstance(url, str) or is_inline(url):
                yield body
                return
            check(body)
            async with self._bringing.brought({url: FILE_URL}) as found:
                yield body | {FILE: found[url]}

        return fetched
