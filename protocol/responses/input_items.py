"""Input items of a response: messages, reasoning, function calls and their outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag

from ..fields import Text
from ..parts import CheckedUrl

_TEXT_TYPES = ("input_text", "output_text", "text")


def _absent(value: object) -> object:
    if value is not None:
        raise ValueError("is not supported: files are not stored; send an `image_url`")
    return value


def _other_part(kind: str) -> str:
    del kind
    raise ValueError("must be 'input_text' or 'input_image': other types are not supported")


def _other_item(kind: str) -> str:
    raise ValueError(
        "must be 'message', 'reasoning', 'function_call' or 'function_call_output': "
        + (
            "earlier responses are not stored"
            if kind == "item_reference"
            else "other types are not supported"
        )
    )


class _Item(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class TextPart(_Item):
    """Text of a user, a tool or an earlier answer."""

    type: Literal["input_text", "output_text", "text"]
    text: Text


class RefusalPart(_Item):
    """Refusal in an earlier answer."""

    type: Literal["refusal"]
    refusal: Text


class ImagePart(_Item):
    """Image by its URL; `detail` has no effect."""

    type: Literal["input_image"]
    image_url: CheckedUrl
    file_id: Annotated[Any, AfterValidator(_absent)] = None


class _OtherPart(BaseModel):
    type: Annotated[str, AfterValidator(_other_part)]


def _form_of_part(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "input_image":
        return "<image>"
    if kind == "refusal":
        return "<refusal>"
    return "<other>" if isinstance(kind, str) and kind not in _TEXT_TYPES else "<text>"


Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[ImagePart, Tag("<image>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[_OtherPart, Tag("<other>")],
    Discriminator(_form_of_part),
]


def _form_of_content(value: object) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<parts>" if isinstance(value, list) else None


Content = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Part], Field(fail_fast=True, min_length=1), Tag("<parts>")],
    Discriminator(
        _form_of_content,
        custom_error_type="content_form",
        custom_error_message="Input should be a string or a list of parts",
    ),
]


class MessageItem(_Item):
    """Message of a user, a developer, or an earlier answer."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class ReasoningText(_Item):
    """Part of an earlier answer's reasoning, or of its summary."""

    text: Text


class ReasoningItem(_Item):
    """Reasoning of an earlier answer: its content, or its summary if there is none.

    `encrypted_content` has no effect.
    """

    summary: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None

    @property
    def text(self) -> str:
        """Return the reasoning; empty if only its encrypted form was sent."""
        return "\n".join(part.text for part in self.content or self.summary or ())


class FunctionCallItem(_Item):
    """Function call of an earlier answer."""

    call_id: Annotated[Text, Field(min_length=1)]
    name: Annotated[Text, Field(min_length=1)]
    arguments: Text


class FunctionOutputItem(_Item):
    """Output of a function that an earlier answer called."""

    call_id: Annotated[Text, Field(min_length=1)]
    output: Content


class _OtherItem(BaseModel):
    type: Annotated[str, AfterValidator(_other_item)]


_FORMS = {
    "message": "<message>",
    "reasoning": "<reasoning>",
    "function_call": "<call>",
    "function_call_output": "<output>",
}


def _form_of_item(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return _FORMS.get(kind, "<other>") if isinstance(kind, str) else "<message>"


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[FunctionCallItem, Tag("<call>")]
    | Annotated[FunctionOutputItem, Tag("<output>")]
    | Annotated[_OtherItem, Tag("<other>")],
    Discriminator(_form_of_item),
]


class ChatMessages:
    """Messages of a chat, and the path in the body of each.

    Reasoning, text and calls that follow each other are one message of the assistant.
    """

    def __init__(self, instructions: str | None, items: str | Iterable[Any]) -> None:
        """Translate the input of a response."""
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        if instructions:
            self._add("instructions", role="system", content=instructions)
        if isinstance(items, str):
            self._add("input", role="user", content=items)
            return
        for index, item in enumerate(items):
            self._add_item(f"input.{index}", item)

    def _add_item(self, place: str, item: Any) -> None:
        match item:
            case MessageItem():
                content = _content(item.content)
                if item.role == "assistant" and self._has_only_reasoning:
                    self.messages[-1]["content"] = content
                else:
                    self._add(place, role=item.role, content=content)
            case ReasoningItem(text=text) if text:
                self._add(place, role="assistant", reasoning=text)
            case FunctionCallItem():
                if not self.messages or self.messages[-1]["role"] != "assistant":
                    self._add(place, role="assistant")
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                self.messages[-1].setdefault("tool_calls", []).append(call)
            case FunctionOutputItem():
                output = _content(item.output)
                self._add(place, role="tool", tool_call_id=item.call_id, content=output)

    def _add(self, place: str, **message: Any) -> None:
        self.messages.append(message)
        self.places.append(place)

    @property
    def _has_only_reasoning(self) -> bool:
        return bool(self.messages) and self.messages[-1].keys() == {"role", "reasoning"}


def _content(content: str | list[Any]) -> str | list[dict[str, Any]]:
    """Return a chat message's content; a single text is a string, which every template takes."""
    if isinstance(content, str):
        return content
    parts = [_chat_part(part) for part in content]
    return parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts


def _chat_part(part: TextPart | RefusalPart | ImagePart) -> dict[str, Any]:
    match part:
        case ImagePart():
            return {"type": "image_url", "image_url": {"url": part.image_url}}
        case RefusalPart():
            return {"type": "text", "text": part.refusal}
    return {"type": "text", "text": part.text}
