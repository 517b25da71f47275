"""Connections that say nothing, too much, or do not listen; what is no HTTP is in tests/serve."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress

import pytest

from tests.server.rig import SECONDS, site
from tidemill.server import http_protocol
from tidemill.server.http_protocol import MAX_HEAD_BYTES, Connection

CHAT = b"/v1/chat/completions"
LARGE = 24 * 2**20
HEAD = b"POST %b HTTP/1.1\r\nhost: x\r\n" % CHAT


def sent_whole(port: int, request: bytes) -> bytes:
    """Return the answer to a client that reads nothing before it has sent all."""
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as held:
        held.sendall(request)
        answer = b""
        while part := held.recv(65_536):
            answer += part
        return answer


async def test_who_says_nothing_is_let_go() -> None:
    """Before a first head, and within one."""
    async with site(header_seconds=0.05) as place:
        assert await place.raw() == b""
        assert await place.raw(b"POST /v1") == b""


async def test_whoever_waits_for_an_answer_may_be_silent() -> None:
    """The time of a head ends with it; that of the next begins with its first byte."""
    async with site() as place:
        body = json.dumps({"wait": True}).encode()
        reader, writer = await place.connect()
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        await asyncio.wait_for(place.engine.is_asked.wait(), SECONDS)
        [connection] = place.server.server_state.connections
        assert isinstance(connection, Connection)
        assert connection._timer is None
        place.engine.go.set()
        assert b"200 OK" in await asyncio.wait_for(reader.readline(), SECONDS)
        assert connection._timer is None
        writer.close()


async def test_a_head_without_end_is_refused() -> None:
    """A header, many, or a url."""
    async with site() as place:
        long, many = b"a" * MAX_HEAD_BYTES, b"x: y\r\n" * (MAX_HEAD_BYTES // 6)
        for sent in (HEAD + b"x: " + long, HEAD + many, b"GET /" + long):
            answer = await place.raw(sent)
            assert b" 400 " in answer.partition(b"\r\n")[0], sent[:60]
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


async def test_what_stands_around_chunks_has_an_end_too() -> None:
    """Their extensions, and trailers; whoever still sends may not read the refusal."""
    async with site() as place:
        head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
        for begun, more in ((head + b"2;", b"a" * 2**20), (head + b"0\r\n", b"x: y\r\n" * 2**18)):
            with suppress(ConnectionError):
                answer = await place.raw(begun, more)
                assert not answer or b" 400 " in answer.partition(b"\r\n")[0]
        assert not place.engine.asked


async def test_another_protocol_is_refused() -> None:
    """Its body would be read as requests."""
    async with site() as place:
        answer = await place.raw(
            HEAD + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\n{}"
        )
        assert b" 400 " in answer.partition(b"\r\n")[0]
        assert not place.engine.asked


async def test_an_answer_before_the_end_of_a_request_is_read() -> None:
    """What is still sent is thrown away for a while, on a connection that goes on."""
    async with site(max_body_bytes=1_000) as place:
        reader, writer = await place.connect()
        writer.write(HEAD + b"content-length: 300000\r\n\r\n" + b"x" * 100_000)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)
        assert b" 413 " in head
        writer.write(b"x" * 200_000 + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"200 OK"), SECONDS)
        writer.close()


@pytest.mark.parametrize(
    ("path", "kind", "status"),
    [
        (CHAT, b"application/json", b"413"),
        (CHAT, b"text/plain", b"415"),
        (b"/v1/audio/transcriptions", b"multipart/form-data", b"400"),
        (b"/nowhere", b"text/plain", b"404"),
    ],
)
async def test_an_answer_is_read_by_a_client_that_sends_its_whole_request_first(
    path: bytes, kind: bytes, status: bytes
) -> None:
    """On a connection that ends with it, too: a reset would take the answer away."""
    async with site(max_body_bytes=1_000) as place:
        head = b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" % path
        head += b"content-type: %b\r\ncontent-length: %d\r\n\r\n"
        sent = head % (kind, LARGE) + b"x" * LARGE
        answer = await asyncio.to_thread(sent_whole, place.port, sent)
        assert answer.split(b" ", 2)[1] == status
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


async def test_a_refusal_of_what_is_no_http_is_read_by_a_client_that_goes_on_sending() -> None:
    """In a head, and amid a body in chunks, whose request ends with it."""
    async with site() as place:
        chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n"
        for begun in (b"no http\r\n", chunked + b"no chunk\r\n"):
            answer = await asyncio.to_thread(sent_whole, place.port, begun + b"x" * LARGE)
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
        assert not place.engine.asked


@pytest.mark.parametrize("is_begun", [False, True])
async def test_what_is_no_http_behind_pipelined_requests_ends_all_of_them(
    caplog: pytest.LogCaptureFixture, *, is_begun: bool
) -> None:
    """The refusal is the last that is written, and nothing of the others is worked on."""
    async with site() as place:
        body = json.dumps({"wait": True}).encode()
        request = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
        reader, writer = await place.connect()
        if is_begun:
            writer.write(request * 2)
            await asyncio.wait_for(place.engine.is_asked.wait(), SECONDS)
            request = b""
        writer.write(request * 2 + b"no http\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), SECONDS)
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
        if is_begun:
            await asyncio.wait_for(place.engine.is_left.wait(), SECONDS)
        writer.close()
    assert len(place.engine.asked) == is_begun
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_nothing_is_answered_behind_the_last_answer_of_a_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A server that stops closes behind the one it works on, and the next has begun to come."""
    async with site() as place:
        body = json.dumps({"wait": True}).encode()
        head = HEAD + b"content-length: %d\r\n\r\n"
        reader, writer = await place.connect()
        writer.write(head % len(body) + body)
        await asyncio.wait_for(place.engine.is_asked.wait(), SECONDS)
        [connection] = place.server.server_state.connections
        assert isinstance(connection, Connection)
        connection.cycle.keep_alive = False
        writer.write(head % 2 + b"{")
        while not connection.pipeline:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        place.engine.go.set()
        answer = await asyncio.wait_for(reader.read(), SECONDS)
        writer.write(b"}")
        writer.close()
    assert answer.count(b"HTTP/1.1") == 1
    assert len(place.engine.asked) == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_pipelined_requests_end_with_their_connection() -> None:
    """Also the one that is worked on, which is not the last."""
    async with site() as place:
        body = json.dumps({"wait": True}).encode()
        request = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
        _, writer = await place.connect()
        writer.write(request * 2)
        await asyncio.wait_for(place.engine.is_asked.wait(), SECONDS)
        writer.transport.abort()
        await asyncio.wait_for(place.engine.is_left.wait(), SECONDS)


