"""The request body of `/v1/responses`, and the chat that answers it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import starmap
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    Tag,
    model_validator,
)
from pydantic_core import to_json

from ..chat import ChatCompletionRequest
from ..custom_tools import chat_function
from ..errors import RequestError
from ..fields import NumLogprobs, Text, Whole, few_fields, text_or_list_of
from ..parts import InputAudioPart, PlacedImage
from ..unsupported import CHAT
from ..validation import parse, refuse_unsupported, short_repr
from .input_items import ChatMessages, FilePart, ImagePart, Item

LOGPROBS = "message.output_text.logprobs"

Include = Literal[
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]

ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]

# Parameters of a chat, and their names here; None if there is no such parameter.
_CHAT_NAMES: dict[str, str | None] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "logprobs": "top_logprobs",
    **dict.fromkeys(("confidence", "echo", "prompt_logprobs", "logprob_start_len")),
    **dict.fromkeys(("add_generation_prompt", "continue_final_message", "return_token_ids")),
}
_OWN_PARAMS = (
    (re.compile(r"^response_format\.json_schema\b"), "text.format"),
    (re.compile(r"^response_format\b"), "text.format"),
    (re.compile(r"^max_(completion_)?tokens$"), "max_output_tokens"),
    (re.compile(r"^reasoning_effort$"), "reasoning.effort"),
    (re.compile(r"^verbosity$"), "text.verbosity"),
    (re.compile(r"^(tools\.\d+|tool_choice)\.function\b"), r"\1"),
    (re.compile(r"^tool_choice\.allowed_tools\b"), "tool_choice"),
    (re.compile(r"^(tool_choice\.tools\.\d+)\.function\b"), r"\1"),
    (re.compile(r"^messages$"), "input"),
)
_OTHERS = re.compile(r" \(also invalid: [^)]*\)")
_PARAMETERS = re.compile(r"^tools\.(\d+)\.function\.parameters\b")
_MAX_METADATA_PAIRS, _MAX_KEY_CHARS, _MAX_VALUE_CHARS = 16, 64, 512


def _printable(value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
        to_json(value)  # has a lower limit
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as exc:
        if "depth" in str(exc):
            raise ValueError("is nested too deeply") from None
        raise ValueError("must not contain NaN or an infinity: JSON has neither") from None
    return value


Echoed = AfterValidator(_printable)
Metadata = Annotated[
    dict[
        Annotated[Text, Field(min_length=1, max_length=_MAX_KEY_CHARS)],
        Annotated[Text, Field(max_length=_MAX_VALUE_CHARS)],
    ],
    Field(max_length=_MAX_METADATA_PAIRS),
    BeforeValidator(few_fields),
]


# How a tool is named in a chat, and here.
_CHAT_CHOICE = '{"type": "function", "function": {"name": …}}'
_OWN_CHOICE = '{"type": "function", "name": …}'


Input = Annotated[
    Annotated[Text, Field(min_length=1), Tag("<text>")]
    | Annotated[list[Item], Field(fail_fast=True, min_length=1), Tag("<list>")],
    text_or_list_of("items"),
]


class TextConfig(BaseModel):
    """Format of the answer's text; a chat checks it as its `response_format`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    format: Annotated[dict[str, Any], Echoed] | None = None
    verbosity: Any = None

    def chat_format(self) -> dict[str, Any] | None:
        """Return the format as a chat has it."""
        if self.format is None or self.format.get("type") != "json_schema":
            return self.format
        schema = {name: value for name, value in self.format.items() if name != "type"}
        return {"type": "json_schema", "json_schema": schema}


