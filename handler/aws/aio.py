"""Runs operations with aiobotocore, for the worker."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from aiohttp import ClientError as HttpError
from botocore.exceptions import BotoCoreError, ClientError

from tidemill.net.backoff import with_jitter

from ..errors import AwsError
from .calls import (
    RETRY_DELAYS_SECONDS,
    WORKER_SERVICES,
    Call,
    Operation,
    Service,
    T,
    client_options,
    is_retryable,
    region,
    translate,
)
from .s3_store import find_store


class AioAws:
    """Runs operations concurrently in one event loop; a context manager that owns its clients."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._clients: dict[Service, Any] = {}

    async def __aenter__(self) -> Self:
        session, store = AioSession(), find_store()
        of_store = AioSession(profile=store.profile) if store.profile else session
        for service in WORKER_SERVICES:
            is_store = service == "s3"
            options = client_options(service) | (store.client_options if is_store else {})
            opened = (of_store if is_store else session).create_client(
                service,
                region_name=(store.region if is_store else None) or region(),
                config=AioConfig(**options),
            )
            self._clients[service] = await self._stack.enter_async_context(opened)
        store.prepare(self._clients["s3"])
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def run(self, operation: Operation[T]) -> T:
        """Return the operation's result; raises an AwsError that it does not handle itself."""
        try:
            call = next(operation)
            while True:
                try:
                    response = await self._send(call)
                except (ClientError, BotoCoreError) as exc:
                    call = operation.throw(translate(exc, call))
                except (HttpError, TimeoutError, OSError) as exc:
                    # botocore does not see a body that breaks off, so it does not retry it.
                    call = operation.throw(AwsError(f"{call.service} {call.method}: {exc!r}"))
                else:
                    call = operation.send(response)
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def _send(self, call: Call) -> Any:
        send = getattr(self._clients[call.service], call.method)
        if call.delay_seconds:
            await asyncio.sleep(with_jitter(call.delay_seconds))
        for delay_seconds in RETRY_DELAYS_SECONDS:
            try:
                response = await send(**call.arguments)
                break
            except ClientError as exc:
                if not is_retryable(exc):
                    raise
            await asyncio.sleep(with_jitter(delay_seconds))
        else:
            response = await send(**call.arguments)
        if "Body" in response:
            async with response["Body"] as body:
                response["Body"] = await body.read()
        return response
