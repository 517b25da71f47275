"""Connections that send nothing, send too much or do not read; tests/serve covers bad HTTP."""

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
    """Return the response to a client that sends everything before it reads."""
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as held:
        held.sendall(request)
        answer = b""
        while part := held.recv(65_536):
            answer += part
        return answer


async def test_a_silent_connection_is_closed() -> None:
    """It is closed before its first headers, or within them."""
    async with site(header_seconds=0.05) as place:
        assert await place.raw() == b""
        assert await place.raw(b"POST /v1") == b""


async def test_a_client_that_waits_for_a_response_may_be_silent() -> None:
    """The header timeout ends with the headers; the next request's first byte restarts it."""
    async with site() as place:
        body = json.dumps({"wait": True}).encode()
        reader, writer = await place.connect()
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        await asyncio.wait_for(place.engine.has_request.wait(), SECONDS)
        [connection] = place.server.server_state.connections
        assert isinstance(connection, Connection)
        assert connection._timer is None
        place.engine.go.set()
        assert b"200 OK" in await asyncio.wait_for(reader.readline(), SECONDS)
        assert connection._timer is None
        writer.close()


async def test_endless_headers_are_refused() -> None:
    """One long header, many headers and a long URL are refused."""
    async with site() as place:
        long, many = b"a" * MAX_HEAD_BYTES, b"x: y\r\n" * (MAX_HEAD_BYTES // 6)
        for sent in (HEAD + b"x: " + long, HEAD + many, b"GET /" + long):
            answer = await place.raw(sent)
            assert b" 400 " in answer.partition(b"\r\n")[0], sent[:60]
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


async def test_chunk_extensions_and_trailers_are_limited() -> None:
    """A client that is still sending may miss the refusal."""
    async with site() as place:
        head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
        for begun, more in ((head + b"2;", b"a" * 2**20), (head + b"0\r\n", b"x: y\r\n" * 2**18)):
            with suppress(ConnectionError):
                answer = await place.raw(begun, more)
                assert not answer or b" 400 " in answer.partition(b"\r\n")[0]
        assert not place.engine.requests


async def test_protocol_upgrades_are_refused() -> None:
    """Otherwise the upgraded protocol's bytes would be parsed as requests."""
    async with site() as place:
        answer = await place.raw(
            HEAD + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\n{}"
        )
        assert b" 400 " in answer.partition(b"\r\n")[0]
        assert not place.engine.requests


async def test_a_response_before_the_end_of_its_request_is_read() -> None:
    """The rest of the request is discarded for a while, and the connection stays open."""
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
async def test_a_client_that_sends_its_whole_request_first_reads_the_response(
    path: bytes, kind: bytes, status: bytes
) -> None:
    """The connection then ends without a reset, which would lose the response."""
    async with site(max_body_bytes=1_000) as place:
        head = b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" % path
        head += b"content-type: %b\r\ncontent-length: %d\r\n\r\n"
        sent = head % (kind, LARGE) + b"x" * LARGE
        answer = await asyncio.to_thread(sent_whole, place.port, sent)
        assert answer.split(b" ", 2)[1] == status
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


async def test_a_client_that_keeps_sending_reads_the_refusal_of_bad_http() -> None:
    """The bad part is in the headers, or in a chunked body, whose request ends with it."""
    async with site() as place:
        chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n"
        for begun in (b"no http\r\n", chunked + b"no chunk\r\n"):
            answer = await asyncio.to_thread(sent_whole, place.port, begun + b"x" * LARGE)
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
        assert not place.engine.requests


@pytest.mark.parametrize("is_begun", [False, True])
async def test_bad_http_after_pipelined_requests_ends_all_of_them(
    caplog: pytest.LogCaptureFixture, *, is_begun: bool
) -> None:
    """The refusal is the last response, and work on the others stops."""
    async with site() as place:
        body = json.dumps({"wait": True}).encode()
        request = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
        reader, writer = await place.connect()
        if is_begun:
            writer.write(request * 2)
            await asyncio.wait_for(place.engine.has_request.wait(), SECONDS)
            request = b""
        writer.write(request * 2 + b"no http\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), SECONDS)
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
        if is_begun:
            await asyncio.wait_for(place.engine.is_left.wait(), SECONDS)
        writer.close()
    assert len(place.engine.requests) == is_begun
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_nothing_is_answered_after_a_connections_last_response(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A stopping server closes it after the current request, while the next one arrives."""
    async with site() as place:
        body = json.dumps({"wait": True}).encode()
        head = HEAD + b"content-length: %d\r\n\r\n"
        reader, writer = await place.connect()
        writer.write(head % len(body) + body)
        await asyncio.wait_for(place.engine.has_request.wait(), SECONDS)
        [connection] = place.server.server_state.connections
        assert isinstance(connection, Connection)
        connection.cycle.keep_alive = False
        writer.write(head % 2 + b"{")
        while not connection.pipeline:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
        place.engine.go.set()
        answer = await asyncio.wait_for(reader.read(), SECONDS)
        writer.write(b"}")
        writer.close()
    assert answer.count(b"HTTP/1.1") == 1
    assert len(place.engine.requests) == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_pipelined_requests_end_with_their_connection() -> None:
    """The running one ends too, although it is not the last."""
    async with site() as place:
        body = json.dumps({"wait": True}).encode()
        request = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
        _, writer = await place.connect()
        writer.write(request * 2)
        await asyncio.wait_for(place.engine.has_request.wait(), SECONDS)
        writer.transport.abort()
        await asyncio.wait_for(place.engine.is_left.wait(), SECONDS)


async def test_bytes_after_an_early_response_are_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection ends whether the client stops or trickles."""
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


async def test_a_client_that_does_not_read_is_disconnected_and_its_work_cancelled() -> None:
    """The response fills all buffers, and then the client does not read it."""
    async with site(stall_seconds=0.05) as place:
        _, writer = await place.connect()
        body = json.dumps({"stream": True, "size": 50_000_000}).encode()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        await asyncio.wait_for(place.engine.is_left.wait(), SECONDS)
        await asyncio.wait_for(place.context.admission.wait_until_empty(), SECONDS)
        writer.close()
