"""A server that is being stopped: those inside finish, nobody else is let in."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.server.rig import SECONDS, site
from tidemill.server.admission import watch_engine

CHAT = "/v1/chat/completions"


async def test_those_inside_finish_while_others_are_sent_away() -> None:
    """Streams to their last event; the balancer is told to go elsewhere."""
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


async def test_whoever_takes_too_long_is_not_waited_for() -> None:
    """The time is up, and its work has ended."""
    async with site(drain_seconds=0.05) as place:
        asked = asyncio.create_task(place.client.post(CHAT, json={"wait": True}))
        await asyncio.wait_for(place.engine.is_asked.wait(), SECONDS)
        place.signal()
        await asyncio.wait_for(asyncio.shield(place.serving), SECONDS)
        assert place.engine.is_left.is_set()
        await asyncio.gather(asked, return_exceptions=True)


async def test_an_idle_server_ends_at_once() -> None:
    """Connections that are kept open keep nobody."""
    async with site() as place:
        assert (await place.client.get("/health")).status_code == 200
        place.signal()
        await asyncio.wait_for(asyncio.shield(place.serving), SECONDS)


async def test_a_server_that_nobody_asks_hears_that_its_engine_is_gone() -> None:
    """It ends by itself: what would be asked next could not be answered."""
    async with site() as place, watch_engine(place.engine, place.context.admission, seconds=0):
        place.engine.is_engine_lost = True
        await asyncio.wait_for(asyncio.shield(place.serving), SECONDS)
        assert place.context.admission.is_engine_lost


async def test_a_body_that_has_not_come_by_then_is_told_to_go_elsewhere() -> None:
    """In OpenAI's form, and nothing that looks like a fault of ours."""
    async with site(drain_seconds=0.05) as place:
        reader, writer = await place.connect()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
            b"content-length: 9\r\n\r\n"
        )
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)  # its body is waited for
        place.signal()
        answer = await asyncio.wait_for(reader.read(), SECONDS)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'"code":"stopping"' in answer
        writer.close()
        await asyncio.wait_for(asyncio.shield(place.serving), SECONDS)


async def test_an_answer_that_is_behind_no_gate_has_the_time_that_is_left() -> None:
    """As the bytes of a file that somebody fetches have."""
    is_asked, go = asyncio.Event(), asyncio.Event()

    async def slow(_: Request) -> Response:
        is_asked.set()
        await go.wait()
        return Response("whole")

    async with site(others=[Route("/slow", slow)]) as place:
        asked = asyncio.create_task(place.client.get("/slow"))
        await asyncio.wait_for(is_asked.wait(), SECONDS)
        place.signal()
        while not place.server.should_exit:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        assert (place.server.config.timeout_graceful_shutdown or 0) > 1
        go.set()
        assert (await asyncio.wait_for(asked, SECONDS)).text == "whole"
        await asyncio.wait_for(asyncio.shield(place.serving), SECONDS)
