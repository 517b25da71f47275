"""Recordings on the wire: the bodies of transcriptions and translations, and what answers them.

A line cannot carry a file: `file_url` names one that is fetched, or holds it as a data URL.
"""

from __future__ import annotations

import re
from binascii import Error as NotBase64
from binascii import a2b_base64
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
)

from engine.hosts.addresses import UrlRefused, read_url
from engine.hosts.public import is_inside
from engine.protocol.errors import RequestError
from engine.protocol.fields import Seed, Share, Text
from engine.protocol.languages import code_of

FILE_URL = "file_url"
FILE = "file"
"""Where the bytes of a recording stand once they are fetched; no line may have it."""

MAX_INLINE_BYTES = 25 * 2**20
"""So large may a recording be that lies in its line; one that is fetched may have another bound."""

_MAX_PROMPT_CHARS = 20_000
_DATA = "data:"
_DATA_URL = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
_DATA_FORM = "must be `data:<type>;base64,<data>`, if it is a data URL"
_FORMS = "must be an http:// or https:// url, or a base64 data URL"

ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
Granularity = Literal["segment", "word"]


def inline_bytes(url: str) -> bytes | None:
    """Return what a data URL holds, or None for any other url.

    Raises `RequestError` when it cannot be read, or holds more than `MAX_INLINE_BYTES`.
    """
    if url[: len(_DATA)].lower() != _DATA:
        return None
    head = _DATA_URL.match(url)
    if head is None:
        raise _refused(_DATA_FORM)
    # Four characters stand for three bytes.
    if (len(url) - head.end()) * 3 // 4 > MAX_INLINE_BYTES + 2:
        raise too_large(MAX_INLINE_BYTES)
    text = "".join(url[head.end() :].split())
    try:
        return a2b_base64(text, strict_mode=True)
    except (NotBase64, ValueError):
        raise _refused("holds no base64 behind its `base64,`") from None


def too_large(max_bytes: int) -> RequestError:
    """Return the error of a recording that is larger than it may be."""
    return _refused(f"names a recording that is larger than {max_bytes:,} bytes")


def _checked_url(url: str) -> str:
    """Return the url, or raise what no fetching could change; the words do not hold it."""
    if inline_bytes(url) is not None:
        return url
    if not url.lower().startswith(("http://", "https://")):
        raise _refused(_FORMS)
    try:
        host = read_url(url, ("https", "http")).host
    except UrlRefused as exc:
        raise _refused(f"cannot be fetched: {exc}") from exc
    if is_inside(host):
        raise _refused(f"cannot be fetched: {host} is not a public host")
    return url


def _refused(why: str) -> RequestError:
    return RequestError(f"`{FILE_URL}` {why}.", param=FILE_URL)


def _language(called: str) -> str:
    code = code_of(called)
    if code is None:
        raise ValueError("must be a language's ISO code, such as 'en', or its English name")
    return code


class _SpeechRequest(BaseModel):
    """What both ask in the same words; unknown fields are let pass, null is leaving out."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    file_url: Annotated[str, AfterValidator(_checked_url)]
    language: Annotated[str, AfterValidator(_language)] | None = None
    prompt: Annotated[Text, Field(max_length=_MAX_PROMPT_CHARS)] | None = None
    response_format: ResponseFormat | None = None
    temperature: Share | None = None
    seed: Seed | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_file(cls, body: Any) -> Any:
        if isinstance(body, dict) and body.get(FILE) is not None:
            raise RequestError(
                "`file` cannot be sent in a line: name the recording by `file_url`, an http:// or"
                " https:// url or a base64 data URL.",
                param=FILE,
            )
        return body


class TranscriptionRequest(_SpeechRequest):
    """The body of a request to `/v1/audio/transcriptions`."""

    # Forms and vLLM call it by the second name.
    timestamp_granularities: list[Granularity] | None = Field(
        None,
        validation_alias=AliasChoices("timestamp_granularities", "timestamp_granularities[]"),
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Refuse times that the format has no place for."""
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise RequestError(
                '`timestamp_granularities` needs `response_format` "verbose_json".',
                param="timestamp_granularities",
            )
        return self


class TranslationRequest(_SpeechRequest):
    """The body of a request to `/v1/audio/translations`."""
