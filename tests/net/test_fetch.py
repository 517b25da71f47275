"""What a url names, fetched: from whom, through whom, how much of it, and for how long."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from itertools import count

import pytest
import trustme

from tests.net.inside import ADDRESSES, HOSTS, in_url
from tests.net.site import HOST, PUBLIC, Page, Site, moved
from tidemill.net.fetch import Fetcher, FetchFailed, FetchLimits
from tidemill.net.pinned_connection import Network

SECRET = "0123456789abcdef"
URL = f"http://{HOST}/clip.wav?X-Amz-Signature={SECRET}"
CLIP = Page(b"RIFF" + bytes(range(256)) * 1_000)


def fetcher(network: Network, **limits: object) -> Fetcher:
    """Return a fetcher that waits for nothing between its tries."""
    return Fetcher(FetchLimits(**({"first_delay_seconds": 0.0} | limits)), network)


async def failure(site: Site, url: str = URL, **limits: object) -> str:
    """Return why nothing comes; what a url hides is never among the words."""
    with pytest.raises(FetchFailed) as caught:
        await fetcher(site.network(), **limits).fetch(url)
    assert SECRET not in str(caught.value)
    return str(caught.value)


async def test_what_a_url_names_is_brought() -> None:
    """From the address that was found, under the host's name, and as it lies there."""
    with Site({"/clip.wav": CLIP}) as site:
        assert await fetcher(site.network()).fetch(URL) == CLIP.data
    assert site.dialled == [(PUBLIC, 80)]
    assert site.asked == [(HOST, f"/clip.wav?X-Amz-Signature={SECRET}")]
    assert site.headers[0]["accept-encoding"] == "identity"


async def test_a_host_behind_tls_has_to_prove_its_name() -> None:
    """A certificate for another name is the end of it: no second try."""
    authority = trustme.CA()
    theirs, ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert(HOST).configure_cert(theirs)
    authority.configure_trust(ours)
    with Site({"/a": CLIP}, theirs) as site:
        network = site.network(context=ours)
        assert await fetcher(network).fetch(f"https://{HOST}:8443/a") == CLIP.data
        assert site.asked == [(f"{HOST}:8443", "/a")]
        with pytest.raises(FetchFailed, match="certificate"):
            await fetcher(network).fetch("https://other.example.com/a")
    assert site.dialled == [(PUBLIC, 8443), (PUBLIC, 443)]


@pytest.mark.parametrize("inside", [*ADDRESSES, "not an address"])
async def test_no_host_inside_is_dialled(inside: str) -> None:
    """Whichever class of private address a name has, alone or among public ones."""
    with Site({"/clip.wav": CLIP}) as site:
        for answers in ([inside], [PUBLIC, inside]):
            network = site.network(lambda *_, found=answers: found)
            with pytest.raises(FetchFailed, match="not a public host"):
                await fetcher(network).fetch(URL)
        assert site.dialled == []


@pytest.mark.parametrize("host", [in_url(host) for host in HOSTS])
async def test_an_address_inside_in_any_notation_is_not_dialled(host: str) -> None:
    """Nor where a public host sends us there."""
    with Site({"/": moved(f"http://{host}/latest/meta-data/")}) as site:
        network = Network(connect=site.network().connect)  # names are looked up as they are
        with pytest.raises(FetchFailed, match="not a public host"):
            await fetcher(network).fetch(f"http://{host}/")
        assert site.dialled == []
        network = site.network(lambda name, _: [PUBLIC] if name == HOST else [name.strip("[]")])
        with pytest.raises(FetchFailed, match="not a public host"):
            await fetcher(network).fetch(f"http://{HOST}/")
        assert site.dialled == [(PUBLIC, 80)]


async def test_a_name_is_looked_up_once_and_dialled_as_found() -> None:
    """One that has another address the second time, inside, is not dialled there."""
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
    """To other hosts, other ports, relative ones too."""
    pages = {
        "/a": moved("/b/c?x=1", status),
        "/b/c": moved("d", status),
        "/b/d": moved("//cdn.example.com:81/clip.wav#t=1", status),
        "/clip.wav": CLIP,
    }
    with Site(pages) as site:
        assert await fetcher(site.network()).fetch(f"http://{HOST}/a") == CLIP.data
    assert site.asked[1:] == [
        (HOST, "/b/c?x=1"),
        (HOST, "/b/d"),
        ("cdn.example.com:81", "/clip.wav"),
    ]


async def test_redirects_that_go_round_end() -> None:
    """After three, without another try."""
    with Site({"/clip.wav": moved("/b"), "/b": moved("/clip.wav")}) as site:
        assert "redirects more than 3 times" in await failure(site)
    assert len(site.asked) == 4


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("file:///etc/passwd", "must begin with"),
        ("gopher://files.example.com/", "must begin with"),
        ("data:audio/wav;base64,UklGRg==", "must begin with"),
        ("http://a:b@files.example.com/", "user name"),
        ("http://files.example.com\\@127.0.0.1/", "characters"),
        ("http://[::1/", "as it should"),
        ("https:///x", "no host"),
    ],
)
async def test_a_redirect_is_held_to_the_same_rules(place: str, why: str) -> None:
    """Whatever it names."""
    with Site({"/clip.wav": moved(place)}) as site:
        assert why in await failure(site)
        assert len(site.asked) == 1


