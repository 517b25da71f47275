"""A server that is being stopped: those inside finish, nobody else is let in."""

from __future__ import annotations

import asyncio

from tests.server.rig import SECONDS, site

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
