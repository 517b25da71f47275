"""Objects in S3 that the lines of a tenant may name."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.handler.worker.fakes import FakeEngine, FakeLink
from tests.handler.worker.rig import Rig, until
from tidemill.batch.allowed_media import AllowedMedia
from tidemill.batch.file.lines import RawLine, parse_line
from tidemill.batch.file.rows import print_reply
from tidemill.engine_process.frames import Row
from tidemill.handler.worker import feed
from tidemill.handler.worker.shard import media_access
from tidemill.handler.worker.shard.media_access import is_unread, refuse_media
from tidemill.protocol.contract import Reply, Usage

AUDIO = "/v1/audio/transcriptions"


def line(url: str, custom_id: str = "a") -> bytes:
    """Return a line with a recording."""
    body = {"file_url": url}
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": AUDIO, "body": body}
    ).encode()


def refused(data: bytes) -> dict[str, Any] | None:
    """Return the error of a line of tenant `acme`; None if it may run."""
    row = refuse_media([RawLine(1, data)], AllowedMedia("bucket", "acme")).get(1)
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


@pytest.mark.parametrize(
    "spelling", ["plain", "small", "large", "slashes", "only s", "only 3", "only :", "only /"]
)
def test_escapes_hide_no_object(spelling: str) -> None:
    """JSON may spell every character by its number, in either case, and a slash with another."""

    def spelled(char: str) -> str:
        number = f"{ord(char):04x}"
        if spelling == "slashes" and char == "/":
            return "\\/"
        if spelling == "large":
            number = number.upper()
        is_spelled = spelling in {"small", "large", f"only {char.lower()}"}
        return f"\\u{number}" if is_spelled else char

    for url in ("s3://theirs/a", "S3://theirs/a"):
        hidden = "".join(map(spelled, url)).encode()
        data = line("URL").replace(b"URL", hidden)
        assert json.loads(data)["body"]["file_url"] == url
        assert refused(data) is not None


def test_escapes_of_other_characters_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most lines of JSON in ASCII have some."""
    monkeypatch.setattr(media_access, "parse_line", None)
    assert refused(line("https://files.example.com/é/s3:a")) is None


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


async def test_lines_whose_media_cannot_be_read_are_run_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that failed because S3 did is never stored."""
    monkeypatch.setattr(feed, "_UNREAD_DELAYS", (0.01, 0.01))
    work = rig.batch({"unread": 2}, {}, {"status": 500})
    async with rig.worker(engine=UnreadingEngine()) as running:
        await until(lambda: work.is_done)
    assert work.shard(0).progress.failed == 1
    assert running.engine.requests.count("c1") == 3


async def test_a_long_failure_of_s3_releases_the_shard(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished rows are kept, the claim does not count, and the message comes again later."""
    monkeypatch.setattr(feed, "_UNREAD_DELAYS", (0.01, 0.01))
    monkeypatch.setattr(feed, "_UNREAD_RESENT_SECONDS", 1.0)
    work = rig.batch({"unread": 4}, {})
    async with rig.worker(engine=UnreadingEngine()) as running:
        await until(lambda: work.is_done)
    assert work.shard(0).progress.failed == 0
    assert work.shard(0).progress.completed == 2
    assert running.engine.requests.count("c1") == 5
    assert running.engine.requests.count("c2") == 1


def test_only_failures_of_s3_have_no_row() -> None:
    """A client's error with the same code has its row."""
    assert is_unread(row_of(500, "fetch_failed"))
    assert not is_unread(row_of(400, "fetch_failed"))
    assert not is_unread(row_of(500, "engine_error"))
    assert not is_unread(row_of(500, "engine_error", "fetch_failed"))
    assert not is_unread(row_of(200, "fetch_failed"))


def row_of(status: int, code: str, message: str = "failed") -> Row:
    """Return an engine's row of a line."""
    parsed = parse_line(RawLine(1, line("https://example.com/a")))
    body = {"error": {"message": message, "code": code}}
    return Row(1, status == 200, Usage(), print_reply(parsed, status, body))


class UnreadingEngine(FakeEngine):
    """An engine that cannot read the media of a line as often as its body says."""

    def new_life(self) -> FakeLink:
        """Return a link that fails first."""
        link, tries = super().new_life(), Counter[str]()
        respond = link.respond

        async def unread(url: str, body: dict[str, Any], *rest: Any) -> Reply:
            reply = await respond(url, body, *rest)
            name = body.get("custom_id", "known")
            tries[name] += 1
            if tries[name] <= body.get("unread", 0):
                return Reply(500, {"error": {"message": "S3 failed", "code": "fetch_failed"}})
            return reply

        setattr(link, "respond", unread)  # noqa: B010 - a method
        return link
