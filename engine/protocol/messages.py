"""The turns of a conversation on the wire: roles, texts, parts of content, calls of tools."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from engine.protocol.fields import Text, fault
from engine.protocol.tools import ToolCall


def _served_role(role: str) -> str:
    if role == "function":
        raise ValueError("must be 'tool' where it answers a call: 'function' is the older form")
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
    """One turn of a conversation; fields that we do not know reach the template as they are.

    A turn of role `tool` says what came of the call of that `tool_call_id`. An assistant's turn
    that calls tools may be without content.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    role: Annotated[Text, Field(min_length=1), AfterValidator(_served_role)]
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Annotated[Text, Field(min_length=1)] | None = None
    function_call: Annotated[Any, AfterValidator(_absent)] = None
    audio: Annotated[Any, AfterValidator(_absent)] = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        """Refuse a turn without what its role needs."""
        if self.tool_calls and self.role != "assistant":
            raise fault(("tool_calls",), "must be an assistant's", self.tool_calls)
        if self.role == "tool" and self.tool_call_id is None:
            raise fault(("tool_call_id",), "must name the call that is answered", None)
        if self.content is None and not self.tool_calls:
            raise fault(("content",), "is required", None)
        return self

    def texts(self) -> list[str]:
        """Return the texts of the parts; content that is a string is one part."""
        if self.content is None:
            return []
        if isinstance(self.content, str):
            return [self.content]
        return [part.text for part in self.content]

    def other_fields(self) -> dict[str, Any]:
        """Return what the message holds beside role and content (`name`, `reasoning_content`)."""
        return self.__pydantic_extra__ or {}
