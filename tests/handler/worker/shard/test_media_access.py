"""Objects in S3 that the lines of a tenant may name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.handler.worker.fakes import FakeEngine
from tests.handler.worker.rig import Rig, until
from tidemill.batch.file.lines import RawLine
from tidemill.handler.worker.shard import media_access
from tidemill.handler.worker.shard.media_access import refuse_media

AUDIO = "/v1/audio/transcriptions"


def line(url: str, custom_id: str = "a") -> bytes:
    """Return a line with a recording."""
    body = {"file_url": url}
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": AUDIO, "body": body}
    ).encode()


def refused(data: bytes) -> dict[str, Any] | None:
    """Return the error of a line of tenant `acme`; None if it may run."""
    row = refuse_media([RawLine(1, data)], "acme", "bucket").get(1)
    if row is None:
        return None
    response = json.loads(row.row)["response"]
    assert response["status_code"] == 400
    error: dict[str, Any] = response["body"]["error"]
    return error


@pytest.mark.parametrize(
    "url", ["s3://bucket/media/acme/a.wav", "S3://bucket/media/acme/b/../.wav"]
)
def test_own_objects_may_be_named(url: str) -> None:
    """The engine refuses addresses that are not valid."""
    assert refused(line(url)) is None


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://bucket/media/acme2/a.wav", "has another prefix"),
        ("s3://bucket/media/other/a.wav", "has another prefix"),
        ("s3://bucket/files/acme/a.wav", "has another prefix"),
        ("s3://bucket/media/ACME/a.wav", "has another prefix"),
        ("s3://theirs/media/acme/a.wav", "is in bucket theirs"),
    ],
)
def test_other_objects_may_not(url: str, words: str) -> None:
    """The error names the prefix that may be read."""
    error = refused(line(url))
    assert error is not None
    assert error["param"] == "file_url"
    assert words in error["message"]
    assert "may only read s3://bucket/media/acme/ here" in error["message"]


def test_escapes_hide_no_object() -> None:
    """JSON may spell every character by its number."""
    url = "s3://theirs/a"
    hidden = "".join(f"\\u{ord(char):04X}" for char in url)
    assert refused(line("URL").replace(b"URL", hidden.encode())) is not None
    assert refused(line("URL").replace(b"URL", rb"\u00733:\/\/theirs\/a")) is not None
    assert refused(line("URL").replace(b"URL", rb"s3\u003a//theirs/a")) is not None


def test_lines_without_objects_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither are lines that are not requests refused here."""
    assert refused(b'{"s3://": ') is None
    monkeypatch.setattr(media_access, "parse_line", None)
    assert refused(line("https://files.example.com/s3/a.wav")) is None


async def test_a_worker_refuses_other_tenants_objects(rig: Rig) -> None:
    """Their lines have rows, and the engine does not receive them."""
    bucket = rig.deployment.bucket.name
    urls = [f"s3://{bucket}/media/acme/a", f"s3://{bucket}/media/other/a", "s3://theirs/a"]
    work = rig.batch(*(line(url, url[-7:]) + b"\n" for url in urls), tenant="acme")
    engine = FakeEngine()
    async with rig.worker(engine=engine):
        await until(lambda: work.is_done)
    assert len(engine.requests) == 1
    assert work.shard(0).progress.failed == 2
