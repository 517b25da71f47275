"""Allowed URLs and their targets."""

from __future__ import annotations

import socket
from threading import Event

import pytest

from tests.net.inside import ADDRESSES
from tidemill.net import ssrf_guard
from tidemill.net.ssrf_guard import Scheme, UrlRefused, redact_url, resolve_target


@pytest.mark.parametrize("inside", [*ADDRESSES, "not an address"])
def test_one_private_address_refuses_the_host(inside: str) -> None:
    """A host that also resolves to a private address is refused, whatever the order."""
    for answers in ([inside, "8.8.8.8"], ["8.8.8.8", inside]):
        with pytest.raises(UrlRefused, match="not a public host"):
            resolve_target("https://files.example.com/x", lambda *_, found=answers: found)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://example.com/x", "https"),
        ("ftp://example.com/x", "https"),
        ("//example.com/x", "https"),
        ("example.com/x", "https"),
        ("", "characters"),
        ("https://", "no valid host"),
        ("https:///x", "no valid host"),
        ("https://?x", "no valid host"),
        ("https://user@example.com/", "user name"),
        ("https://user:word@example.com/", "user name"),
        ("https://example.com:443@10.0.0.1/", "user name"),
        ("https://10.0.0.1\\@example.com/", "characters"),
        ("https://example.com\\@10.0.0.1/", "characters"),
        ("https://example.com /x", "characters"),
        ("https://example.com/x y", "characters"),
        ("https://example.com/x\r\nHost: y", "characters"),
        ("https://ex\tample.com/", "characters"),
        ("https://exämple.com/", "characters"),
        ("https://example.com\u3002/", "characters"),
        ("https://example.com/\ud800", "characters"),
        ("https://exa%6dple.com/", "no valid host"),
        ("https://[fe80::1%25eth0]/", "no valid host"),
        ("https://[::1/", "is not valid"),
        ("https://example.com:0/", "no valid host"),
        ("https://example.com:99999/", "is not valid"),
        ("https://example.com:x/", "is not valid"),
        ("https://example.com:4 43/", "characters"),
    ],
)
def test_urls_that_parsers_may_read_differently_are_refused(url: str, reason: str) -> None:
    """Other schemes, user names, backslashes and spaces are refused before anything is resolved."""

    def resolve(host: str, port: int) -> list[str]:
        raise AssertionError(f"{host}:{port} was looked up")

    with pytest.raises(UrlRefused, match=reason) as caught:
        resolve_target(url, resolve)
    assert "'x'" not in str(caught.value)


def test_a_host_that_is_an_address_is_checked_like_any_other() -> None:
    """The resolver normalises addresses in any notation."""
    for url in ("https://2130706433/", "https://0x7f.1/", "https://127.1/", "https://[::1]/"):
        with pytest.raises(UrlRefused, match="not a public host"):
            resolve_target(url)


def test_a_target_keeps_the_url_as_it_was_signed() -> None:
    """Path and query stay byte for byte; port and addresses are the ones to dial."""
    target = resolve_target(
        "https://Files.example.com:8443/a%2Fb/../c?X-Amz-Signature=a%2Bb&y=",
        lambda *_: ["8.8.8.8", "8.8.8.8", "1.1.1.1"],
    )
    assert target.path == "/a%2Fb/../c?X-Amz-Signature=a%2Bb&y="
    assert (target.host, target.port) == ("Files.example.com", 8443)
    assert target.addresses == ("8.8.8.8", "1.1.1.1")


def test_other_schemes_are_allowed_on_request() -> None:
    """Each scheme has its default port, and the error lists the allowed schemes."""
    both: tuple[Scheme, ...] = ("https", "http")
    for url, port in (("https://example.com/x", 443), ("HTTP://example.com/x", 80)):
        target = resolve_target(url, lambda *_: ["8.8.8.8"], schemes=both)
        assert (target.scheme, target.port) == (url.partition(":")[0].lower(), port)
    with pytest.raises(UrlRefused, match="must start with https:// or http://"):
        resolve_target("file:///etc/passwd", schemes=both)


def test_a_url_without_a_path_requests_the_root() -> None:
    """The path of a bare host is `/`, and a fragment is never sent."""
    assert resolve_target("https://example.com#x", lambda *_: ["8.8.8.8"]).path == "/"
    assert resolve_target("https://example.com?a=1", lambda *_: ["8.8.8.8"]).path == "/?a=1"
    assert (
        resolve_target("https://[2a00:1450::1]:1/", lambda *_: ["8.8.8.8"]).host == "2a00:1450::1"
    )


def test_an_invalid_host_name_is_refused() -> None:
    """An empty or overlong label is reported as an invalid URL."""
    for host in ("a..example.com", f"{'a' * 64}.example.com"):
        with pytest.raises(UrlRefused, match="has no valid host"):
            resolve_target(f"https://{host}/x")


def test_a_name_server_that_hangs_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lookup cannot be cancelled, but the caller does not wait for it."""
    is_over = Event()
    monkeypatch.setattr(ssrf_guard, "_RESOLVE_SECONDS", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: is_over.wait(30) or [])
    try:
        with pytest.raises(OSError, match=r"no DNS answer within 0\.05 s"):
            resolve_target("https://slow.example.com/x")
    finally:
        is_over.set()


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/hooks/0123456789ab?token=0123456789abcd%2B",
        "https://example.com:8443?a=0123456789abcd%2B&b=0123456789ab",
    ],
)
def test_secrets_of_a_url_are_redacted(url: str) -> None:
    """Parts of the path and query are removed, raw or decoded; the host and short parts stay."""
    words = "example.com: no 0123456789abcd+, 0123456789abcd%2B or 0123456789ab in hooks"
    assert redact_url(words, url) == "example.com: no …, … or … in hooks"
