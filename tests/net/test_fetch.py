"""Fetching of URLs: allowed hosts, redirects, limits and timeouts."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from itertools import count

import pytest
import trustme

from tests.net.inside import ADDRESSES, HOSTS, in_url
from tests.net.site import HOST, PUBLIC, Page, Site, default_context, moved
from tidemill.net.fetch import Fetcher, FetchFailed, FetchLimits
from tidemill.net.pinned_connection import Network

SECRET = "0123456789abcdef"
URL = f"http://{HOST}/clip.wav?X-Amz-Signature={SECRET}"
CLIP = Page(b"RIFF" + bytes(range(256)) * 1_000)


def fetcher(network: Network, **limits: object) -> Fetcher:
    """Return a fetcher that retries without waiting."""
    return Fetcher(FetchLimits(**({"first_delay_seconds": 0.0} | limits)), network)


async def failure(site: Site, url: str = URL, **limits: object) -> str:
    """Return the error of a fetch; it never contains the secret of the URL."""
    with pytest.raises(FetchFailed) as caught:
        await fetcher(site.network(), **limits).fetch(url)
    assert SECRET not in str(caught.value)
    return str(caught.value)


async def test_the_content_of_a_url_is_fetched() -> None:
    """The resolved address is dialled with the host's name, and the bytes arrive unchanged."""
    with Site({"/clip.wav": CLIP}) as site:
        assert await fetcher(site.network()).fetch(URL) == CLIP.data
    assert site.dialled == [(PUBLIC, 80)]
    assert site.requests == [(HOST, f"/clip.wav?X-Amz-Signature={SECRET}")]
    assert site.headers[0]["accept-encoding"] == "identity"


async def test_a_tls_host_needs_a_valid_certificate() -> None:
    """A certificate for another name fails the fetch without a retry."""
    authority = trustme.CA()
    theirs, ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert(HOST).configure_cert(theirs)
    authority.configure_trust(ours)
    with Site({"/a": CLIP}, theirs) as site:
        network = site.network(context=ours)
        assert await fetcher(network).fetch(f"https://{HOST}:8443/a") == CLIP.data
        assert site.requests == [(f"{HOST}:8443", "/a")]
        with pytest.raises(FetchFailed, match="certificate"):
            await fetcher(network).fetch("https://other.example.com/a")
    assert site.dialled == [(PUBLIC, 8443), (PUBLIC, 443)]


@pytest.mark.parametrize("inside", [*ADDRESSES, "not an address"])
async def test_no_private_address_is_dialled(inside: str) -> None:
    """No class of private address is dialled, alone or among public ones."""
    with Site({"/clip.wav": CLIP}) as site:
        for answers in ([inside], [PUBLIC, inside]):
            network = site.network(lambda *_, found=answers: found)
            with pytest.raises(FetchFailed, match="not a public host"):
                await fetcher(network).fetch(URL)
        assert site.dialled == []


@pytest.mark.parametrize("host", [in_url(host) for host in HOSTS])
async def test_a_private_address_in_any_notation_is_not_dialled(host: str) -> None:
    """A redirect to such an address is not dialled either."""
    with Site({"/": moved(f"http://{host}/latest/meta-data/")}) as site:
        # It resolves names as usual.
        network = Network(connect=site.network().connect, context=default_context())
        with pytest.raises(FetchFailed, match="not a public host"):
            await fetcher(network).fetch(f"http://{host}/")
        assert site.dialled == []
        network = site.network(lambda name, _: [PUBLIC] if name == HOST else [name.strip("[]")])
        with pytest.raises(FetchFailed, match="not a public host"):
            await fetcher(network).fetch(f"http://{HOST}/")
        assert site.dialled == [(PUBLIC, 80)]


