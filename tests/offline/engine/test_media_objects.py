"""Media at `s3://` URLs: what may be read, and the errors of objects and of the store."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError
from botocore.response import StreamingBody
from urllib3.exceptions import ReadTimeoutError

from tests.offline.run.test_s3_objects import at_store
from tests.strict_store import StrictStore
from tidemill.handler.aws.sync import Aws
from tidemill.net.fetch import ByteBudget, FetchFailed
from tidemill.offline.engine import media_objects, process
from tidemill.offline.engine.engine import engine_config
from tidemill.offline.engine.media_objects import ObjectReader
from tidemill.offline.engine.options import EngineOptions, stall_limit
from tidemill.offline.run import job
from tidemill.offline.run.run_options import RunOptions

__all__ = ["at_store"]

URL = "s3://mine/pictures/a.png"
ALL = ObjectReader(("*",))


class Body(StreamingBody):  # type: ignore[misc]
    """The body of a response whose connection breaks."""

    def read(self, amt: int | None = None) -> bytes:
        """Fail, as botocore's body does after a timeout."""
        del amt
        raise ReadTimeoutError(None, "", "timed out")  # type: ignore[arg-type]


class Store:
    """An S3 client that gives the next of its answers."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.wanted: list[tuple[str, str]] = []

    def get_object(self, **where: str) -> dict[str, Any]:
        """Return or raise the next answer."""
        self.wanted.append((where["Bucket"], where["Key"]))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, bytes):
            answer = StreamingBody(io.BytesIO(answer), len(answer))
        return {"Body": answer, "ContentLength": answer._content_length}


Given = Callable[..., Store]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    """Return a function that sets the answers of the store."""

    def give(*answers: Any) -> Store:
        store = Store(*answers)
        monkeypatch.setattr(media_objects, "_aws", lambda: SimpleNamespace(clients={"s3": store}))
        return store

    monkeypatch.setattr(media_objects, "_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(media_objects, "_outage", media_objects._Outage())
    return give


def s3_error(code: str) -> ClientError:
    """Return S3's error with a code."""
    return ClientError({"Error": {"Code": code}}, "GetObject")


async def read(
    reader: ObjectReader, url: str, max_bytes: int = 99, allowance: ByteBudget | None = None
) -> bytes:
    """Return an object."""
    return await reader(url, max_bytes, allowance or ByteBudget())


async def test_objects_are_read_from_allowed_places_only(given: Given) -> None:
    """A refusal names the bucket and the allowed ones, and S3 is not called."""
    reader = ObjectReader(("mine/pictures/", "other"))
    store = given(b"one", b"two")
    assert await read(reader, URL) == b"one"
    copied = pickle.loads(pickle.dumps(reader))  # noqa: S301 - ranks get the reader like this
    assert await read(copied, "S3://other/b%20c?d") == b"two"
    for url in ("s3://mine/picturesque", "s3://mine.other/pictures/a", "s3://theirs/a"):
        with pytest.raises(FetchFailed, match="not an allowed bucket") as failed:
            await read(reader, url)
        assert "(allowed: mine/pictures/, other)" in str(failed.value)
        assert not failed.value.is_of_service
    with pytest.raises(FetchFailed, match="as a folder"):
        await read(reader, "s3://mine/pictures/../secret")
    assert store.wanted == [("mine", "pictures/a.png"), ("other", "b%20c?d")]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("NoSuchKey", "the object does not exist"),
        ("NoSuchBucket", "the bucket does not exist"),
        ("AccessDenied", "access to the object is denied, or it does not exist"),
        ("InvalidObjectState", "restore it first"),
        ("InvalidRequest", "without its encryption key"),
    ],
)
async def test_errors_of_an_object_are_final(given: Given, code: str, reason: str) -> None:
    """The client can correct them."""
    given(s3_error(code))
    with pytest.raises(FetchFailed, match=reason) as failed:
        await read(ALL, URL)
    assert not failed.value.is_of_service


@pytest.mark.parametrize(
    "error",
    [
        s3_error("SlowDown"),
        s3_error("InternalError"),
        s3_error("ExpiredToken"),
        EndpointConnectionError(endpoint_url="https://s3"),
        NoCredentialsError(),
    ],
)
async def test_errors_of_the_store_are_not_the_clients(given: Given, error: Exception) -> None:
    """boto3 has retried them already."""
    given(error)
    with pytest.raises(FetchFailed, match="S3 failed") as failed:
        await read(ALL, URL)
    assert failed.value.is_of_service


