"""Audio requests: bodies of transcriptions and translations, their languages and formats.

A line cannot contain a file: `file_url` is a URL to fetch, or a data URL.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from . import urls
from .errors import RequestError
from .fetched_urls import FILE_URL
from .fields import Count, Finite, SamplingFields, Share, Text, listed
from .urls import checked_url, inline_bytes
from .validation import short_repr

_TABLE = (
    "en english,zh chinese,de german,es spanish,ru russian,ko korean,fr french,ja japanese,"
    "pt portuguese,tr turkish,pl polish,ca catalan,nl dutch,ar arabic,sv swedish,it italian,"
    "id indonesian,hi hindi,fi finnish,vi vietnamese,he hebrew,uk ukrainian,el greek,ms malay,"
    "cs czech,ro romanian,da danish,hu hungarian,ta tamil,no norwegian,th thai,ur urdu,"
    "hr croatian,bg bulgarian,lt lithuanian,la latin,mi maori,ml malayalam,cy welsh,sk slovak,"
    "te telugu,fa persian,lv latvian,bn bengali,sr serbian,az azerbaijani,sl slovenian,"
    "kn kannada,et estonian,mk macedonian,br breton,eu basque,is icelandic,hy armenian,"
    "ne nepali,mn mongolian,bs bosnian,kk kazakh,sq albanian,sw swahili,gl galician,mr marathi,"
    "pa punjabi,si sinhala,km khmer,sn shona,yo yoruba,so somali,af afrikaans,oc occitan,"
    "ka georgian,be belarusian,tg tajik,sd sindhi,gu gujarati,am amharic,yi yiddish,lo lao,"
    "uz uzbek,fo faroese,ht haitian creole,ps pashto,tk turkmen,nn nynorsk,mt maltese,"
    "sa sanskrit,lb luxembourgish,my myanmar,bo tibetan,tl tagalog,mg malagasy,as assamese,"
    "tt tatar,haw hawaiian,ln lingala,ha hausa,ba bashkir,jw javanese,su sundanese,yue cantonese"
)
_OTHER_NAMES = (
    "my burmese,ca valencian,nl flemish,ht haitian,lb letzeburgesch,ps pushto,pa panjabi,"
    "ro moldavian,ro moldovan,si sinhalese,es castilian,zh mandarin,jw jv"
)


def _pairs(table: str) -> list[tuple[str, str]]:
    return [(code, name) for code, _, name in (entry.partition(" ") for entry in table.split(","))]


LANGUAGES: Mapping[str, str] = MappingProxyType(dict(_pairs(_TABLE)))
"""The English name of each code."""

_CODES = {name: code for code, name in _pairs(_TABLE) + _pairs(_OTHER_NAMES)}

# Languages without spaces between words.
UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "yue"})


def code_of(language: str) -> str | None:
    """Return the code of a language, given by its code or a name, in any case."""
    called = language.strip().lower()
    return called if called in LANGUAGES else _CODES.get(called)


FILE = "file"
"""Field with the bytes of a fetched audio file; a line must not have it."""

_MAX_PROMPT_CHARS = 20_000
_MAX_TEMPERATURES = 16
_MAX_DETECTION_WINDOWS = 100
_RECORDING = "a recording"

# A list is Whisper's: each temperature is for windows whose text failed at the previous one. Names
# of branches in brackets are left out of an error's field.
_Temperatures = Annotated[
    Annotated[Share, Tag("<number>")]
    | Annotated[
        list[Share],
        Field(fail_fast=True, min_length=1, max_length=_MAX_TEMPERATURES),
        Tag("list[number]"),
    ],
    Discriminator(lambda value: "list[number]" if isinstance(value, list) else "<number>"),
]
ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
Granularity = Literal["segment", "word"]


def inline_recording(url: str) -> bytes | None:
    """Return the data of a data URL, or None for any other URL; raises `RequestError`."""
    try:
        return inline_bytes(url, _RECORDING)
    except ValueError as exc:
        raise _refused(str(exc)) from None


def too_large(max_bytes: int) -> RequestError:
    """Return the error for an audio file above the size limit."""
    return _refused(urls.too_large(_RECORDING, max_bytes))


def _checked(url: str) -> str:
    try:
        return checked_url(url, _RECORDING)
    except ValueError as exc:
        # A URL is not shown: a presigned one is a secret.
        shown = "" if "://" in url else f"; got {short_repr(url)}"
        raise _refused(f"{exc}{shown}") from None


def _refused(why: str) -> RequestError:
    return RequestError(f"`{FILE_URL}` {why}.", param=FILE_URL)


def _language(called: str) -> str:
    code = code_of(called)
    if code is None:
        raise ValueError(
            "must be an ISO language code, such as 'en', or the language's English name"
        )
    return code


class _SpeechRequest(SamplingFields):
    """Fields of both endpoints; unknown fields are ignored, null fields are unset."""

    model: str | None = None
    file_url: Annotated[str, AfterValidator(_checked)]
    language: Annotated[str, AfterValidator(_language)] | None = None
    prompt: Annotated[Text, Field(max_length=_MAX_PROMPT_CHARS)] | None = None
    response_format: ResponseFormat | None = None
    temperature: _Temperatures | None = None
    compression_ratio_threshold: Annotated[Finite, Field(ge=0)] | None = None
    # The second name is faster-whisper's.
    logprob_threshold: Annotated[Finite, Field(le=0)] | None = Field(
        None, validation_alias=AliasChoices("logprob_threshold", "log_prob_threshold")
    )
    no_speech_threshold: Share | None = None
    language_detection_segments: Annotated[Count, Field(ge=1, le=_MAX_DETECTION_WINDOWS)] | None = (
        None
    )
    language_detection_threshold: Share | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_file(cls, body: Any) -> Any:
        if isinstance(body, dict) and body.get(FILE) is not None:
            raise RequestError(
                "`file` is not supported in a line: use `file_url` with an http://, https:// or"
                " s3:// URL, or a base64 data URL.",
                param=FILE,
            )
        return body


class TranscriptionRequest(_SpeechRequest):
    """The body of a request to `/v1/audio/transcriptions`."""

    # Forms and vLLM use the second name.
    timestamp_granularities: (
        Annotated[list[Granularity], Field(fail_fast=True), BeforeValidator(listed)] | None
    ) = Field(
        None,
        validation_alias=AliasChoices("timestamp_granularities", "timestamp_granularities[]"),
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Refuse timestamps that the response format does not contain."""
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise RequestError(
                '`timestamp_granularities` requires `response_format` to be "verbose_json".',
                param="timestamp_granularities",
            )
        return self


class TranslationRequest(_SpeechRequest):
    """The body of a request to `/v1/audio/translations`."""
