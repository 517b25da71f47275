"""The turns of a conversation on the wire: roles, what fields a turn has, calls of tools."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from engine.protocol.fields import Text, fault
from engine.protocol.parts import Content, ImagePart, TextPart
from engine.protocol.tools import ToolCall


def _served_role(role: str) -> str:
    if role == "function":
        raise ValueError("must be 'tool' where it answers a call: 'function' is the older form")
    return role


def _absent(value: object) -> object:
    if value not in (None, [], {}):
        raise ValueError("is not supported: leave it out")
    return value


class Message(BaseModel):
    """One turn of a conversation; fields that we do not know reach the template as they are.

    A turn of role `tool` says what came of the call of that `tool_call_id`. An assistant's turn
    that calls tools or thinks may be without content.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    role: Annotated[Text, Field(min_length=1), AfterValidator(_served_role)]
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Annotated[Text, Field(min_length=1)] | None = None
    # What the assistant thought: vLLM's name, its old name, and what gpt-oss's template reads.
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    thinking: Text | None = None
    function_call: Annotated[Any, AfterValidator(_absent)] = None
    audio: Annotated[Any, AfterValidator(_absent)] = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        """Refuse a turn without what its role needs."""
        if self.tool_calls and self.role != "assistant":
            raise fault(("tool_calls",), "must be an assistant's", self.tool_calls)
        if self.role == "tool" and self.tool_call_id is None:
            raise fault(("tool_call_id",), "must name the call that is answered", None)
        has_thought = self.role == "assistant" and self.thought
        if self.content is None and not self.tool_calls and not has_thought:
            raise fault(("content",), "is required", None)
        return self

    @property
    def thought(self) -> str | None:
        """Return what the assistant thought before it answered, under whichever name it came."""
        fields = (self.reasoning, self.reasoning_content, self.thinking)
        given = [text for text in fields if text is not None]
        return next(filter(None, given), given[0] if given else None)

    def texts(self) -> list[str]:
        """Return the texts of the parts; content that is a string is one part."""
        if self.content is None:
            return []
        if isinstance(self.content, str):
            return [self.content]
        return [part.text for part in self.content if isinstance(part, TextPart)]

    def images(self) -> list[tuple[int, ImagePart]]:
        """Return the parts that are images, each with its place among all parts."""
        parts = self.content if isinstance(self.content, list) else ()
        return [(i, part) for i, part in enumerate(parts) if isinstance(part, ImagePart)]

    def other_fields(self) -> dict[str, Any]:
        """Return the fields that only templates know, such as `name`."""
        return self.__pydantic_extra__ or {}
