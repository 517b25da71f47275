"""Input items of a decision: messages, tool calls and their outputs, shown as a transcript."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

from ..errors import RequestError
from ..fields import Text, text_or_list_of
from ..parts import CheckedUrl
from .body_fields import text_of_json
from .questions import Image, Part

_TEXTS = ("input_text", "output_text", "text")


def _part_type(value: object) -> object:
    if value not in _TEXTS:
        raise ValueError(
            "must be 'input_text', 'input_image', 'input_json', 'output_text' or 'refusal':"
            " recordings and files are not supported"
        )
    return value


def _item_type(value: object) -> object:
    if value != "message":
        raise ValueError(
            "must be 'message', or the type of a function or custom tool call or output"
        )
    return value


def _container(value: object) -> object:
    if not isinstance(value, (dict, list)):
        raise ValueError("must be an object or a list")  # noqa: TRY004 - pydantic's error
    return value


class _Item(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class TextItem(_Item):
    """Text of a message, a question or an output."""

    type: Annotated[Literal["input_text", "output_text", "text"], BeforeValidator(_part_type)]
    text: Text


class RefusalItem(_Item):
    """The text of an assistant's refusal."""

    type: Literal["refusal"]
    refusal: Text


class JsonItem(_Item):
    """JSON, which the model reads as text."""

    type: Literal["input_json"]
    data: Annotated[Any, AfterValidator(_container)]


class ImageItem(_Item):
    """An image by URL; `detail` has no effect."""

    type: Literal["input_image"]
    image_url: CheckedUrl
    detail: Literal["low", "high", "auto", "original"] | None = None


class OtherItem(_Item):
    """Part of any other type, which is refused."""

    type: Annotated[str, AfterValidator(_part_type)]


def _form_of_part(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind in _TEXTS:
        return "<text>"
    return _PARTS.get(kind, "<other>")


_PARTS = {"refusal": "<refusal>", "input_json": "<json>", "input_image": "<image>"}
ContentItem = Annotated[
    Annotated[TextItem, Tag("<text>")]
    | Annotated[RefusalItem, Tag("<refusal>")]
    | Annotated[JsonItem, Tag("<json>")]
    | Annotated[ImageItem, Tag("<image>")]
    | Annotated[OtherItem, Tag("<other>")],
    Discriminator(_form_of_part),
]
Content = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[ContentItem], Field(fail_fast=True), Tag("<list>")],
    text_or_list_of("parts"),
]


class MessageItem(_Item):
    """A message of a conversation."""

    type: Annotated[Literal["message"], BeforeValidator(_item_type)] = "message"
    role: Literal["user", "developer", "system", "assistant"]
    content: Content


class CallItem(_Item):
    """A call of a function or a custom tool; their inputs are `arguments` and `input`."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: Text
    name: Text
    arguments: Text | None = None
    input: Text | None = None


class OutputItem(_Item):
    """The output of an earlier call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: Content


def _kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind.endswith("_output"):
        return "<output>"
    return "<call>" if isinstance(kind, str) and kind.endswith("_call") else "<message>"


InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<call>")]
    | Annotated[OutputItem, Tag("<output>")],
    Discriminator(_kind),
]


def content_parts(content: Content, path: str) -> Iterator[Part]:
    """Yield the parts of a message's content; `path` is its place in the body."""
    if isinstance(content, str):
        yield content
        return
    for place, item in enumerate(content):
        match item:
            case ImageItem():
                yield Image(f"{path}.{place}", item.image_url)
            case JsonItem():
                yield text_of_json(item.data, f"{path}.{place}.data")
            case RefusalItem():
                yield item.refusal
            case TextItem():
                yield item.text


def item_parts(items: Sequence[InputItem], path: str) -> Iterator[Part]:
    """Yield the parts of a transcript; a lone user message is shown without its role.

    Raises `RequestError` for an output of an unknown call.
    """
    calls: dict[str, str] = {}
    shows_roles = len(items) > 1 or not isinstance(items[0], MessageItem) or items[0].role != "user"
    for place, item in enumerate(items):
        if place:
            yield "\n\n"
        here = f"{path}.{place}"
        match item:
            case MessageItem():
                if shows_roles:
                    yield f"{item.role.capitalize()}: "
                yield from content_parts(item.content, f"{here}.content")
            case CallItem():
                calls[item.call_id] = item.name
                yield f"Call of {item.name}: {_call_text(item, here)}"
            case _:
                if item.call_id not in calls:
                    raise RequestError(
                        f"`{here}.call_id` is not the ID of an earlier call.",
                        param=f"{here}.call_id",
                    )
                yield f"Output of {calls[item.call_id]}: "
                yield from content_parts(item.output, f"{here}.output")


def _call_text(item: CallItem, path: str) -> str:
    field = "arguments" if item.type == "function_call" else "input"
    text: str | None = getattr(item, field)
    if text is None:
        raise RequestError(f"`{path}.{field}` is required.", param=f"{path}.{field}")
    return text
