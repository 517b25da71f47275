"""Fetched URLs: the single list of everything that an engine fetches from the web for a body.

Endpoints fetch only these URLs, and results of bodies with a fetched URL are never reused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from .audio import FILE_URL
from .urls import is_inline

_PART_SUFFIX: Final = "_url"
_INPUT_PREFIX: Final = "input_"


def fetched_urls(body: Mapping[str, Any]) -> dict[str, str]:
    """Return the URLs of a body, valid or not, by their path; data URLs are left out.

    They are the audio file (`file_url`) and the media of message parts: `image_url` and all other
    types of the same form, as an object or as the URL itself.
    """
    return {place: url for place, url in _media_urls(body) if not is_inline(url)}


def _media_urls(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    recording, messages = body.get(FILE_URL), body.get("messages")
    if isinstance(recording, str):
        yield FILE_URL, recording
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for j, part in enumerate(content if isinstance(content, list) else ()):
            url = _url_of(part)
            if url is not None:
                yield f"messages.{i}.content.{j}", url


def _url_of(part: object) -> str | None:
    """Return the URL of a message part: its field with the name of its type."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        return None
    if not kind.endswith(_PART_SUFFIX) and not kind.startswith(_INPUT_PREFIX):
        return None
    medium = part.get(kind)
    url = medium.get("url") if isinstance(medium, dict) else medium
    return url if isinstance(url, str) else None