async def test_what_was_asked_for_in_secret_is_not_asked_for_in_public() -> None:
    """A redirect from https to http ends it."""
    authority = trustme.CA()
    theirs, ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert(HOST).configure_cert(theirs)
    authority.configure_trust(ours)
    with (
        Site({"/a": moved(URL)}, theirs) as site,
        pytest.raises(FetchFailed, match="must begin with https://"),
    ):
        await fetcher(site.network(context=ours)).fetch(f"https://{HOST}/a")


async def test_only_hosts_that_may_be_named_are_spoken_to() -> None:
    """Each with its whole name, in any case; redirects are held to it, too."""
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
            assert "none of the hosts" in await failure(site, url, allowed_hosts=allowed)
    assert {host for host, _ in site.asked} <= {HOST, HOST.upper()}


@pytest.mark.parametrize(
    "page",
    [
        Page(bytes(1_001)),
        Page(b"", told=10**12, hangs=0),
        Page(bytes(5_000), told=-1),
        Page(bytes(10**6), told=-1, hangs=10**6),
    ],
)
async def test_no_more_is_read_than_may_come(page: Page) -> None:
    """By what the host says, or as it comes; a host that says nothing has an end, too."""
    with Site({"/clip.wav": page}) as site:
        assert "larger than 1,000 bytes" in await failure(site, max_bytes=1_000)
        assert len(site.asked) == 1


async def test_as_much_as_may_come_comes() -> None:
    """To the byte, with a length told and without."""
    for told in (None, -1):
        with Site({"/clip.wav": Page(bytes(1_000), told=told)}) as site:
            one = fetcher(site.network(), max_bytes=1_000)
            assert await one.fetch(URL) == bytes(1_000)


async def test_what_is_cut_off_is_not_taken() -> None:
    """It may come whole the next time."""
    pages = (Page(bytes(500), told=1_000), CLIP)
    with Site({"/clip.wav": pages}) as site:
        assert await fetcher(site.network()).fetch(URL) == CLIP.data
    with Site({"/clip.wav": pages[0]}) as site:
        assert "of 1,000 bytes only 500 came" in await failure(site)


async def test_what_is_compressed_is_not_unpacked() -> None:
    """It was not asked for, and could be anything."""
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
async def test_an_answer_that_may_change_is_asked_for_again(status: int, num_tries: int) -> None:
    """A few times; what the host says beside is shown to nobody."""
    with Site({"/clip.wav": Page(b"secret of a host inside", status)}) as site:
        assert await failure(site) == f"its host returned HTTP {status}"
        assert len(site.asked) == num_tries


async def test_a_host_that_comes_back_is_heard() -> None:
    """After two failures."""
    with Site({"/clip.wav": (Page(status=503), Page(status=500), CLIP)}) as site:
        assert await fetcher(site.network()).fetch(URL) == CLIP.data


@pytest.mark.parametrize(
    "page",
    [Page(CLIP.data, hangs=10), Page(CLIP.data, drips=True), Page(bytes(99), told=-1, drips=True)],
)
async def test_a_host_that_is_too_slow_is_given_up(page: Page) -> None:
    """One that stops, and one that goes on for ever, a byte at a time."""
    with Site({"/clip.wav": page}) as site:
        words = await failure(site, whole_seconds=0.3, stall_seconds=0.2, max_tries=1)
    assert "too slow" in words or "only" in words


async def test_a_name_that_nobody_has_is_told() -> None:
    """It may be known the next time."""
    asked = count()

    def resolve(host: str, port: int) -> list[str]:
        next(asked)
        raise OSError(f"no such name: {host}:{port}")

    with Site({}) as site, pytest.raises(FetchFailed, match="was not found"):
        await fetcher(site.network(resolve)).fetch(URL)
    assert next(asked) == 3


async def test_another_address_is_dialled_where_one_is_not_there() -> None:
    """A host may have addresses that cannot be reached from here."""
    with Site({"/clip.wav": CLIP}) as site:
        there = site.network(lambda *_: ["2a00:1450:4001::1", PUBLIC])

        def connect(place: tuple[str, int], seconds: float) -> object:
            if ":" in place[0]:
                raise OSError("network is unreachable")
            return there.connect(place, seconds)

        network = Network(there.resolve, connect, there.context)  # type: ignore[arg-type]
        assert await fetcher(network).fetch(URL) == CLIP.data
    assert site.dialled == [(PUBLIC, 80)]


async def test_one_slow_host_holds_up_nobody() -> None:
    """Twenty others come while it hangs; who waits for it may give up, which frees its thread."""
    pages = {"/slow": Page(CLIP.data, hangs=10), "/clip.wav": CLIP}
    with Site(pages) as site:
        one = fetcher(site.network())
        slow = asyncio.create_task(one.fetch(f"http://{HOST}/slow"))
        await asyncio.to_thread(site.is_asked.wait)
        assert await asyncio.gather(*(one.fetch(URL) for _ in range(20))) == [CLIP.data] * 20
        assert not slow.done()
        slow.cancel()
        await asyncio.wait([slow])
        assert slow.cancelled()
        one._threads.shutdown(wait=True)  # which would wait for whoever still reads


async def test_nothing_more_is_dialled_once_nobody_waits() -> None:
    """A dial cannot be broken off, but the next address need not be tried."""
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
