"""Parts of a message: texts and images, and unsupported ones."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest

from tests.net.inside import ADDRESSES
from tidemill.protocol.chat import ChatCompletionRequest
from tidemill.protocol.errors import RequestError
from tidemill.protocol.messages import has_media
from tidemill.protocol.page_ranges import page_ranges
from tidemill.protocol.requests import check_request, read_body
from tidemill.protocol.urls import MAX_INLINE_BYTES

URL = "/v1/chat/completions"
DATA = "data:image/png;base64,AAAA"
URL_OF_AUDIO = "https://files.example.com/a.wav"


def body(*parts: Any) -> dict[str, Any]:
    """Return a conversation of one turn."""
    return {"messages": [{"role": "user", "content": list(parts)}]}


def image(url: Any = DATA, **fields: Any) -> dict[str, Any]:
    """Return an image part."""
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def document(**source: Any) -> dict[str, Any]:
    """Return a file part."""
    return {"type": "file", "file": source}


def fault(*parts: Any) -> tuple[str | None, str]:
    """Return the parameter and the message of the predicted error."""
    with pytest.raises(RequestError) as caught:
        check_request(URL, body(*parts), None)
    return caught.value.param, caught.value.message


def test_recordings_are_data_or_a_url() -> None:
    """OpenAI's form has data, vLLM's a URL, also as the part's own field."""
    parts = [
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "MP3"}},
        {"type": "audio_url", "audio_url": {"url": URL_OF_AUDIO}},
        {"type": "audio_url", "audio_url": URL_OF_AUDIO},
    ]
    [message] = read_body(ChatCompletionRequest, body(*parts)).messages
    inline = "data:;base64,AAAA"
    assert [part.url for _, part in message.media()] == [inline, URL_OF_AUDIO, URL_OF_AUDIO]
    assert all(has_media(body(part)) for part in parts)


def test_images_have_their_index_among_texts() -> None:
    """A URL may be given directly; the texts leave images out."""
    plain = {"type": "image_url", "image_url": "https://files.example.com/a.png"}
    parts = [image(), {"type": "text", "text": "a"}, plain, {"type": "text", "text": "b"}]
    [message] = read_body(ChatCompletionRequest, body(*parts)).messages
    assert message.texts() == ["a", "b"]
    assert [(place, part.image_url.url) for place, part in message.media()] == [
        (0, DATA),
        (2, "https://files.example.com/a.png"),
    ]


@pytest.mark.parametrize("detail", ["auto", "low", "high", None])
def test_a_detail_is_accepted(detail: str | None) -> None:
    """It has no effect."""
    check_request(URL, body(image(detail=detail)), None)


@pytest.mark.parametrize("kind", ["video_url", "input_file", ""])
def test_parts_of_other_types_are_refused_by_name(kind: str) -> None:
    """The message lists the supported types and no other errors."""
    param, words = fault({"type": kind, kind: {"url": DATA}})
    assert param == "messages.0.content.0.type"
    assert "must be 'text', 'image_url', 'input_audio', 'audio_url' or 'file'" in words
    assert "also invalid" not in words


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url"}, "image_url"),
        ({"type": "image_url", "image_url": 5}, "image_url"),
        ({"type": "image_url", "image_url": {}}, "image_url.url"),
        (image(5), "image_url.url"),
        (image(""), "image_url.url"),
        (image("ftp://files.example.com/a.png"), "image_url.url"),
        (image("file:///etc/passwd"), "image_url.url"),
        (image("data:image/png,AAAA"), "image_url.url"),
        (image("data:image/png;base64,???"), "image_url.url"),
        (image(detail="medium"), "image_url.detail"),
        ({"type": "file"}, "file"),
        ({"type": "file", "file": DATA}, "file"),
        ({"type": "file", "file": {}}, "file"),
        ({"type": "file", "file": {"filename": "a.pdf"}}, "file"),
        (document(file_id="file-1"), "file.file_id"),
        (document(file_data=DATA, file_url=DATA), "file"),
        (document(file_data="JVBERi0="), "file.file_data"),
        (document(file_data=5), "file.file_data"),
        (document(file_url="http://localhost/a.pdf"), "file.file_url"),
        ({**document(file_data=DATA), "pages": 3}, "pages"),
        ({**document(file_data=DATA), "pages": [1]}, "pages"),
        ({**document(file_data=DATA), "pages": ""}, "pages"),
        ({**document(file_data=DATA), "pages": "0"}, "pages"),
        ({**document(file_data=DATA), "pages": "3-1"}, "pages"),
        ({**document(file_data=DATA), "pages": "1-"}, "pages"),
        ({**document(file_data=DATA), "pages": "1,,2"}, "pages"),
        ({**document(file_data=DATA), "pages": "1" * 7}, "pages"),
        ({**document(file_data=DATA), "pages": "1," * 5_000 + "1"}, "pages"),
        ({"type": 5}, "type"),
        ({"text": "a"}, "type"),
        ("a", ""),
        ({"type": "input_audio"}, "input_audio"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio.data"),
        ({"type": "input_audio", "input_audio": {"data": URL_OF_AUDIO}}, "input_audio.data"),
        (
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": 3}},
            "input_audio.format",
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "text"}},
            "input_audio.format",
        ),
        ({"type": "audio_url", "audio_url": {"url": "file:///a.wav"}}, "audio_url.url"),
    ],
)
def test_an_invalid_image_is_reported(part: Any, param: str) -> None:
    """The error has its place and field, before anything is fetched."""
    got, _ = fault({"type": "text", "text": "a"}, part)
    assert got == f"messages.0.content.1.{param}".rstrip(".")


@pytest.mark.parametrize("url", [URL_OF_AUDIO, "https://a/b.wav"])
def test_a_url_in_place_of_base64_has_its_part(url: str) -> None:
    """The data of `input_audio` are base64 alone."""
    _, words = fault({"type": "input_audio", "input_audio": {"data": url}})
    assert "send a URL in an `audio_url` part" in words


@pytest.mark.parametrize("host", ADDRESSES)
def test_no_image_is_fetched_from_a_private_host(host: str) -> None:
    """The same rule applies to audio."""
    _, words = fault(image(f"http://{host}/a.png"))
    assert "cannot be fetched" in words


def test_inline_images_are_limited() -> None:
    """Their length is checked before they are decoded."""
    data = b64encode(bytes(MAX_INLINE_BYTES + 3)).decode()
    _, words = fault(image(f"data:image/png;base64,{data}"))
    assert f"an image larger than {MAX_INLINE_BYTES:,} bytes" in words


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (body(image()), True),
        (body({"type": "text", "text": "image_url"}), False),
        (body("image_url", 5, None), False),
        ({"messages": [{"content": "a"}, 5, {"content": [image()]}]}, True),
        ({"messages": {"content": [image()]}}, False),
        ({}, False),
    ],
)
def test_images_are_detected_in_any_body(content: Any, *, expected: bool) -> None:
    """The body may be valid or not."""
    assert has_media(content) is expected


def test_pages_of_a_document_are_selected_in_order() -> None:
    """A file part may have a URL or data under either name."""
    parts = [
        {**document(file_data=DATA), "pages": "7, 1-3"},
        document(file_url="s3://bucket/a.pdf"),
    ]
    [message] = read_body(ChatCompletionRequest, body(*parts)).messages
    assert [(part.url, part.pages) for _, part in message.media()] == [
        (DATA, "7, 1-3"),
        ("s3://bucket/a.pdf", None),
    ]
    assert [*map(list, page_ranges("7, 1-3,2"))] == [[7], [1, 2, 3], [2]]
    assert has_media(body(parts[0]))
