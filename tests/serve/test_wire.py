"""Bytes that no client of good will sends, over a socket: each has an answer, and harms nobody."""

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
    """Hold each test to it that somebody else is answered afterwards."""
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
            id="a size that is no number",
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
def test_what_two_servers_could_read_differently_ends_the_connection(
    place: Place, sent: bytes
) -> None:
    """One refusal at most, and nothing that stands behind it is answered."""
    told = statuses(exchange(place, sent, ends=True))
    assert len(told) <= 1
    assert all(400 <= status < 500 for status in told)


def test_two_requests_in_one_packet_are_two(place: Place) -> None:
    """In their order, and the connection stays for both."""
    answer = exchange(place, whole(CHAT) + whole(b"{}", "Connection: close"))
    assert statuses(answer) == [200, 400]
    assert answer.index(b"chat.completion") < answer.index(b'"messages"')


def test_a_body_in_chunks_is_read(place: Place) -> None:
    """However it is cut."""
    cut = chunked(CHAT[:1], CHAT[1:7], CHAT[7:])
    answer = exchange(place, head("Transfer-Encoding: chunked", "Connection: close") + cut)
    assert statuses(answer) == [200]


@pytest.mark.parametrize("declares", [True, False])
def test_a_body_without_end_is_cut_off(place: Place, *, declares: bool) -> None:
    """By what it says of its length, at once; in chunks, when it has come so far."""
    if declares:
        answer = exchange(place, head(f"Content-Length: {10**12}"))
    else:
        drop = b"100000\r\n" + b" " * 2**20 + b"\r\n"
        answer = exchange(place, head("Transfer-Encoding: chunked"), *[drop] * 60)
    # Whoever still sends may find the connection closed before the words are read.
    assert statuses(answer) in ([413], [])
    assert not declares or b'"error"' in answer


@pytest.mark.parametrize(
    "sent",
    [head("Content-Length: 100"), head("Content-Length: 100") + b'{"mess', b"POST /v1/ch"],
    ids=["no body", "half a body", "half a head"],
)
def test_who_leaves_before_the_end_is_let_go(place: Place, sent: bytes) -> None:
    """Nobody is answered, or with a refusal."""
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
def test_a_body_that_is_no_request_is_a_400(place: Place, body: bytes) -> None:
    """With an error in OpenAI's form."""
    answer = exchange(place, whole(body, "Connection: close"))
    assert statuses(answer) == [400]
    told = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert told["message"]
    assert told["type"] == "invalid_request_error"


def test_a_thousand_who_say_nothing_keep_nobody_out(place: Place, client: openai.OpenAI) -> None:
    """They hold a connection each, and others are answered meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4_096)), hard))
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(place)) for _ in range(1_000)]
        assert client.chat.completions.create(
            model=demo.NAME, messages=[{"role": "user", "content": "Hello"}], max_tokens=2
        ).choices
        silent[-1].sendall(whole(CHAT, "Connection: close"))
        assert statuses(rest(silent[-1])) == [200]


def test_an_upload_by_drops_keeps_nobody_waiting(place: Place, client: openai.OpenAI) -> None:
    """Others are answered between two drops, and the slow one in the end."""
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
