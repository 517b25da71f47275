"""Content parts of a message: text, refusals, and images by URL."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Tag,
)

from .fields import Text
from .urls import checked_url

IMAGE_URL = "image_url"
IMAGE = "an image"


def _unserved_type(part_type: str) -> str:
    del part_type
    raise ValueError("must be 'text' or 'image_url': other types are not supported")


def _image_url(url: str) -> str:
    return checked_url(url, IMAGE)


CheckedUrl = Annotated[str, AfterValidator(_image_url)]
"""URL of an image: http(s), or base64 data."""


def _as_object(value: object) -> object:
    return {"url": value} if isinstance(value, str) else value


_FORMS = {"text": "<text>", IMAGE_URL: "<image>", "refusal": "<refusal>"}


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


class OtherPart(BaseModel):
    """Part of any other type, which is refused."""

    type: Annotated[str, AfterValidator(_unserved_type)]


Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[ImagePart, Tag("<image>")]
    | Annotated[OtherPart, Tag("<other>")],
    Discriminator(_form_of_part),
]


def is_image(part: object) -> bool:
    """Say whether a part of a body, valid or not, is an image."""
    return _form_of_part(part) == "<image>"
