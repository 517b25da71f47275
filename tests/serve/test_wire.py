"""Malformed bytes over a socket: each case has an answer, and no other client is affected."""

from __future__ import annotations

import json
import resource
import socket
from contextlib import ExitStack

import openai
import pytest

from bench.server.served import Place
from tests.serve.wire import chunked, connected, exchange, head, rest, statuses, whole
from tidemill import demo

CHAT = json.dumps(
    {
        "model": demo.NAME,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4,
    }
).encode()
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: server\r\n\r\n"
ONE_CHUNK = chunked(CHAT)


@pytest.fixture(autouse=True)
def others_are_served(client: openai.OpenAI) -> object:
    """Check after each test that another client is still answered."""
    yield
    assert client.models.list().data


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(
            head(f"Content-Length: {len(ONE_CHUNK)}", "Transfer-Encoding: chunked")
            + ONE_CHUNK
            + SMUGGLED,
            id="both lengths",
        ),
        pytest.param(
            head("Transfer-Encoding: chunked", "Content-Length: 0") + ONE_CHUNK + SMUGGLED,
            id="both lengths, the other first",
        ),
        pytest.param(
            head(f"Content-Length: {len(CHAT)}", "Content-Length: 0") + CHAT + SMUGGLED,
            id="two lengths",
        ),
        pytest.param(
            head(f"Content-Length: {len(CHAT)}, 0") + CHAT + SMUGGLED, id="two lengths in one"
        ),
        pytest.param(head("Content-Length: -1") + CHAT + SMUGGLED, id="less than nothing"),
        pytest.param(head(f"Content-Length: +{len(CHAT)}") + CHAT + SMUGGLED, id="a sign"),
        pytest.param(head(f"Content-Length: {len(CHAT):#x}") + CHAT + SMUGGLED, id="in hex"),
        pytest.param(head(f"Content-Length : {len(CHAT)}") + CHAT + SMUGGLED, id="a space"),
        pytest.param(head("Content-Length: 9" * 1) + CHAT + SMUGGLED, id="too short a length"),
        pytest.param(
            head("Transfer-Encoding: xchunked") + ONE_CHUNK + SMUGGLED, id="unknown encoding"
        ),
        pytest.param(
            head("Transfer-Encoding: chunked, identity") + ONE_CHUNK + SMUGGLED,
            id="chunks inside another encoding",
        ),
        pytest.param(
            head("Transfer-Encoding: chunked", "Transfer-Encoding: x") + ONE_CHUNK + SMUGGLED,
            id="two encodings",
        ),
        pytest.param(
            head("Transfer-Encoding:\x0bchunked") + ONE_CHUNK + SMUGGLED, id="a tab of another kind"
        ),
        pytest.param(
            head("Transfer-Encoding: chunked") + b"zz\r\n" + CHAT + b"\r\n0\r\n\r\n" + SMUGGLED,
            id="a size that is not a number",
        ),
        pytest.param(
            head("Transfer-Encoding: chunked") + b"-1\r\n" + CHAT + SMUGGLED, id="a negative size"
        ),
        pytest.param(
            head("Transfer-Encoding: chunked") + b"f" * 17 + b"\r\n" + CHAT + SMUGGLED,
            id="a size beyond all numbers",
        ),
        pytest.param(
            head("Transfer-Encoding: chunked") + b"3\r\n" + CHAT + b"\r\n0\r\n\r\n" + SMUGGLED,
            id="a size that is too small",
        ),
        pytest.param(
            head(f"Content-Length: {len(CHAT)}", "X-Folded: a", " Transfer-Encoding: chunked")
            + CHAT
            + SMUGGLED,
            id="a folded header",
        ),
        pytest.param(head("X-Null: a\x00b", "Content-Length: 0") + SMUGGLED, id="a null byte"),
        pytest.param(head("No colon", "Content-Length: 0") + SMUGGLED, id="no colon"),
        pytest.param(head(": empty", "Content-Length: 0") + SMUGGLED, id="no name"),
        pytest.param(b"\x16\x03\x01\x02\x00" + bytes(200) + b"\r\n\r\n", id="TLS"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="HTTP/2"),
        pytest.param(b"POST /v1/models\r\n\r\n", id="no version"),
        pytest.param(b"POST /v1/models HTTP/9.9\r\nHost: x\r\n\r\n", id="another version"),
        pytest.param(b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", id="a long url"),
        pytest.param(head(f"X-Long: {'a' * 200_000}", "Content-Length: 0"), id="a long header"),
        pytest.param(
            head(*(f"X-{i}: {i}" for i in range(20_000)), "Content-Length: 0"), id="many headers"
        ),
    ],
)
def test_ambiguous_requests_end_the_connection(place: Place, sent: bytes) -> None:
    """There is at most one refusal, and nothing after it is answered."""
    codes = statuses(exchange(place, sent, ends=True))
    assert len(codes) <= 1
    assert all(400 <= status < 500 for status in codes)


