"""Recordings on the path that all requests share: what is brought, who waits, what is told."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.endpoints.test_transcriptions import HEARING, MODEL, RESULT, inline
from tests.engine.media.clips import RATE, encoded, tone, video, wav
from tests.engine.scripted_model import CREATED, INFO
from tests.net.site import HOST, PUBLIC, Page, Site, moved
from tidemill.engine.endpoints import dispatcher as serving
from tidemill.engine.endpoints import speech_endpoints
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.endpoints.media_fetch import MAX_FETCHED, MediaFetcher
from tidemill.engine.scheduling.speech import SpeechRequest, SpeechResult
from tidemill.net.fetch import ByteBudget, Fetcher, FetchFailed, FetchLimits
from tidemill.protocol.contract import EngineStats, Reply
from tidemill.protocol.errors import RequestError
from tidemill.protocol.requests import check_request
from tidemill.protocol.urls import MAX_INLINE_BYTES

URL = "/v1/audio/transcriptions"
CLIP = wav(tone(1))
PLACE = "https://files.example.com/clips/"


class Listener:
    """An engine that hears the same in every recording, once it may."""

    def __init__(self) -> None:
        self.heard: list[SpeechRequest] = []
        self.held_bytes = self.most_bytes = 0
        self.go_on, self.is_full = asyncio.Event(), asyncio.Event()
        self.go_on.set()

    async def generate(self, requests: Sequence[SpeechRequest]) -> list[SpeechResult]:
        """Hear recordings."""
        num_bytes = sum(request.samples.nbytes for request in requests)
        self.heard += requests
        self.held_bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self.held_bytes)
        if len(self.heard) == 3:
            self.is_full.set()
        await self.go_on.wait()
        self.held_bytes -= num_bytes
        return [RESULT for _ in requests]

    def stats(self) -> EngineStats:
        """Tell nothing."""
        return EngineStats()

    def close(self) -> None:
        """Have nothing to end."""


class Host:
    """What lies at urls; a path that begins with `slow` does not come before it may."""

    def __init__(self, data: bytes = CLIP) -> None:
        self.data = data
        self.asked: list[str] = []
        self.now = self.most = 0
        self.go_on = asyncio.Event()

    async def fetch(self, url: str, _: ByteBudget | None = None) -> bytes:
        """Bring what lies there."""
        self.asked.append(url)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if "/slow" in url:
                await self.go_on.wait()
            await asyncio.sleep(0)
        finally:
            self.now -= 1
        return self.data


def served(
    fetch: Callable[[str], Awaitable[bytes]], listener: Listener | None = None
) -> Dispatcher:
    """Return an engine that hears what `fetch` brings."""
    endpoints = speech_endpoints(MODEL, fetch)
    return Dispatcher(endpoints, listener or Listener(), INFO, model_names=["tiny"])


async def respond(engine: Dispatcher, url: str = URL, **body: Any) -> Reply:
    """Return the answer to one body."""
    return await engine.respond(url, body, "req_1", CREATED)


async def told(engine: Dispatcher, **body: Any) -> str:
    """Return why a body is refused: a 400 whose field is the url."""
    reply = await respond(engine, **body)
    assert (reply.status_code, reply.body["error"]["param"]) == (400, "file_url")
    return str(reply.body["error"]["message"])


async def test_a_recording_is_fetched_and_heard() -> None:
    """By either endpoint; one that lies in its line is not fetched."""
    host, listener = Host(), Listener()
    engine = served(host.fetch, listener)
    for url in (URL, "/v1/audio/translations"):
        reply = await respond(engine, url, file_url=f"{PLACE}a.wav")
        assert (reply.status_code, reply.body["text"]) == (200, "The capital of France is Paris.")
        assert (await respond(engine, url, file_url=inline())).status_code == 200
    assert host.asked == [f"{PLACE}a.wav"] * 2
    assert [request.task for request in listener.heard] == ["transcribe"] * 2 + ["translate"] * 2


async def test_what_is_wrong_with_a_body_is_told_before_anything_is_fetched() -> None:
    """In the words that are foretold."""
    host = Host()
    engine = served(host.fetch)
    for body in (
        {"file_url": f"{PLACE}a.wav", "language": "klingon"},
        {"file_url": f"{PLACE}a.wav", "top_p": 1.5},
        {"file_url": f"{PLACE}a.wav", "file": "UklGRg=="},
        {"file_url": f"{PLACE}a.wav", "timestamp_granularities": ["word"]},
        {"file_url": "http://127.0.0.1/a.wav"},
        {"file_url": "ftp://files.example.com/a.wav"},
        {"file_url": "data:,"},
        {"file_url": 5},
        {},
    ):
        reply = await respond(engine, **body)
        with pytest.raises(Exception, match="`") as foretold:
            check_request(URL, body, ["tiny"])
        assert reply.status_code == 400
        assert reply.body["error"]["message"] == str(foretold.value)
    assert host.asked == []


async def test_an_english_only_model_says_so_for_translations() -> None:
    """The message does not only call it a speech model, which it is."""
    english = replace(MODEL, hearing=replace(HEARING, languages=(), tasks=("transcribe",)))
    endpoints = speech_endpoints(english, Host().fetch)
    engine = Dispatcher(endpoints, Listener(), INFO, model_names=["tiny"])
    reply = await respond(engine, "/v1/audio/translations", file_url=inline())
    assert reply.status_code == 400
    message = reply.body["error"]["message"]
    assert "English-only ones, such as whisper-tiny.en, do not translate" in message


async def test_a_language_that_only_the_model_refuses_costs_no_download() -> None:
    """What the model does not know is known before the recording is."""
    host = Host()
    assert (
        await respond(served(host.fetch), file_url=f"{PLACE}a", language="fr")
    ).status_code == 400
    assert host.asked == []


async def test_a_failure_to_fetch_is_the_urls_fault() -> None:
    """In the fetch's own words."""

    async def fetch(url: str, _: ByteBudget) -> bytes:
        raise FetchFailed(f"nothing there of {len(url)} characters")

    engine = served(fetch)
    words = await told(engine, file_url=f"{PLACE}a.wav")
    assert words == "`file_url` could not be fetched: nothing there of 37 characters."


async def test_slow_hosts_hold_up_nobody_who_needs_none() -> None:
    """So many wait for hosts at once, the rest in line; a body with its own recording passes by."""
    host = Host()
    engine = served(host.fetch)
    waiting = [
        asyncio.create_task(respond(engine, file_url=f"{PLACE}slow{i}"))
        for i in range(MAX_FETCHED - 1)
    ]
    others = await asyncio.gather(*(respond(engine, file_url=f"{PLACE}{i}") for i in range(20)))
    assert {reply.status_code for reply in others} == {200}
    waiting += [asyncio.create_task(respond(engine, file_url=f"{PLACE}slow")) for _ in range(5)]
    assert (await respond(engine, file_url=inline())).status_code == 200
    assert host.most == MAX_FETCHED
    assert not any(task.done() for task in waiting)
    host.go_on.set()
    assert {reply.status_code for reply in await asyncio.gather(*waiting)} == {200}


async def test_one_that_is_called_off_lets_the_next_fetch() -> None:
    """Whether it waited for its host or for its turn."""
    host = Host()
    engine = served(host.fetch)
    tasks = [
        asyncio.create_task(respond(engine, file_url=f"{PLACE}slow{i}"))
        for i in range(MAX_FETCHED + 2)
    ]
    await asyncio.sleep(0.01)
    for task in (tasks[0], tasks[-1]):
        task.cancel()
        await asyncio.wait([task])
    assert (await asyncio.gather(respond(engine, file_url=inline())))[0].status_code == 200
    host.go_on.set()
    replies = await asyncio.gather(*tasks[1:-1])
    assert {reply.status_code for reply in replies} == {200}
    assert len(host.asked) == MAX_FETCHED + 1


async def test_what_waits_for_the_engine_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings are let in as others are done; one above the bound is heard alone."""
    monkeypatch.setattr(serving, "_MAX_HELD_BYTES", 3 * 4 * RATE)
    listener, host = Listener(), Host()
    engine = served(host.fetch, listener)
    listener.go_on.clear()
    long = f"data:audio/wav;base64,{b64encode(wav(tone(5))).decode()}"
    tasks = [asyncio.create_task(respond(engine, file_url=f"{PLACE}{i}")) for i in range(8)]
    await listener.is_full.wait()  # one of five seconds would be alone if it came first
    tasks.append(asyncio.create_task(respond(engine, file_url=long)))
    await asyncio.sleep(0.01)
    assert len(listener.heard) == 3
    listener.go_on.set()
    assert {reply.status_code for reply in await asyncio.gather(*tasks)} == {200}
    assert listener.most_bytes == 5 * 4 * RATE
    assert len(listener.heard) == 9


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "0 bytes"),
        (CLIP[:4_000], "is truncated"),
        (b"<html>Not Found</html>" * 100, "is not a valid recording"),
        (wav(tone(1), 1), "sample rate of 1 Hz"),
        (wav(np.zeros(61 * 8_000, np.float32), 8_000), "longer than 60 s"),
        (encoded(np.zeros(48_000 * 60, np.float32), 48_000, "adts", "aac") * 2, "longer than 60 s"),
        (video(None, "mp4", "mpeg4", ""), "video without sound"),
        (bytes(2**20 + 1), "larger than 1,048,576 bytes"),
    ],
)
async def test_recordings_that_cannot_be_heard_are_told_and_the_others_go_on(
    data: bytes, why: str
) -> None:
    """Fetched, or in the line."""
    engine = served(Host(data).fetch)
    in_line = f"data:audio/wav;base64,{b64encode(data).decode()}"
    for url in (f"{PLACE}a.wav", in_line):
        words, other = await asyncio.gather(
            told(engine, file_url=url), respond(engine, file_url=inline())
        )
        assert why in words
        assert other.status_code == 200


async def test_silence_is_heard() -> None:
    """What a model makes of it is the model's."""
    reply = await respond(served(Host(wav(np.zeros(RATE, np.float32))).fetch), file_url=f"{PLACE}a")
    assert reply.status_code == 200


async def test_a_recording_of_100_mb_in_its_line_is_told() -> None:
    """By its length alone."""
    url = "data:audio/wav;base64," + "A" * (100 * 2**20)
    assert f"{MAX_INLINE_BYTES:,} bytes" in await told(served(Host().fetch), file_url=url)


async def test_hosts_are_held_to_the_rules_on_the_whole_way() -> None:
    """A url, its redirects and its size, through the real fetcher; no secret is shown."""
    secret = "0123456789abcdef"
    pages = {
        "/a.wav": Page(CLIP),
        "/inside": moved("http://169.254.169.254/latest/meta-data/"),
        "/round": moved("/round"),
        "/large": Page(bytes(2_000_000)),
        "/gone": Page(b"", 403),
    }

    def found(host: str, port: int) -> list[str]:
        del port
        return [PUBLIC if host == HOST else host]

    with Site(pages) as site:
        limits = FetchLimits(max_bytes=1_000_000, first_delay_seconds=0.0)
        engine = served(Fetcher(limits, site.network(found)).fetch)
        assert (await respond(engine, file_url=f"http://{HOST}/a.wav?{secret}")).status_code == 200
        for path, why in (
            ("inside", "169.254.169.254 is not a public host"),
            ("round", "redirects more than 3 times"),
            ("large", "larger than 1,000,000 bytes"),
            ("gone", "answers 403"),
        ):
            words = await told(engine, file_url=f"http://{HOST}/{path}?{secret}")
            assert why in words
            assert secret not in words


async def test_urls_of_one_body_are_held_to_their_bytes_together_while_they_come() -> None:
    """One that would be too much ends the others on their way."""
    ended = 0

    async def fetch(url: str, allowance: ByteBudget) -> bytes:
        nonlocal ended
        data = b""
        try:
            while len(data) < 10:
                allowance.acquire(1)
                data += url[:1].encode()
                await asyncio.sleep(0)
        finally:
            ended += 1
        return data

    fetcher = MediaFetcher(fetch, 10)
    async with fetcher.fetched({"a": "one", "b": "two"}, max_bytes=20) as found:
        assert found == {"a": b"a" * 10, "b": b"b" * 10}
    with pytest.raises(RequestError, match="are larger than 19 bytes together"):
        async with fetcher.fetched({"a": "one", "b": "two"}, max_bytes=19):
            pass
    assert ended == 4


async def test_no_more_is_fetched_at_once_than_there_is_room_for() -> None:
    """Each may be as large as is allowed until it has come, then it is as large as it is."""
    host = Host(b"123")
    fetcher = MediaFetcher(host.fetch, 40, max_at_once=40, max_held_bytes=100)
    held, go_on = 0, asyncio.Event()

    async def one(number: int) -> None:
        nonlocal held
        async with fetcher.fetched({f"/slow{number}": "url"}):
            held += 1
            await go_on.wait()

    tasks = [asyncio.create_task(one(number)) for number in range(40)]
    await asyncio.sleep(0.01)
    assert host.now == 2
    host.go_on.set()
    await asyncio.sleep(0.05)
    assert held == 21  # 20 of 3 bytes, beside which one may come, and has
    go_on.set()
    await asyncio.gather(*tasks)