async def test_what_a_client_sends_after_its_answer_has_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether it stops or trickles."""
    monkeypatch.setattr(http_protocol, "_LINGER_IDLE_SECONDS", 0.05)
    monkeypatch.setattr(http_protocol, "_LINGER_SECONDS", 0.2)
    async with site(max_body_bytes=1_000) as place:
        for closes in (b"", b"connection: close\r\n"):
            reader, writer = await place.connect()
            writer.write(HEAD + closes + b"content-length: 300000\r\n\r\n")
            await asyncio.wait_for(reader.read(), SECONDS)  # to its end
            writer.close()
            _, writer = await place.connect()
            writer.write(HEAD + closes + b"content-length: 300000\r\n\r\n")
            with suppress(ConnectionError):
                async with asyncio.timeout(SECONDS):
                    while True:
                        writer.write(b"x")
                        await writer.drain()
                        await asyncio.sleep(0.02)
            writer.close()


async def test_who_does_not_read_is_let_go_and_its_work_ended() -> None:
    """The answer fills what lies between, and then nobody takes it."""
    async with site(stall_seconds=0.05) as place:
        _, writer = await place.connect()
        body = json.dumps({"stream": True, "size": 50_000_000}).encode()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        await asyncio.wait_for(place.engine.is_left.wait(), SECONDS)
        await asyncio.wait_for(place.context.admission.wait_until_empty(), SECONDS)
        writer.close()