def test_two_requests_in_one_packet_are_answered(place: Place) -> None:
    """The responses keep their order, and the connection stays open for both."""
    answer = exchange(place, whole(CHAT) + whole(b"{}", "Connection: close"))
    assert statuses(answer) == [200, 400]
    assert answer.index(b"chat.completion") < answer.index(b'"messages"')


def test_a_chunked_body_is_read(place: Place) -> None:
    """The chunk boundaries do not matter."""
    cut = chunked(CHAT[:1], CHAT[1:7], CHAT[7:])
    answer = exchange(place, head("Transfer-Encoding: chunked", "Connection: close") + cut)
    assert statuses(answer) == [200]


@pytest.mark.parametrize("declares", [True, False])
def test_an_endless_body_is_refused(place: Place, *, declares: bool) -> None:
    """A declared length is refused at once; a chunked body once it exceeds the limit."""
    if declares:
        answer = b""
        with connected(place) as held:  # closes it first: the server waits for the rest of a body
            held.sendall(head(f"Content-Length: {10**12}"))
            while b'"error"' not in answer and (part := held.recv(65_536)):
                answer += part
    else:
        drop = b"100000\r\n" + b" " * 2**20 + b"\r\n"
        answer = exchange(place, head("Transfer-Encoding: chunked"), *[drop] * 60, ends=True)
    # A client that is still sending may find the connection closed before it reads the error.
    assert statuses(answer) in ([413], [])
    assert not declares or b'"error"' in answer


@pytest.mark.parametrize(
    "sent",
    [head("Content-Length: 100"), head("Content-Length: 100") + b'{"mess', b"POST /v1/ch"],
    ids=["no body", "half a body", "half a head"],
)
def test_a_client_that_disconnects_early_is_dropped(place: Place, sent: bytes) -> None:
    """It gets no answer, or a refusal."""
    assert all(400 <= status < 500 for status in statuses(exchange(place, sent, ends=True)))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"a": 1, "a": 2',
        b"[" * 50_000,
        b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b"1" * 100_000,
        b'{"max_tokens": 1e999, "messages": []}',
    ],
    ids=[
        "nothing",
        "half",
        "null",
        "list",
        "bytes",
        "surrogate",
        "open",
        "deep",
        "deeper",
        "long number",
        "infinite",
    ],
)
def test_an_invalid_body_is_a_400(place: Place, body: bytes) -> None:
    """The error is in OpenAI's format."""
    answer = exchange(place, whole(body, "Connection: close"))
    assert statuses(answer) == [400]
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_thousand_silent_connections_block_no_client(place: Place, client: openai.OpenAI) -> None:
    """They hold a connection each, while other clients are answered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4_096)), hard))
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(place)) for _ in range(1_000)]
        assert client.chat.completions.create(
            model=demo.NAME, messages=[{"role": "user", "content": "Hello"}], max_tokens=2
        ).choices
        silent[-1].sendall(whole(CHAT, "Connection: close"))
        assert statuses(rest(silent[-1])) == [200]


def test_a_slow_upload_blocks_no_client(place: Place, client: openai.OpenAI) -> None:
    """Others are answered between its bytes, and the slow one in the end."""
    with connected(place) as slow:
        slow.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        slow.sendall(head(f"Content-Length: {len(CHAT)}", "Connection: close"))
        for byte in CHAT:
            slow.sendall(bytes([byte]))
        assert statuses(rest(slow)) == [200]
    with connected(place) as slow:
        slow.sendall(head(f"Content-Length: {len(CHAT)}", "Connection: close") + CHAT[:-1])
        assert client.models.list().data
        slow.sendall(CHAT[-1:])
        assert statuses(rest(slow)) == [200]
