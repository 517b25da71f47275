"""Recordings on the wire: the bodies of transcriptions and translations, and what answers them.

A line cannot carry a file: `file_url` names one that is fetched, or holds it as a data URL.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    model_validator,
)

from engine.protocol import urls
from engine.protocol.errors import RequestError
from engine.protocol.fields import (
    SamplingFields,
    Share,
    Text,
    listed,
)
from engine.protocol.languages import code_of
from engine.protocol.urls import checked_url, inline_bytes

FILE_URL = "file_url"
FILE = "file"
"""Where the bytes of a recording stand once they are fetched; no line may have it."""

_MAX_PROMPT_CHARS = 20_000
_RECORDING = "a recording"

ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
Granularity = Literal["segment", "word"]


def inline_recording(url: str) -> bytes | None:
    """Return what a data URL holds, or None for any other url; raises `RequestError`."""
    try:
        return inline_bytes(url, _RECORDING)
    except ValueError as exc:
        raise _refused(str(exc)) from None


def too_large(max_bytes: int) -> RequestError:
    """Return the error of a recording that is larger than it may be."""
    return _refused(urls.too_large(_RECORDING, max_bytes))


def _checked(url: str) -> str:
    try:
        return checked_url(url, _RECORDING)
    except ValueError as exc:
        raise _refused(str(exc)) from None


def _refused(why: str) -> RequestError:
    return RequestError(f"`{FILE_URL}` {why}.", param=FILE_URL)


def _language(called: str) -> str:
    code = code_of(called)
    if code is None:
        raise ValueError("must be a language's ISO code, such as 'en', or its English name")
    return code


class _SpeechRequest(SamplingFields):
    """What both ask in the same words; unknown fields are let pass, null is leaving out."""

    model: str | None = None
    file_url: Annotated[str, AfterValidator(_checked)]
    language: Annotated[str, AfterValidator(_language)] | None = None
    prompt: Annotated[Text, Field(max_length=_MAX_PROMPT_CHARS)] | None = None
    response_format: ResponseFormat | None = None
    temperature: Share | None = None

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
    timestamp_granularities: Annotated[list[Granularity], BeforeValidator(listed)] | None = Field(
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
