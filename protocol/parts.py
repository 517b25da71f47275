"""Content parts of a message: text, refusals, and images, documents and recordings by URL."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Tag,
    model_validator,
)

from .fields import Text
from .page_ranges import Pages
from .urls import checked_url, inline_bytes

IMAGE_URL = "image_url"
FILE = "file"
AUDIO_URL = "audio_url"
INPUT_AUDIO = "input_audio"
IMAGE = "an image"
RECORDING = "a recording"
DOCUMENT = "a document"


def _unserved_type(part_type: str) -> str:
    del part_type
    raise ValueError(
        "must be 'text', 'image_url', 'input_audio', 'audio_url' or 'file': other types are not"
        " supported"
    )


def _image_url(url: str) -> str:
    return checked_url(url, IMAGE)


CheckedUrl = Annotated[str, AfterValidator(_image_url)]
"""URL of an image: http(s), S3, or base64 data."""


def _audio_url(url: str) -> str:
    return checked_url(url, RECORDING)


CheckedAudioUrl = Annotated[str, AfterValidator(_audio_url)]
"""URL of a recording: http(s), S3, or base64 data."""


_INLINE = "data:;base64,"
_MAX_SCHEME_CHARS = 8


def _recording_data(data: str) -> str:
    if data[:_MAX_SCHEME_CHARS].partition(":")[1]:
        raise ValueError("must be base64 alone: send a URL in an `audio_url` part")
    try:
        inline_bytes(_INLINE + data, RECORDING)
    except ValueError as exc:
        raise ValueError(str(exc).removesuffix(" after `base64,`")) from None
    return data


def _document_url(url: str) -> str:
    return checked_url(url, DOCUMENT)


CheckedDocumentUrl = Annotated[str, AfterValidator(_document_url)]
"""URL of a document: http(s), S3, or base64 data."""


def _no_id(value: object) -> object:
    if value is not None:
        raise ValueError("is not supported: files are not stored; send `file_data` or `file_url`")
    return value


NoFileId = Annotated[Any, AfterValidator(_no_id)]
"""ID of a stored file, which is refused."""


class PlacedImage(NamedTuple):
    """An image, a document or a recording of a body: its place, its URL, and the selected pages.

    Only the part of a document may have `pages`; None are all.
    """

    place: str
    url: str
    pages: str | None = None
    is_document: bool = False
    is_recording: bool = False


def _as_object(value: object) -> object:
    return {"url": value} if isinstance(value, str) else value


_FORMS = {
    "text": "<text>",
    IMAGE_URL: "<image>",
    "refusal": "<refusal>",
    FILE: "<file>",
    AUDIO_URL: "<audio>",
    INPUT_AUDIO: "<input audio>",
}
_MEDIA_FORMS = frozenset(_FORMS.values()) - {"<text>", "<refusal>"}


def _form_of_part(value: object) -> str:
    part_type = value.get("type") if isinstance(value, dict) else None
    if not isinstance(part_type, str):
        return "<text>"
    return _FORMS.get(part_type, "<other>")


class TextPart(BaseModel):
    """Text part."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text"]
    text: Text


class RefusalPart(BaseModel):
    """Refusal in an earlier answer of an assistant; the model reads it as text."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        """Return the refusal."""
        return self.refusal


class ImageUrl(BaseModel):
    """URL of an image; `detail` has no effect."""

    model_config = ConfigDict(extra="ignore", strict=True)

    url: CheckedUrl
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(BaseModel):
    """Image part; `image_url` may be the URL itself."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["image_url"]
    image_url: Annotated[ImageUrl, BeforeValidator(_as_object)]

    pages: ClassVar[None] = None

    @property
    def url(self) -> str:
        """Return the URL of the image."""
        return self.image_url.url


class FileSource(BaseModel):
    """A document as a data URL or a URL to fetch, under either name."""

    model_config = ConfigDict(extra="ignore", strict=True)

    file_id: NoFileId = None  # first, for the better error
    file_data: CheckedDocumentUrl | None = None
    file_url: CheckedDocumentUrl | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.file_data is None) == (self.file_url is None):
            raise ValueError("must have either `file_data` or `file_url`")
        return self

    @property
    def url(self) -> str:
        """Return the URL of the document."""
        return self.file_url or self.file_data or ""


class FilePart(BaseModel):
    """Document whose `pages` the model sees as images: a PDF, or an image."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["file"]
    file: FileSource
    pages: Pages | None = None

    @property
    def url(self) -> str:
        """Return the URL of the document."""
        return self.file.url


class AudioUrl(BaseModel):
    """URL of a recording."""

    model_config = ConfigDict(extra="ignore", strict=True)

    url: CheckedAudioUrl


class AudioPart(BaseModel):
    """Recording part in vLLM's form; `audio_url` may be the URL itself."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["audio_url"]
    audio_url: Annotated[AudioUrl, BeforeValidator(_as_object)]

    pages: ClassVar[None] = None

    @property
    def url(self) -> str:
        """Return the URL of the recording."""
        return self.audio_url.url


# fmt: off
AudioFormat = Literal[
    "wav", "mp3", "flac", "ogg", "opus", "m4a", "mp4", "aac", "webm", "mpeg", "mpga",
    "mka", "mkv", "mov", "3gp", "aiff", "au", "caf", "w64", "amr", "x-aac",
]
# fmt: on


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class InputAudio(BaseModel):
    """Base64 data of a recording; the data decides its format."""

    model_config = ConfigDict(extra="ignore", strict=True)

    data: Annotated[Text, AfterValidator(_recording_data)]
    format: Annotated[AudioFormat | None, BeforeValidator(_lower)] = None


class InputAudioPart(BaseModel):
    """Recording part in OpenAI's form."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["input_audio"]
    input_audio: InputAudio

    pages: ClassVar[None] = None

    @property
    def url(self) -> str:
        """Return the recording as a data URL."""
        return _INLINE + self.input_audio.data


class OtherPart(BaseModel):
    """Part of any other type, which is refused."""

    type: Annotated[str, AfterValidator(_unserved_type)]


Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[ImagePart, Tag("<image>")]
    | Annotated[FilePart, Tag("<file>")]
    | Annotated[AudioPart, Tag("<audio>")]
    | Annotated[InputAudioPart, Tag("<input audio>")]
    | Annotated[OtherPart, Tag("<other>")],
    Discriminator(_form_of_part),
]


MediaPart = ImagePart | FilePart | AudioPart | InputAudioPart
"""A part that is not text."""


def is_medium(part: object) -> bool:
    """Say whether a part of a body, valid or not, is an image, a document or a recording."""
    return _form_of_part(part) in _MEDIA_FORMS
