"""Chat messages: roles, fields and tool calls of a conversation in a request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    Tag,
    model_validator,
)

from .fields import Text, fault, text_or_list_of
from .parts import MediaPart, Part, RefusalPart, TextPart, is_medium
from .tools import ToolCall


def _served_role(role: str) -> str:
    if role == "function":
        raise ValueError("must be 'tool' for a tool's result: 'function' is deprecated")
    return role


def _absent(value: object) -> object:
    if value not in (None, [], {}):
        raise ValueError("is not supported: remove it")
    return value


Content = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Part], Field(fail_fast=True, min_length=1), Tag("<list>")],
    text_or_list_of("parts"),
]


class Message(BaseModel):
    """Message of a conversation; unknown fields are passed to the template unchanged.

    A message of role `tool` is the result of the call with that `tool_call_id`. An assistant's
    message with tool calls, reasoning or a refusal may have no content.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    role: Annotated[Text, Field(min_length=1), AfterValidator(_served_role)]
    content: Content | None = None
    refusal: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Annotated[Text, Field(min_length=1)] | None = None
    # The assistant's reasoning: vLLM's name, its old name, and the name in gpt-oss's template.
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    thinking: Text | None = None
    function_call: Annotated[Any, AfterValidator(_absent)] = None
    audio: Annotated[Any, AfterValidator(_absent)] = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        """Refuse a message that lacks a required field of its role."""
        if self.tool_calls and self.role != "assistant":
            raise fault(("tool_calls",), "is only allowed in assistant messages", self.tool_calls)
        if self.role == "tool" and self.tool_call_id is None:
            raise fault(("tool_call_id",), "is required: it is the ID of the answered call", None)
        is_spoken = self.role == "assistant" and (self.thought or self.refusal)
        if self.content is None and not self.tool_calls and not is_spoken:
            raise fault(("content",), "is required", None)
        return self

    @property
    def thought(self) -> str | None:
        """Return the assistant's reasoning, under any of its names."""
        fields = (self.reasoning, self.reasoning_content, self.thinking)
        given = [text for text in fields if text is not None]
        return next(filter(None, given), given[0] if given else None)

    def texts(self) -> list[str]:
        """Return the texts of the parts; a string is one part, and so is a refusal without any."""
        if self.content is None:
            return [self.refusal] if self.refusal else []
        if isinstance(self.content, str):
            return [self.content]
        return [part.text for part in self.content if isinstance(part, (TextPart, RefusalPart))]

    def media(self) -> list[tuple[int, MediaPart]]:
        """Return the images, documents and recordings, each with its index among all parts."""
        parts = self.content if isinstance(self.content, list) else ()
        return [(i, part) for i, part in enumerate(parts) if isinstance(part, MediaPart)]

    def repeat_media(self, counts: Iterator[int]) -> Self:
        """Return the message with as many copies of each medium as it has pages."""
        if not self.media():
            return self
        content = [
            part
            for part in self.content or ()
            for _ in range(next(counts) if isinstance(part, MediaPart) else 1)
        ]
        return self.model_copy(update={"content": content})

    def other_fields(self) -> dict[str, Any]:
        """Return the unknown fields, which only templates read, such as `name`."""
        return self.__pydantic_extra__ or {}


def has_media(body: dict[str, Any]) -> bool:
    """Say whether a body, valid or not, has an image, a document or a recording as a part."""
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(map(is_medium, content)):
            return True
    return False