class ReasoningConfig(BaseModel):
    """Effort of the reasoning; answers have its text, so a `summary` has no effect."""

    model_config = ConfigDict(extra="ignore", strict=True)

    effort: Any = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(BaseModel):
    """The body of a request to `/v1/responses`.

    Fields that are not OpenAI's, such as `top_k`, have the meaning that they have in a chat.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    input: Input
    instructions: Text | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True), Echoed] | None = None
    tool_choice: Annotated[Any, Echoed] = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[Include], Field(fail_fast=True)] | None = None
    top_logprobs: NumLogprobs | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: ServiceTier | None = None
    temperature: Any = None
    top_p: Any = None

    _chat: ChatCompletionRequest = PrivateAttr()
    _messages: ChatMessages = PrivateAttr()

    @model_validator(mode="after")
    def _translate(self) -> Self:
        extra = self.__pydantic_extra__ or {}
        for name, own in _CHAT_NAMES.items():
            if extra.get(name) is not None:
                hint = f"use `{own}`" if own else "remove it"
                raise RequestError(
                    f"`{name}` is not a parameter of /v1/responses: {hint}.",
                    param=name,
                    code="unsupported_parameter",
                )
        self._messages = ChatMessages(self.instructions, self.input)
        if not self._messages.messages:
            raise RequestError("`input` must contain a message.", param="input")
        text, reasoning = self.text or TextConfig(), self.reasoning or ReasoningConfig()
        body = {
            **{name: value for name, value in extra.items() if name not in _CHAT_NAMES},
            "model": self.model,
            "messages": self._messages.messages,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": text.chat_format(),
            "verbosity": text.verbosity,
            "reasoning_effort": reasoning.effort,
            "tools": [*starmap(_chat_tool, enumerate(self.tools))] if self.tools else None,
            "tool_choice": _chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "logprobs": self.shows_logprobs or None,
            "top_logprobs": (self.top_logprobs or None) if self.shows_logprobs else None,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        body = {name: value for name, value in body.items() if value is not None}
        with self.own_names():
            refuse_unsupported(body, CHAT)
            self._chat = parse(ChatCompletionRequest, body)
        return self

    @property
    def chat(self) -> ChatCompletionRequest:
        """Return the chat that answers the request."""
        return self._chat

    @property
    def shows_logprobs(self) -> bool:
        """Say whether the answer has log-probabilities."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    @contextmanager
    def own_names(self) -> Iterator[None]:
        """Replace a chat's parameters in errors with the ones of this body."""
        try:
            yield
        except RequestError as error:
            if error.param is not None:
                own = self._own_param(error.param)
                message = error.message.replace(f"`{error.param}`", f"`{own}`")
                message = _OTHERS.sub("", message)  # with the names of a chat
                error.message = message.replace(_CHAT_CHOICE, _OWN_CHOICE)
                error.param = own
            raise

    @property
    def custom_tools(self) -> frozenset[str]:
        """Return the names of the custom tools."""
        tools = [tool for tool in self.tools or () if tool["type"] == "custom"]
        return frozenset(tool["name"] for tool in tools)

    def _own_param(self, param: str) -> str:
        found = _PARAMETERS.match(param)
        if found and self.tools and self.tools[int(found[1])]["type"] == "custom":
            return f"tools.{found[1]}.format.definition"
        param = self._messages.place_of(param)
        for pattern, own in _OWN_PARAMS:
            param = pattern.sub(own, param)
        return param

    def images(self) -> list[PlacedImage]:
        """Return the images, documents and recordings of messages and outputs."""
        return [
            PlacedImage(
                f"input.{index}.{name}.{place}",
                part.image_url if isinstance(part, ImagePart) else part.url,
                part.pages if isinstance(part, FilePart) else None,
                is_document=isinstance(part, FilePart),
                is_recording=isinstance(part, InputAudioPart),
            )
            for index, item in enumerate(self.input if isinstance(self.input, list) else ())
            for name in ("content", "output")
            if isinstance(parts := getattr(item, name, None), list)
            for place, part in enumerate(parts)
            if isinstance(part, ImagePart | FilePart | InputAudioPart)
        ]


def _chat_tool(place: int, tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if kind == "custom":
        return {"type": "function", "function": chat_function(place, tool)}
    if kind != "function":
        param = f"tools.{place}.type"
        raise RequestError(
            f"`{param}` must be 'function' or 'custom': other tools are not supported; got"
            f" {short_repr(kind)}.",
            param=param,
        )
    function = {name: value for name, value in tool.items() if name != "type"}
    return {"type": "function", "function": function}


def _chat_choice(choice: Any) -> Any:
    """Return a tool choice in the form of a chat."""
    if isinstance(choice, dict) and isinstance(choice.get("tools"), list):
        return {**choice, "tools": [*map(_named_tool, choice["tools"])]}
    return _named_tool(choice)


def _named_tool(tool: Any) -> Any:
    if isinstance(tool, dict) and tool.get("type") in ("function", "custom"):
        return {"type": "function", "function": {"name": tool.get("name")}}
    return tool