async def test_a_name_is_resolved_once_and_dialled_as_resolved() -> None:
    """A second lookup with a private address has no effect."""
    answers: Iterator[list[str]] = iter([[PUBLIC], ["127.0.0.1"]])
    with Site({"/clip.wav": CLIP, "/again": moved(URL)}) as site:
        assert await fetcher(site.network(lambda *_: next(answers))).fetch(URL) == CLIP.data
        assert site.dialled == [(PUBLIC, 80)]
        answers = iter([[PUBLIC], ["127.0.0.1"]])
        with pytest.raises(FetchFailed, match="not a public host"):
            await fetcher(site.network(lambda *_: next(answers))).fetch(f"http://{HOST}/again")
    assert site.dialled == [(PUBLIC, 80)] * 2


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed(status: int) -> None:
    """They may be relative or lead to other hosts and ports."""
    pages = {
        "/a": moved("/b/c?x=1", status),
        "/b/c": moved("d", status),
        "/b/d": moved("//cdn.example.com:81/clip.wav#t=1", status),
        "/clip.wav": CLIP,
    }
    with Site(pages) as site:
        assert await fetcher(site.network()).fetch(f"http://{HOST}/a") == CLIP.data
    assert site.requests[1:] == [
        (HOST, "/b/c?x=1"),
        (HOST, "/b/d"),
        ("cdn.example.com:81", "/clip.wav"),
    ]


async def test_a_redirect_loop_ends() -> None:
    """The fetch fails after three redirects, without a retry."""
    with Site({"/clip.wav": moved("/b"), "/b": moved("/clip.wav")}) as site:
        assert "redirects more than 3 times" in await failure(site)
    assert len(site.requests) == 4


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("file:///etc/passwd", "must start with"),
        ("gopher://files.example.com/", "must start with"),
        ("data:audio/wav;base64,UklGRg==", "must start with"),
        ("http://a:b@files.example.com/", "user name"),
        ("http://files.example.com\\@127.0.0.1/", "characters"),
        ("http://[::1/", "download failed"),
        ("https:///x", "no valid host"),
    ],
)
async def test_redirects_follow_the_same_rules(place: str, why: str) -> None:
    """A redirect to any forbidden URL is refused."""
    with Site({"/clip.wav": moved(place)}) as site:
        assert why in await failure(site)
        assert len(site.requests) == 1


async def test_https_is_never_downgraded_to_http() -> None:
    """A redirect from https to http fails the fetch."""
    authority = trustme.CA()
    theirs, ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert(HOST).configure_cert(theirs)
    authority.configure_trust(ours)
    with (
        Site({"/a": moved(URL)}, theirs) as site,
        pytest.raises(FetchFailed, match="must start with https://"),
    ):
        await fetcher(site.network(context=ours)).fetch(f"https://{HOST}/a")


async def test_only_allowed_hosts_are_fetched() -> None:
    """The whole host name must match in any case, also in redirects."""
    pages = {"/clip.wav": CLIP, "/away": moved(f"http://cdn.example.com/clip.wav?{SECRET}")}
    with Site(pages) as site:
        allowed = frozenset({HOST})
        one = fetcher(site.network(), allowed_hosts=allowed)
        assert await one.fetch(URL.replace(HOST, HOST.upper())) == CLIP.data
        for url in (
            f"http://{HOST}/away",
            f"http://evil.{HOST}/clip.wav",
            f"http://{HOST}.evil.example/clip.wav",
            f"http://{PUBLIC}/clip.wav",
        ):
            assert "not an allowed host" in await failure(site, url, allowed_hosts=allowed)
    assert {host for host, _ in site.requests} <= {HOST, HOST.upper()}


@pytest.mark.parametrize(
    "page",
    [
        Page(bytes(1_001)),
        Page(b"", length=10**12, hangs=0),
        Page(bytes(5_000), length=-1),
        Page(bytes(10**6), length=-1, hangs=10**6),
    ],
)
async def test_no_more_than_the_limit_is_read(page: Page) -> None:
    """The limit applies to the Content-Length header and to the received bytes."""
    with Site({"/clip.wav": page}) as site:
        assert "larger than 1,000 bytes" in await failure(site, max_bytes=1_000)
        assert len(site.requests) == 1


async def test_exactly_the_limit_is_allowed() -> None:
    """The limit is inclusive, with and without a Content-Length header."""
    for length in (None, -1):
        with Site({"/clip.wav": Page(bytes(1_000), length=length)}) as site:
            one = fetcher(site.network(), max_bytes=1_000)
            assert await one.fetch(URL) == bytes(1_000)


async def test_a_truncated_response_is_retried() -> None:
    """The next try may be complete."""
    pages = (Page(bytes(500), length=1_000), CLIP)
    with Site({"/clip.wav": pages}) as site:
        assert await fetcher(site.network()).fetch(URL) == CLIP.data
    with Site({"/clip.wav": pages[0]}) as site:
        assert "only 500 of 1,000 bytes arrived" in await failure(site)


