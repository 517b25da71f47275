"""Graceful shutdown: running requests finish, and new ones are refused."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.server.rig import SECONDS, site
from tidemill.server.admission import watch_engine

CHAT = "/v1/chat/completions"


async def test_running_requests_finish_while_new_ones_are_refused() -> None:
    """Streams run to their last event, and the health check fails."""
    async with site() as place:
        body = {"stream": True, "wait": True}
        async with place.client.stream("POST", CHAT, json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            place.signal()
            refused = await place.client.post(CHAT, json={})
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert (await place.client.get("/health")).status_code == 503
            place.engine.go.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        await asyncio.wait_for(asyncio.shield(place.serving), SECONDS)


async def test_the_drain_timeout_cancels_slow_requests() -> None:
    """When the time is up, their work is cancelled."""
    async with site(drain_seconds=0.05) as place:
        request = asyncio.create_task(place.client.post(CHAT, json={"wait": True}))
        await asyncio.wait_for(place.engine.has_request.wait(), SECONDS)
        place.signal()
        await asyncio.wait_for(asyncio.shield(place.serving), SECONDS)
        assert place.engine.is_left.is_set()
        await asyncio.gather(request, return_exceptions=True)


async def test_an_idle_server_stops_at_once() -> None:
    """Idle keep-alive connections do not delay it."""
    async with site() as place:
        assert (await place.client.get("/health")).status_code == 200
        place.signal()
        await asyncio.wait_for(asyncio.shield(place.serving), SECONDS)


async def test_an_idle_server_notices_that_its_engine_has_failed() -> None:
    """It stops by itself, because it could not answer the next request."""
    async with site() as place, watch_engine(place.engine, place.context.admission, seconds=0):
        place.engine.is_engine_lost = True
        await asyncio.wait_for(asyncio.shield(place.serving), SECONDS)
        assert place.context.admission.is_engine_lost


async def test_a_body_that_is_still_arriving_is_refused() -> None:
    """The error is in OpenAI's format and does not look like an internal error."""
    async with site(drain_seconds=0.05) as place:
        reader, writer = await place.connect()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
            b"content-length: 9\r\n\r\n"
        )
        await asyncio.wait_for(
            reader.readuntil(b"\r\n\r\n"), SECONDS
        )  # the server waits for its body
        place.signal()
        answer = await asyncio.wait_for(reader.read(), SECONDS)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'"code":"stopping"' in answer
        writer.close()
        await asyncio.wait_for(asyncio.shield(place.serving), SECONDS)


async def test_a_response_without_admission_gets_the_remaining_time() -> None:
    """File downloads are such responses."""
    has_request, go = asyncio.Event(), asyncio.Event()

    async def slow(_: Request) -> Response:
        has_request.set()
        await go.wait()
        return Response("whole")

    async with site(others=[Route("/slow", slow)]) as place:
        response = asyncio.create_task(place.client.get("/slow"))
        await asyncio.wait_for(has_request.wait(), SECONDS)
        place.signal()
        while not place.server.should_exit:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
        assert (place.server.config.timeout_graceful_shutdown or 0) > 1
        go.set()
        assert (await asyncio.wait_for(response, SECONDS)).text == "whole"
        await asyncio.wait_for(asyncio.shield(place.serving), SECONDS)
