"""Input items of a response: messages, reasoning, function calls and their outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag

from ..custom_tools import arguments_of
from ..fields import Text, text_or_list_of
from ..page_ranges import Pages
from ..parts import INPUT_AUDIO, CheckedUrl, FileSource, InputAudioPart

_TEXT_TYPES = ("input_text", "output_text", "text")


def _absent(value: object) -> object:
    if value is not None:
        raise ValueError("is not supported: files are not stored; send an `image_url`")
    return value


def _other_part(kind: str) -> str:
    del kind
    raise ValueError(
        "must be 'input_text', 'input_image', 'input_file' or 'input_audio': other types are not"
        " supported"
    )


def _other_item(kind: str) -> str:
    raise ValueError(
        "must be 'message', 'reasoning', 'function_call', 'custom_tool_call' or a call's output: "
        + ("send the item itself" if kind == "item_reference" else "other types are not supported")
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
    file_id: Annotated[Any, AfterValidator(_absent)] = None  # first, for the better error
    image_url: CheckedUrl


class FilePart(FileSource):
    """Document whose `pages` the model sees as images."""

    type: Literal["input_file"]
    pages: Pages | None = None


class _OtherPart(BaseModel):
    type: Annotated[str, AfterValidator(_other_part)]


def _form_of_part(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "input_image":
        return "<image>"
    if kind == "input_file":
        return "<file>"
    if kind == INPUT_AUDIO:
        return "<audio>"
    if kind == "refusal":
        return "<refusal>"
    return "<other>" if isinstance(kind, str) and kind not in _TEXT_TYPES else "<text>"


Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[ImagePart, Tag("<image>")]
    | Annotated[FilePart, Tag("<file>")]
    | Annotated[InputAudioPart, Tag("<audio>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[_OtherPart, Tag("<other>")],
    Discriminator(_form_of_part),
]


Content = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Part], Field(fail_fast=True, min_length=1), Tag("<list>")],
    text_or_list_of("parts"),
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


class CustomCallItem(_Item):
    """Call of a custom tool in an earlier answer."""

    call_id: Annotated[Text, Field(min_length=1)]
    name: Annotated[Text, Field(min_length=1)]
    input: Text

    @property
    def arguments(self) -> str:
        """Return the arguments of the function that it is in the chat."""
        return arguments_of(self.input)


class OutputItem(_Item):
    """Output of a function or custom tool that an earlier answer called."""

    call_id: Annotated[Text, Field(min_length=1)]
    output: Content


class _OtherItem(BaseModel):
    type: Annotated[str, AfterValidator(_other_item)]


_FORMS = {
    "message": "<message>",
    "reasoning": "<reasoning>",
    "function_call": "<call>",
    "custom_tool_call": "<custom>",
    "function_call_output": "<output>",
    "custom_tool_call_output": "<output>",
}


def _form_of_item(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return _FORMS.get(kind, "<other>") if isinstance(kind, str) else "<message>"


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[FunctionCallItem, Tag("<call>")]
    | Annotated[CustomCallItem, Tag("<custom>")]
    | Annotated[OutputItem, Tag("<output>")]
    | Annotated[_OtherItem, Tag("<other>")],
    Discriminator(_form_of_item),
]


class ChatMessages:
    """Messages of a chat; `places` maps the path of each part to its path in the body.

    Reasoning, text and calls that follow each other are one message of the assistant.
    """

    def __init__(self, instructions: str | None, items: str | Iterable[Any]) -> None:
        """Translate the input of a response."""
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}
        self._joined: dict[tuple[int, str], list[str | list[dict[str, Any]]]] = {}
        if instructions:
            self._add("system", "instructions", content=instructions)
        if isinstance(items, str):
            self._add("user", "input", content=items)
            return
        for index, item in enumerate(items):
            self._add_item(f"input.{index}", item)
        for (number, name), texts in self._joined.items():
            self.messages[number][name] = _join(texts)

    def place_of(self, path: str) -> str:
        """Return the path in the body of a path in the chat."""
        head, rest = path, ""
        while head and head not in self.places:
            head, _, last = head.rpartition(".")
            rest = f".{last}{rest}"
        return f"{self.places[head]}{rest}" if head else path

    def _add_item(self, place: str, item: Any) -> None:
        match item:
            case MessageItem():
                content = _content(item.content)
                if item.role == "assistant" and self._is_open:
                    self._extend(f"{place}.content", "content", content)
                else:
                    self._add(item.role, place, content=content)
            case ReasoningItem(text=text) if text:
                if not self._is_open:
                    self._add("assistant", place)
                self._extend(place, "reasoning", text)
            case FunctionCallItem() | CustomCallItem():
                if not self.messages or self.messages[-1]["role"] != "assistant":
                    self._add("assistant", place)
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                calls = self.messages[-1].setdefault("tool_calls", [])
                calls.append(call)
                path = f"messages.{len(self.messages) - 1}.tool_calls.{len(calls) - 1}"
                self.places |= {path: place, f"{path}.function": place}
            case OutputItem():
                self._add("tool", place, tool_call_id=item.call_id, content=_content(item.output))
                self.places[f"messages.{len(self.messages) - 1}.content"] = f"{place}.output"

    @property
    def _is_open(self) -> bool:
        """Return whether more text belongs to the last message, which is the assistant's."""
        last = self.messages[-1] if self.messages else {}
        return last.get("role") == "assistant" and ("content" not in last or "tool_calls" in last)

    def _add(self, role: str, place: str, **fields: Any) -> None:
        self.places[f"messages.{len(self.messages)}"] = place
        self.messages.append({"role": role, **fields})

    def _extend(self, place: str, name: str, more: str | list[dict[str, Any]]) -> None:
        """Add more text to a field of the last message, on a new line."""
        last, number = self.messages[-1], len(self.messages) - 1
        if name not in last:
            self.places[f"messages.{number}.{name}"] = place
            last[name] = more
        else:
            self._joined.setdefault((number, name), [last[name]]).append(more)


def _join(texts: list[str | list[dict[str, Any]]]) -> str | list[dict[str, Any]]:
    """Return texts as one, and all parts if some have parts."""
    lines = [text for text in texts if isinstance(text, str)]
    if len(lines) == len(texts):
        return "\n".join(lines)
    return [part for text in texts for part in _as_parts(text)]


def _as_parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _content(content: str | list[Any]) -> str | list[dict[str, Any]]:
    """Return a chat message's content; a single text is a string, which every template takes."""
    if isinstance(content, str):
        return content
    parts = [_chat_part(part) for part in content]
    return parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts


def _chat_part(
    part: TextPart | RefusalPart | ImagePart | FilePart | InputAudioPart,
) -> dict[str, Any]:
    match part:
        case InputAudioPart():
            return part.model_dump()
        case FilePart():
            return {"type": "file", "file": {"file_url": part.url}, "pages": part.pages}
        case ImagePart():
            return {"type": "image_url", "image_url": {"url": part.image_url}}
        case RefusalPart():
            return {"type": "text", "text": part.refusal}
    return {"type": "text", "text": part.text}
