"""URLs that an engine fetches for a body, in every accepted spelling."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.batch.result_key import ResultKeys
from tidemill.protocol.fetched_urls import fetched_urls

URL = "https://files.example.com/a"
DATA = "data:image/png;base64,AAAA"
PLACE = "messages.1.content.1"


def chat(part: object) -> dict[str, Any]:
    """Return a conversation with one more part in its second message."""
    text = {"type": "text", "text": f"Look at {URL}"}
    return {
        "messages": [
            {"role": "system", "content": URL},
            {"role": "user", "content": [text, part]},
        ]
    }


@pytest.mark.parametrize(
    ("body", "fetched"),
    [
        (chat({"type": "image_url", "image_url": {"url": URL}}), {PLACE: URL}),
        (chat({"type": "image_url", "image_url": URL}), {PLACE: URL}),
        (chat({"type": "image_url", "image_url": "HTTP://x.com/a"}), {PLACE: "HTTP://x.com/a"}),
        (chat({"type": "audio_url", "audio_url": {"url": URL}}), {PLACE: URL}),
        (chat({"type": "video_url", "video_url": URL}), {PLACE: URL}),
        (chat({"type": "input_audio", "input_audio": {"url": URL}}), {PLACE: URL}),
        (chat({"type": "image_url", "image_url": "s3://b/a.png"}), {PLACE: "s3://b/a.png"}),
        (chat({"type": "file", "file": {"file_data": URL}}), {PLACE: URL}),
        (chat({"type": "file", "file": {"file_url": URL, "file_data": DATA}}), {PLACE: URL}),
        (chat({"type": "file", "file": {"file_data": DATA}}), {}),
        (chat({"type": "file", "file": URL, "file_url": URL}), {}),
        (chat({"type": "input_file", "file_url": URL}), {PLACE: URL}),
        ({"file_url": "S3://b/a.wav"}, {"file_url": "S3://b/a.wav"}),
        ({"file_url": URL}, {"file_url": URL}),
        ({"file_url": "HTTPS://x.com/a.wav"}, {"file_url": "HTTPS://x.com/a.wav"}),
        ({"file_url": "DATA:audio/wav;base64,AAAA"}, {}),
        (chat({"type": "image_url", "image_url": {"url": DATA}}), {}),
        (chat({"type": "image_url", "image_url": DATA}), {}),
        (chat({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}), {}),
        (chat({"type": "text", "text": URL, "image_url": URL}), {}),
        (chat({"type": ["image_url"], "image_url": URL}), {}),
        (chat({"type": "image_url", "image_url": {"url": None}}), {}),
        (chat({"image_url": {"url": URL}}), {}),
        (chat("https"), {}),
        ({"messages": URL, "file_url": None, "prompt": URL, "input": [URL]}, {}),
        ({"messages": [URL, {"content": {"url": URL}}]}, {}),
        ({"images": [DATA, URL, 1]}, {"images.1": URL}),
        (
            {"inputs": [{"content": [{"type": "image_url", "image_url": {"url": URL}}]}, URL]},
            {"inputs.0.content.0": URL},
        ),
    ],
)
def test_urls_are_listed_with_their_places(body: dict[str, Any], fetched: dict[str, str]) -> None:
    """Data URLs and text are not fetched; results of bodies with a URL are never reused."""
    assert fetched_urls(body) == fetched
    url = "/v1/chat/completions" if "messages" in body else "/v1/audio/transcriptions"
    for sampled in (False, True):
        keys = ResultKeys(["m"], sampled)
        assert (keys.key_of(url, {**body, "temperature": 0}, "a") is None) == bool(fetched)
