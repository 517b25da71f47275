"""Fetched URLs: the single list of everything that an engine fetches from the web for a body.

Endpoints fetch only these URLs, and results of bodies with a fetched URL are never reused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from .urls import is_inline

FILE_URL: Final = "file_url"
"""The recording of a transcription."""
_PART_SUFFIX: Final = "_url"
_INPUT_PREFIX: Final = "input_"
_IMAGE_URL: Final = "image_url"
_INPUT_AUDIO: Final = "input_audio"
_INPUT_FIELDS: Final = ("content", "output")
_FILE_PARTS: Final = ("file", "input_file")
_FILE_FIELDS: Final = (FILE_URL, "file_data")


def fetched_urls(body: Mapping[str, Any]) -> dict[str, str]:
    """Return the URLs of a body, valid or not, by their path; data URLs are left out.

    They are the audio file (`file_url`), the media of message parts (`image_url` and all other
    types of the same form, as an object or as the URL itself), documents, and the images of a
    decision's, a response's or an embedding's input.
    """
    return {place: url for place, url in _media_urls(body) if not is_inline(url)}


def has_decision_images(body: Mapping[str, Any]) -> bool:
    """Say whether a decision's body, valid or not, has an image."""
    return any(True for _ in _decision_urls(body))


def has_input_media(body: Mapping[str, Any]) -> bool:
    """Say whether the items of a response's input, valid or not, have an image or a recording."""
    return any(
        _url_of(part) is not None or (isinstance(part, dict) and part.get("type") == _INPUT_AUDIO)
        for _, part in _item_parts(body, "input", _INPUT_FIELDS)
    )


def _media_urls(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    recording = body.get(FILE_URL)
    if isinstance(recording, str):
        yield FILE_URL, recording
    yield from _item_urls(body, "messages", ("content",))
    yield from _item_urls(body, "inputs", ("content",))
    if "questions" not in body:
        yield from _plain_urls(body)
    yield from _decision_urls(body) if "questions" in body else _input_urls(body)


def _input_urls(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    return _item_urls(body, "input", _INPUT_FIELDS)


def _decision_urls(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the URLs of System One's `images`, and of the input and questions of a decision."""
    yield from _plain_urls(body)
    yield from _input_urls(body)
    yield from _item_urls(body, "questions", ("instructions",))


def _plain_urls(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the URLs in `images`, of System One and of Cohere."""
    images = body.get("images")
    for i, image in enumerate(images if isinstance(images, list) else ()):
        if isinstance(image, str):
            yield f"images.{i}", image


def _item_urls(
    body: Mapping[str, Any], field: str, contents: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """Yield the URLs of the parts of a list's items, which have their parts in `contents`."""
    for place, part in _item_parts(body, field, contents):
        url = _url_of(part)
        if url is not None:
            yield place, url


def _item_parts(
    body: Mapping[str, Any], field: str, contents: tuple[str, ...]
) -> Iterator[tuple[str, object]]:
    items = body.get(field)
    for i, item in enumerate(items if isinstance(items, list) else ()):
        for name in contents if isinstance(item, dict) else ():
            content = item.get(name)
            for j, part in enumerate(content if isinstance(content, list) else ()):
                yield f"{field}.{i}.{name}.{j}", part


def _url_of(part: object) -> str | None:
    """Return the URL of a part: its field with the name of its type, or an image's URL."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        return None
    if kind in _FILE_PARTS:
        source = part if kind.startswith(_INPUT_PREFIX) else part.get(kind)
        urls = [source.get(name) for name in _FILE_FIELDS] if isinstance(source, dict) else []
        return next((url for url in urls if isinstance(url, str)), None)
    if not kind.endswith(_PART_SUFFIX) and not kind.startswith(_INPUT_PREFIX):
        return None
    medium = part.get(kind, part.get(_IMAGE_URL))
    url = medium.get("url") if isinstance(medium, dict) else medium
    return url if isinstance(url, str) else None
