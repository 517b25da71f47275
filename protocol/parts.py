"""Content parts of a message: text, and images by URL."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
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


def _form_of_content(value: object) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<parts>" if isinstance(value, list) else None


def _form_of_part(value: object) -> str:
    part_type = value.get("type") if isinstance(value, dict) else None
    if part_type == IMAGE_URL:
        return "<image>"
    return "<other>" if isinstance(part_type, str) and part_type != "text" else "<text>"


class TextPart(BaseModel):
    """Text part."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text"]
    text: Text


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
    | Annotated[ImagePart, Tag("<image>")]
    | Annotated[OtherPart, Tag("<other>")],
    Discriminator(_form_of_part),
]
Content = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Part], Field(fail_fast=True, min_length=1), Tag("<parts>")],
    Discriminator(
        _form_of_content,
        custom_error_type="content_form",
        custom_error_message="Input should be a string or a list of parts",
    ),
]


def has_images(body: dict[str, Any]) -> bool:
    """Say whether a body, valid or not, has an image part."""
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(_form_of_part(part) == "<image>" for part in content):
            return True
    return False
