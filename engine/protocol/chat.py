"""Chat completions on the wire: the request's body, and the body that answers it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from engine.protocol.errors import RequestError
from engine.protocol.fields import MAX_TOP_LOGPROBS, Count, GenerationRequest, Text, Whole

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# What a template is called with by us, and what its renderer takes as its own parameters.
_RESERVED_TEMPLATE_NAMES = frozenset(
    "add_generation_prompt chat_template continue_final_message conversation conversations"
    " documents max_length messages padding return_assistant_tokens_mask return_dict return_tensors"
    " sanitize_control_tokens self tokenize tokenizer_kwargs tools truncation".split()
)


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


def free_names(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return variables of a template; ValueError where one is the request's or the renderer's."""
    taken = sorted(kwargs.keys() & _RESERVED_TEMPLATE_NAMES)
    if taken:
        raise ValueError(f"must not set `{taken[0]}`, which the request sets itself")
    return kwargs


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


class ChatCompletionRequest(GenerationRequest):
    """The body of a request to `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]

    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Count, Field(le=MAX_TOP_LOGPROBS)] | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(free_names)] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: ReasoningEffort | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Refuse parameters that contradict each other."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "`continue_final_message` and `add_generation_prompt` exclude each other: one goes"
                " on with the last message, the other opens a new one.",
                param="continue_final_message",
            )
        asked = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(asked) > 1:
            raise RequestError(
                "`max_tokens` and `max_completion_tokens` differ; send one of them.",
                param="max_completion_tokens",
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives asked for at each token; None when no log-probabilities are."""
        return (self.top_logprobs or 0) if self.logprobs else None


def chat_choice(
    index: int,
    content: str,
    *,
    logprobs: dict[str, Any] | None,
    finish_reason: str,
    stop_reason: int | str | None,
) -> dict[str, Any]:
    """Return one choice of a chat completion."""
    return {
        "index": index,
        "message": {"role": "assistant", "content": content, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }
