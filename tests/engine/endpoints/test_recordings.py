"""Recordings on the common path of requests: downloads, waiting, and errors."""

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
    """An engine that transcribes every recording alike, when permitted."""

    def __init__(self) -> None:
        self.requests: list[SpeechRequest] = []
        self.held_bytes = self.most_bytes = 0
        self.go_on, self.is_full = asyncio.Event(), asyncio.Event()
        self.go_on.set()

    async def generate(self, requests: Sequence[SpeechRequest]) -> list[SpeechResult]:
        """Hear recordings."""
        num_bytes = sum(request.samples.nbytes for request in requests)
        self.requests += requests
        self.held_bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self.held_bytes)
        if len(self.requests) == 3:
            self.is_full.set()
        await self.go_on.wait()
        self.held_bytes -= num_bytes
        return [RESULT for _ in requests]

    def stats(self) -> EngineStats:
        """Return empty statistics."""
        return EngineStats()

    def close(self) -> None:
        """Do nothing."""


class Host:
    """The content at URLs; a path that begins with `slow` is sent only when permitted."""

    def __init__(self, data: bytes = CLIP) -> None:
        self.data = data
        self.urls: list[str] = []
        self.now = self.most = 0
        self.go_on = asyncio.Event()

    async def fetch(self, url: str, _: ByteBudget | None = None) -> bytes:
        """Return the content of a URL."""
        self.urls.append(url)
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
    """Return an engine that transcribes the recordings that `fetch` returns."""
    endpoints = speech_endpoints(MODEL, fetch)
    return Dispatcher(endpoints, listener or Listener(), INFO, model_names=["tiny"])


async def respond(engine: Dispatcher, url: str = URL, **body: Any) -> Reply:
    """Return the answer to one body."""
    return await engine.respond(url, body, "req_1", CREATED)


async def refusal_of(engine: Dispatcher, **body: Any) -> str:
    """Return the message of a body's refusal: a 400 whose param is the URL."""
    reply = await respond(engine, **body)
    assert (reply.status_code, reply.body["error"]["param"]) == (400, "file_url")
    return str(reply.body["error"]["message"])


async def test_a_recording_is_fetched_and_transcribed() -> None:
    """It holds for both endpoints; an inline recording is not fetched."""
    host, listener = Host(), Listener()
    engine = served(host.fetch, listener)
    for url in (URL, "/v1/audio/translations"):
        reply = await respond(engine, url, file_url=f"{PLACE}a.wav")
        assert (reply.status_code, reply.body["text"]) == (200, "The capital of France is Paris.")
        assert (await respond(engine, url, file_url=inline())).status_code == 200
    assert host.urls == [f"{PLACE}a.wav"] * 2
    assert [request.task for request in listener.requests] == ["transcribe"] * 2 + ["translate"] * 2


async def test_a_body_is_validated_before_anything_is_fetched() -> None:
    """The errors are the expected ones."""
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
    assert host.urls == []


async def test_an_english_only_model_rejects_translations_by_name() -> None:
    """The message says that the model is English-only."""
    english = replace(MODEL, hearing=replace(HEARING, languages=(), tasks=("transcribe",)))
    endpoints = speech_endpoints(english, Host().fetch)
    engine = Dispatcher(endpoints, Listener(), INFO, model_names=["tiny"])
    reply = await respond(engine, "/v1/audio/translations", file_url=inline())
    assert reply.status_code == 400
    message = reply.body["error"]["message"]
    assert "English-only ones, such as whisper-tiny.en, do not translate" in message


async def test_a_language_that_only_the_model_rejects_costs_no_download() -> None:
    """The model's languages are known before the recording is fetched."""
    host = Host()
    assert (
        await respond(served(host.fetch), file_url=f"{PLACE}a", language="fr")
    ).status_code == 400
    assert host.urls == []


async def test_a_failure_to_fetch_is_the_urls_fault() -> None:
    """The error contains the fetch's own message."""

    async def fetch(url: str, _: ByteBudget) -> bytes:
        raise FetchFailed(f"nothing there of {len(url)} characters")

    engine = served(fetch)
    words = await refusal_of(engine, file_url=f"{PLACE}a.wav")
    assert words == "`file_url` could not be fetched: nothing there of 37 characters."


async def test_slow_hosts_do_not_block_inline_recordings() -> None:
    """A limited number waits for hosts, the rest in a queue; inline recordings pass by."""
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


async def test_a_cancelled_request_lets_the_next_one_fetch() -> None:
    """It may have waited for its host or for its turn."""
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
    assert len(host.urls) == MAX_FETCHED + 1


async def test_recordings_that_wait_for_the_engine_are_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Recordings are admitted as others finish; one above the limit runs alone."""
    monkeypatch.setattr(serving, "_MAX_HELD_BYTES", 3 * 4 * RATE)
    listener, host = Listener(), Host()
    engine = served(host.fetch, listener)
    listener.go_on.clear()
    long = f"data:audio/wav;base64,{b64encode(wav(tone(5))).decode()}"
    tasks = [asyncio.create_task(respond(engine, file_url=f"{PLACE}{i}")) for i in range(8)]
    await listener.is_full.wait()  # one of five seconds would be alone if it came first
    tasks.append(asyncio.create_task(respond(engine, file_url=long)))
    await asyncio.sleep(0.01)
    assert len(listener.requests) == 3
    listener.go_on.set()
    assert {reply.status_code for reply in await asyncio.gather(*tasks)} == {200}
    assert listener.most_bytes == 5 * 4 * RATE
    assert len(listener.requests) == 9


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "0 bytes"),
        (CLIP[:4_000], "is truncated"),
        (b"<html>Not Found</html>" * 100, "is not a valid recording"),
        (wav(tone(1), 1), "sample rate of 1 Hz"),
        (wav(np.zeros(61 * 8_000, np.float32), 8_000), "longer than the maximum of 60 s"),
        (
            encoded(np.zeros(48_000 * 60, np.float32), 48_000, "adts", "aac") * 2,
            "longer than the maximum of 60 s",
        ),
        (video(None, "mp4", "mpeg4", ""), "video without sound"),
        (bytes(2**20 + 1), "larger than 1,048,576 bytes"),
    ],
)
async def test_invalid_recordings_fail_alone(data: bytes, why: str) -> None:
    """They are fetched or inline."""
    engine = served(Host(data).fetch)
    in_line = f"data:audio/wav;base64,{b64encode(data).decode()}"
    for url in (f"{PLACE}a.wav", in_line):
        words, other = await asyncio.gather(
            refusal_of(engine, file_url=url), respond(engine, file_url=inline())
        )
        assert why in words
        assert other.status_code == 200


async def test_silence_is_transcribed() -> None:
    """The result depends on the model."""
    reply = await respond(served(Host(wav(np.zeros(RATE, np.float32))).fetch), file_url=f"{PLACE}a")
    assert reply.status_code == 200


async def test_an_inline_recording_of_100_mb_is_rejected() -> None:
    """Only its length is checked."""
    url = "data:audio/wav;base64," + "A" * (100 * 2**20)
    assert f"{MAX_INLINE_BYTES:,} bytes" in await refusal_of(served(Host().fetch), file_url=url)


async def test_fetch_rules_apply_on_the_whole_path() -> None:
    """They cover a URL, its redirects and its size, with the real fetcher; no secret is shown."""
    secret = "0123456789abcdef"
    pages = {
        "/a.wav": Page(CLIP),
        "/inside": moved("http://169.254.169.254/latest/meta-data/"),
        "/round": moved("/round"),
        "/large": Page(bytes(2_000_000)),
        "/gone": Page(b"", 403),
    }

    def resolve(host: str, port: int) -> list[str]:
        del port
        return [PUBLIC if host == HOST else host]

    with Site(pages) as site:
        limits = FetchLimits(max_bytes=1_000_000, first_delay_seconds=0.0)
        engine = served(Fetcher(limits, site.network(resolve)).fetch)
        assert (await respond(engine, file_url=f"http://{HOST}/a.wav?{secret}")).status_code == 200
        for path, why in (
            ("inside", "169.254.169.254 is not a public host"),
            ("round", "redirects more than 3 times"),
            ("large", "larger than 1,000,000 bytes"),
            ("gone", "returned HTTP 403"),
        ):
            words = await refusal_of(engine, file_url=f"http://{HOST}/{path}?{secret}")
            assert why in words
            assert secret not in words


async def test_the_urls_of_one_body_share_a_byte_limit_during_download() -> None:
    """One that exceeds it ends the other downloads."""
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
    async with fetcher.fetched({"a": "one", "b": "two"}, max_bytes=20) as media:
        assert media == {"a": b"a" * 10, "b": b"b" * 10}
    with pytest.raises(RequestError, match="exceed 19 bytes"):
        async with fetcher.fetched({"a": "one", "b": "two"}, max_bytes=19):
            pass
    assert ended == 4


async def test_no_more_is_fetched_at_once_than_fits() -> None:
    """Each reserves the maximum until it has arrived, and then its actual size."""
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
    assert held == 21  # 20 of 3 bytes, which leave room for one more
    go_on.set()
    await asyncio.gather(*tasks)