async def test_a_run_waits_for_the_end_of_an_outage(
    given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the objects afterwards; errors of an object and of the setup are final."""
    monkeypatch.setattr(media_objects, "_OUTAGE_SECONDS", 0.0)
    patient = ObjectReader(("*",), patience_seconds=99)
    outage = [
        s3_error("SlowDown"),
        s3_error("ExpiredToken"),
        EndpointConnectionError(endpoint_url="x"),
    ]
    store = given(*outage * 5, b"abcd")
    assert await read(patient, URL) == b"abcd"
    assert len(store.wanted) == 16
    for error in (s3_error("NoSuchKey"), NoCredentialsError()):
        store = given(error)
        with pytest.raises(FetchFailed):
            await read(patient, URL)
        assert len(store.wanted) == 1


async def test_an_outage_is_waited_for_once(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then each object is tried once, so that a run ends; a read object ends it."""
    monkeypatch.setattr(media_objects, "_OUTAGE_SECONDS", 0.0)
    clock = iter(range(0, 10_000, 4))
    monkeypatch.setattr(media_objects, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    patient = ObjectReader(("*",), patience_seconds=40)
    store = given(*[s3_error("SlowDown")] * 50)
    numbers = []
    for _ in range(3):
        before = len(store.wanted)
        with pytest.raises(FetchFailed, match="SlowDown"):
            await read(patient, URL)
        numbers.append(len(store.wanted) - before)
    assert numbers[0] > 3
    assert numbers[1:] == [1, 1]
    given(b"abcd", s3_error("SlowDown"), b"abcd")
    assert await read(patient, URL) == b"abcd"
    assert await read(patient, URL) == b"abcd"


async def test_a_broken_download_is_repeated(given: Given) -> None:
    """Its bytes count once; after three tries the store is at fault."""
    budget = ByteBudget(5)
    broken = Body(io.BytesIO(), 4)
    given(broken, broken, b"abcd")
    assert await read(ALL, URL, allowance=budget) == b"abcd"
    given(broken, broken, broken)
    with pytest.raises(FetchFailed, match="ReadTimeoutError") as failed:
        await read(ALL, URL)
    assert failed.value.is_of_service
    given(b"ab")
    with pytest.raises(FetchFailed, match="all downloads of the request exceed 5 bytes"):
        await read(ALL, URL, allowance=budget)


async def test_a_large_object_is_not_downloaded(given: Given) -> None:
    """Its size is known before its bytes."""
    given(Body(io.BytesIO(), 100))
    with pytest.raises(FetchFailed, match="larger than 99 bytes"):
        await read(ALL, URL)


async def test_objects_of_a_compatible_store_are_read(
    at_store: StrictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Endpoint, region and credentials are those of the environment."""
    monkeypatch.setattr(media_objects, "_aws", Aws)
    url = at_store.put("media/a b+ü.png", b"image")
    assert await read(ALL, url) == b"image"
    with pytest.raises(FetchFailed, match="does not exist"):
        await read(ALL, f"{url}2")


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("in.jsonl", ("*",)),
        ("-", ("*",)),
        ("s3://mine/in.jsonl", ("*",)),
        ("https://files.example.com/in.jsonl", ()),
        ("hf://datasets/a/b", ()),
    ],
)
def test_a_run_of_own_input_may_read_every_bucket(name: str, allowed: tuple[str, ...]) -> None:
    """The URLs of other inputs are not the user's; a flag always takes precedence."""
    options = RunOptions(input_file=name, output_file="out.jsonl")
    assert options.with_media_buckets().allowed_media_buckets == allowed
    given = RunOptions(input_file=name, output_file="o", allowed_media_buckets=("mine",))
    assert given.with_media_buckets() == given
    config = engine_config(options.with_media_buckets(), media_seconds=9)
    assert config.read_object == (ObjectReader(allowed, 9) if allowed else None)


def test_runs_wait_for_media_and_other_engines_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers and servers have other ways to repeat a request."""
    options = EngineOptions(allowed_media_buckets=("mine",))
    assert engine_config(options).read_object == ObjectReader(("mine",))
    seconds = list[float]()
    monkeypatch.setattr(process, "serve", lambda load, **_: load(dict))
    monkeypatch.setattr(process, "load", lambda *_, media_seconds: seconds.append(media_seconds))
    for flags in ([], ["--media-seconds=600"]):
        process.main(["--reader-fd=0", "--writer-fd=0", *flags])
    assert seconds == [0, 600]


def test_a_run_waits_for_less_time_than_an_engine_may_be_silent() -> None:
    """Otherwise an outage would seem to be a stall."""
    options = RunOptions(input_file="-", output_file="o")
    for stall in (None, 600.0, 10.0):
        given = replace(options, stall_seconds=stall)
        assert 0 < job._media_seconds(given) <= stall_limit(given) / 2
