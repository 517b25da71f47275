"""Uploads that stall or trickle: each one ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.server.local.rig import serving
from tidemill.server.local import upload

HEAD = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n'


@pytest.mark.parametrize("pause", [0.01, 30.0], ids=["trickles", "stops"])
async def test_a_stalled_upload_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pause: float
) -> None:
    """At a byte per minute it would hold its connection and its file for ever."""
    monkeypatch.setattr(upload, "_IDLE_SECONDS", 0.2)

    async def pieces() -> AsyncIterator[bytes]:
        yield HEAD
        while True:
            yield b"x"
            await asyncio.sleep(pause)

    async with serving(tmp_path) as local:
        refused = await local.client.post(
            "/v1/files",
            content=pieces(),
            headers={"Content-Type": "multipart/form-data; boundary=b"},
        )
    assert (refused.status_code, refused.json()["error"]["code"]) == (408, "body_timeout")
    assert "slower than 16,384 bytes per second" in refused.json()["error"]["message"]
    assert list((tmp_path / "incoming").iterdir()) == []


async def test_an_upload_may_be_slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every received byte gives it more time."""
    monkeypatch.setattr(upload, "_IDLE_SECONDS", 0.2)
    monkeypatch.setattr(upload, "_LEAST_BYTES_A_SECOND", 1_000)
    purpose = b'\r\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'

    async def pieces() -> AsyncIterator[bytes]:
        yield HEAD
        for _ in range(10):
            yield b"x" * 10_000
            await asyncio.sleep(0.04)
        yield purpose

    async with serving(tmp_path) as local:
        kept = await local.client.post(
            "/v1/files",
            content=pieces(),
            headers={"Content-Type": "multipart/form-data; boundary=b"},
        )
    assert (kept.status_code, kept.json()["bytes"]) == (200, 100_000)