async def test_a_compressed_response_is_refused() -> None:
    """Nothing requested compression."""
    page = Page(b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    with Site({"/clip.wav": page}) as site:
        assert "compressed" in await failure(site)


@pytest.mark.parametrize(
    ("status", "num_tries"),
    [
        *((status, 1) for status in (204, 206, 304, 400, 401, 403, 404, 410)),
        *((status, 3) for status in (408, 429, 500, 502, 503)),
    ],
)
async def test_a_temporary_status_is_retried(status: int, num_tries: int) -> None:
    """It is retried a few times; the response's text is never shown."""
    with Site({"/clip.wav": Page(b"secret of a host inside", status)}) as site:
        assert await failure(site) == f"its host returned HTTP {status}"
        assert len(site.requests) == num_tries


async def test_a_host_that_recovers_is_fetched() -> None:
    """The third try succeeds after two failures."""
    with Site({"/clip.wav": (Page(status=503), Page(status=500), CLIP)}) as site:
        assert await fetcher(site.network()).fetch(URL) == CLIP.data


@pytest.mark.parametrize(
    "page",
    [
        Page(CLIP.data, hangs=10),
        Page(CLIP.data, drips=True),
        Page(bytes(99), length=-1, drips=True),
    ],
)
async def test_a_slow_host_times_out(page: Page) -> None:
    """One host stops sending, and another sends a byte at a time without an end."""
    with Site({"/clip.wav": page}) as site:
        words = await failure(site, whole_seconds=0.3, stall_seconds=0.2, max_tries=1)
    assert "timed out" in words or "only" in words


async def test_an_unknown_host_name_is_reported() -> None:
    """The lookup is retried, because it may succeed later."""
    lookups = count()

    def resolve(host: str, port: int) -> list[str]:
        next(lookups)
        raise OSError(f"no such name: {host}:{port}")

    with Site({}) as site, pytest.raises(FetchFailed, match="was not found"):
        await fetcher(site.network(resolve)).fetch(URL)
    assert next(lookups) == 3


async def test_the_next_address_is_dialled_when_one_is_unreachable() -> None:
    """Some addresses of a host may be unreachable from here."""
    with Site({"/clip.wav": CLIP}) as site:
        there = site.network(lambda *_: ["2a00:1450:4001::1", PUBLIC])

        def connect(place: tuple[str, int], seconds: float) -> object:
            if ":" in place[0]:
                raise OSError("network is unreachable")
            return there.connect(place, seconds)

        network = Network(there.resolve, connect, there.context)  # type: ignore[arg-type]
        assert await fetcher(network).fetch(URL) == CLIP.data
    assert site.dialled == [(PUBLIC, 80)]


async def test_a_slow_host_blocks_no_other_fetch() -> None:
    """Twenty other fetches finish while it hangs; cancelling the slow one frees its thread."""
    pages = {"/slow": Page(CLIP.data, hangs=10), "/clip.wav": CLIP}
    with Site(pages) as site:
        one = fetcher(site.network())
        slow = asyncio.create_task(one.fetch(f"http://{HOST}/slow"))
        await asyncio.to_thread(site.has_request.wait)
        assert await asyncio.gather(*(one.fetch(URL) for _ in range(20))) == [CLIP.data] * 20
        assert not slow.done()
        slow.cancel()
        await asyncio.wait([slow])
        assert slow.cancelled()
        one._threads.shutdown(wait=True)  # it would wait for any thread that still reads


async def test_a_cancelled_fetch_dials_no_further_address() -> None:
    """A dial cannot be cancelled, but the next address is not tried."""
    dialled: list[str] = []
    is_dialled, may_end = threading.Event(), threading.Event()

    def connect(place: tuple[str, int], seconds: float) -> object:
        dialled.append(place[0])
        is_dialled.set()
        may_end.wait()
        raise OSError(f"not there, for {seconds:g} s")

    network = Network(lambda *_: [PUBLIC, "8.8.4.4", "1.1.1.1"], connect)  # type: ignore[arg-type]
    one = fetcher(network)
    waiting = asyncio.create_task(one.fetch(URL))
    await asyncio.to_thread(is_dialled.wait)
    waiting.cancel()
    await asyncio.wait([waiting])
    may_end.set()
    one._threads.shutdown(wait=True)
    assert dialled == [PUBLIC]
