"""Parts of a message: texts and images, and what no model could read whatever it brings."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest

from tests.net.inside import ADDRESSES
from tidemill.protocol.chat import ChatCompletionRequest
from tidemill.protocol.errors import RequestError
from tidemill.protocol.parts import has_images
from tidemill.protocol.requests import check_request, read_body
from tidemill.protocol.urls import MAX_INLINE_BYTES

URL = "/v1/chat/completions"
DATA = "data:image/png;base64,AAAA"


def body(*parts: Any) -> dict[str, Any]:
    """Return a conversation of one turn."""
    return {"messages": [{"role": "user", "content": list(parts)}]}


def image(url: Any = DATA, **fields: Any) -> dict[str, Any]:
    """Return a part that is an image."""
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def fault(*parts: Any) -> tuple[str | None, str]:
    """Return the field and the words of what is foretold of some parts."""
    with pytest.raises(RequestError) as caught:
        check_request(URL, body(*parts), None)
    return caught.value.param, caught.value.message


def test_images_have_their_places_among_texts() -> None:
    """A url may stand there by itself; texts are told without them."""
    plain = {"type": "image_url", "image_url": "https://files.example.com/a.png"}
    parts = [image(), {"type": "text", "text": "a"}, plain, {"type": "text", "text": "b"}]
    [message] = read_body(ChatCompletionRequest, body(*parts)).messages
    assert message.texts() == ["a", "b"]
    assert [(place, part.image_url.url) for place, part in message.images()] == [
        (0, DATA),
        (2, "https://files.example.com/a.png"),
    ]


@pytest.mark.parametrize("detail", ["auto", "low", "high", None])
def test_a_detail_is_accepted(detail: str | None) -> None:
    """And changes nothing."""
    check_request(URL, body(image(detail=detail)), None)


@pytest.mark.parametrize("kind", ["video_url", "input_audio", "audio_url", "file", "refusal", ""])
def test_parts_of_other_types_are_refused_by_name(kind: str) -> None:
    """With the types that there are, and nothing else at fault."""
    param, words = fault({"type": kind, kind: {"url": DATA}})
    assert param == "messages.0.content.0.type"
    assert "must be 'text' or 'image_url'" in words
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
        ({"type": 5}, "type"),
        ({"text": "a"}, "type"),
        ("a", ""),
    ],
)
def test_what_is_no_image_is_named(part: Any, param: str) -> None:
    """By its place and field, before anything is fetched."""
    got, _ = fault({"type": "text", "text": "a"}, part)
    assert got == f"messages.0.content.1.{param}".rstrip(".")


@pytest.mark.parametrize("host", ADDRESSES)
def test_no_image_lies_inside(host: str) -> None:
    """As no recording does."""
    _, words = fault(image(f"http://{host}/a.png"))
    assert "cannot be fetched" in words


def test_what_lies_in_a_line_has_a_bound() -> None:
    """Looked at before it is decoded."""
    data = b64encode(bytes(MAX_INLINE_BYTES + 3)).decode()
    _, words = fault(image(f"data:image/png;base64,{data}"))
    assert f"an image larger than {MAX_INLINE_BYTES:,} bytes" in words


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (body(image()), True),
        (body({"type": "text", "text": "image_url"}), False),
        (body("image_url", 5, None), False),
        ({"messages": [{"content": "a"}, 5, {"content": [image()]}]}, True),
        ({"messages": {"content": [image()]}}, False),
        ({}, False),
    ],
)
def test_whether_a_body_has_images_is_told_of_any_body(said: Any, *, expected: bool) -> None:
    """Valid or not."""
    assert has_images(said) is expected
