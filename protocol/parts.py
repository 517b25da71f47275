"""Content parts of a message: text, refusals, and images and documents by URL."""

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
from .urls import checked_url

IMAGE_URL = "image_url"
FILE = "file"
IMAGE = "an image"
DOCUMENT = "a document"


def _unserved_type(part_type: str) -> str:
    del part_type
    raise ValueError("must be 'text', 'image_url' or 'file': other types are not supported")


def _image_url(url: str) -> str:
    return checked_url(url, IMAGE)


CheckedUrl = Annotated[str, AfterValidator(_image_url)]
"""URL of an image: http(s), S3, or base64 data."""


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
    """An image or a document of a body: its place, its URL, and the selected pages (None: all).

    Only the part of a document may have `pages`.
    """

    place: str
    url: str
    pages: str | None = None
    is_document: bool = False


def _as_object(value: object) -> object:
    return {"url": value} if isinstance(value, str) else value


_FORMS = {"text": "<text>", IMAGE_URL: "<image>", "refusal": "<refusal>", FILE: "<file>"}


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


class OtherPart(BaseModel):
    """Part of any other type, which is refused."""

    type: Annotated[str, AfterValidator(_unserved_type)]


Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[ImagePart, Tag("<image>")]
    | Annotated[FilePart, Tag("<file>")]
    | Annotated[OtherPart, Tag("<other>")],
    Discriminator(_form_of_part),
]


def is_image(part: object) -> bool:
    """Say whether a part of a body, valid or not, is an image or a document."""
    return _form_of_part(part) in ("<image>", "<file>")
