"""The turns of a conversation on the wire: roles, texts, and parts of content."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag

from engine.protocol.fields import Text


def _served_role(role: str) -> str:
    if role in {"tool", "function"}:
        raise ValueError("must not be of a tool: tools are not supported")
    return role


def _text_type(part_type: str) -> str:
    if part_type != "text":
        raise ValueError("must be 'text': parts of other types are not supported")
    return part_type


def _absent(value: object) -> object:
    if value not in (None, [], {}):
        raise ValueError("is not supported: leave it out")
    return value


def _form_of_content(value: object) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<parts>" if isinstance(value, list) else None


class TextPart(BaseModel):
    """One part of a message's content; only text is served."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Annotated[str, AfterValidator(_text_type)]
    text: Text


Content = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[TextPart], Field(fail_fast=True, min_length=1), Tag("<parts>")],
    Discriminator(
        _form_of_content,
        custom_error_type="content_form",
        custom_error_message="Input should be a string or a list of text parts",
    ),
]


class Message(BaseModel):
    """One turn of a conversation; fields that we do not know reach the template as they are."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Annotated[Text, Field(min_length=1), AfterValidator(_served_role)]
    content: Content
    tool_calls: Annotated[Any, AfterValidator(_absent)] = None
    function_call: Annotated[Any, AfterValidator(_absent)] = None
    audio: Annotated[Any, AfterValidator(_absent)] = None

    def texts(self) -> list[str]:
        """Return the texts of the parts; content that is a string is one part."""
        if isinstance(self.content, str):
            return [self.content]
        return [part.text for part in self.content]

    def other_fields(self) -> dict[str, Any]:
        """Return what the message holds beside role and content (`name`, `reasoning_content`)."""
        return self.__pydantic_extra__ or {}
