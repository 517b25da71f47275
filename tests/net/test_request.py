"""One PUT of a stream to a checked address."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.net.receiver import HOST, PUBLIC, Receiver, Script
from tidemill.net.pinned_connection import Network
from tidemill.net.request import Response, put_stream
from tidemill.net.ssrf_guard import resolve_target

URL = f"https://{HOST}:8443/bucket/out.jsonl?X-Amz-Signature=abc%2F"
CHUNK = b"x" * 2**16


def put(network: Network, num_chunks: int = 3, url: str = URL) -> Response:
    """PUT some chunks to the URL."""

    def chunks() -> Iterator[bytes]:
        for _ in range(num_chunks):
            yield CHUNK

    target = resolve_target(url, network.resolve)
    return put_stream(network, target, target.addresses[0], chunks(), num_chunks * len(CHUNK))


def test_the_checked_address_is_dialled_with_the_name_of_the_host(tmp_path: Path) -> None:
    """The dialled address is the checked one; Host, SNI and certificate are the host's."""
    with Receiver(tmp_path, Script(201, "stored")) as receiver:
        assert put(receiver.network()) == Response(201, "stored")
    assert receiver.dialled == [(PUBLIC, 8443)]
    (got,) = receiver.received
    assert (got.host, got.path) == (f"{HOST}:8443", "/bucket/out.jsonl?X-Amz-Signature=abc%2F")
    assert (got.length, got.body) == (str(3 * 2**16), CHUNK * 3)


def test_a_server_of_another_name_is_not_trusted(tmp_path: Path) -> None:
    """A certificate for another host ends the transfer before a byte is sent."""
    with (
        Receiver(tmp_path, Script()) as receiver,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        put(receiver.network(), url="https://other.example.com/x")
    assert receiver.received == []


def test_redirects_are_responses(tmp_path: Path) -> None:
    """A redirect is not followed: nothing else is dialled."""
    script = Script(307, headers={"Location": "https://169.254.169.254/latest/"})
    with Receiver(tmp_path, script) as receiver:
        answer = put(receiver.network())
    assert (answer.status, answer.is_success, answer.is_retryable) == (307, False, False)
    assert receiver.dialled == [(PUBLIC, 8443)]


def test_a_refusal_before_the_end_of_the_body_is_read(tmp_path: Path) -> None:
    """A server that sends 403 and closes while the upload continues is understood."""
    with Receiver(tmp_path, Script(403, "expired", reads=False)) as receiver:
        assert put(receiver.network(), num_chunks=1000) == Response(403, "expired")


def test_a_server_that_does_not_read_times_out(tmp_path: Path) -> None:
    """No progress for the stall timeout fails both sending and waiting."""
    for reads, num_chunks in ((True, 1), (False, 1000)):
        with (
            Receiver(tmp_path, Script(reads=reads, hangs=True)) as receiver,
            pytest.raises(TimeoutError),
        ):
            put(receiver.network(stall_seconds=0.3), num_chunks)


def test_a_response_that_drips_times_out(tmp_path: Path) -> None:
    """If the status has arrived, the response counts without its text."""
    with (
        Receiver(tmp_path, Script(drips="headers")) as receiver,
        pytest.raises(TimeoutError),
    ):
        put(receiver.network(stall_seconds=0.3))
    with Receiver(tmp_path, Script(201, drips="text")) as receiver:
        assert put(receiver.network(stall_seconds=0.3)).is_success


@pytest.mark.parametrize(
    ("status", "is_success", "is_retryable"),
    [
        (200, True, False),
        (204, True, False),
        (400, False, False),
        (403, False, False),
        (404, False, False),
        (408, False, True),
        (429, False, True),
        (500, False, True),
        (503, False, True),
    ],
)
def test_responses_show_whether_to_retry(
    status: int, *, is_success: bool, is_retryable: bool
) -> None:
    """Server errors and rate limits are retryable; refusals are not."""
    answer = Response(status, "")
    assert (answer.is_success, answer.is_retryable) == (is_success, is_retryable)
