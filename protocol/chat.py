"""Chat completions: the request body and the response body."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from .constraints.request import CONSTRAINT_FIELDS, ConstrainedRequest
from .custom_tools import input_of
from .errors import RequestError
from .fields import NumLogprobs, Whole
from .messages import Message
from .reasoning_fields import REASONING_FIELDS
from .tools import ToolFields

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# Variables that we pass to a template, and parameters of its renderer.
_RESERVED_TEMPLATE_NAMES = frozenset(
    "add_generation_prompt chat_template continue_final_message conversation conversations"
    " documents max_length messages padding return_assistant_tokens_mask return_dict return_tensors"
    " sanitize_control_tokens self tokenize tokenizer_kwargs tools truncation".split()
)


def free_names(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return template variables; ValueError if one is reserved for the request or the renderer."""
    forbidden = sorted(kwargs.keys() & _RESERVED_TEMPLATE_NAMES)
    if forbidden:
        raise ValueError(f"must not set `{forbidden[0]}`, which is reserved")
    return kwargs


class ChatCompletionRequest(ToolFields, ConstrainedRequest):
    """The body of a request to `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]

    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(free_names)] | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    thinking_token_budget: Annotated[Whole, Field(ge=-1)] | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Refuse parameters that contradict each other, and unsupported constraints and tools."""
        if not self.model_fields_set.isdisjoint(CONSTRAINT_FIELDS):
            self.parse_constraint()
        if self.tools or self.tool_choice is not None:
            self.check_tools()
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                "`top_logprobs` requires `logprobs` to be true.", param="top_logprobs"
            )
        if self.logprob_token_ids and not self.logprobs:
            raise RequestError(
                "`logprob_token_ids` requires `logprobs` to be true.", param="logprob_token_ids"
            )
        if self.logprob_start_len is not None and self.prompt_logprobs is None:
            raise RequestError(
                "`logprob_start_len` requires `prompt_logprobs`.", param="logprob_start_len"
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "`continue_final_message` and `add_generation_prompt` cannot both be true: one"
                " continues the last message, the other starts a new one.",
                param="continue_final_message",
            )
        if self.continue_final_message and self.messages[-1].content is None:
            raise RequestError(
                "`continue_final_message` requires a last message with content.",
                param="continue_final_message",
            )
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise RequestError(
                "`max_tokens` and `max_completion_tokens` differ: send only one of them.",
                param="max_completion_tokens",
            )
        return self

    @property
    def constrains_calls(self) -> bool:
        """Say whether a grammar governs the tool calls in the answers."""
        tools = self.callable_tools
        must_hold = self.output_constraint is not None or self.needs_call
        return bool(tools) and (must_hold or any(tool.function.strict for tool in tools))

    @property
    def is_constrained(self) -> bool:
        """Say whether a constraint governs the answers or their tool calls."""
        return self._constraint is not None or (bool(self.tools) and self.constrains_calls)

    @property
    def num_logprobs(self) -> int | None:
        """Number of top log-probabilities at each token; None if none are requested."""
        return (self.top_logprobs or 0) if self.logprobs else None


def message_body(
    content: str,
    *,
    reasoning: str | None,
    fields: Sequence[str] = REASONING_FIELDS,
    calls: Sequence[tuple[str, str, str]],
    custom_tools: Collection[str] = (),
) -> dict[str, Any]:
    """Return an assistant's message; `calls` are IDs, names and arguments.

    Calls of `custom_tools` have an input instead.

    Content is null if there are only calls or reasoning. `reasoning` is None for a model without
    reasoning, or if the request excludes it: the first of its `fields` is then null, as vLLM's
    always is, and the other one is left out.
    """
    is_silent = not content and bool(calls or reasoning)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if is_silent else content,
        "refusal": None,
        fields[0]: None,
    }
    if reasoning is not None:
        message |= dict.fromkeys(fields, reasoning or None)
    if calls:
        message["tool_calls"] = [
            {"id": call_id, **_called(name, arguments, is_custom=name in custom_tools)}
            for call_id, name, arguments in calls
        ]
    return message


def _called(name: str, arguments: str, *, is_custom: bool) -> dict[str, Any]:
    if is_custom:
        return {"type": "custom", "custom": {"name": name, "input": input_of(arguments)}}
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def chat_choice(
    index: int,
    message: dict[str, Any],
    *,
    as_field: Literal["message", "delta"] = "message",
    logprobs: dict[str, Any] | None,
    finish_reason: str | None,
    stop_reason: int | str | None,
    warnings: Sequence[str] = (),
) -> dict[str, Any]:
    """Return one choice of a chat completion, or of a chunk, which has a delta.

    `warnings` is an extension to OpenAI's API.
    """
    choice = {
        "index": index,
        as_field: message,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }
    return {**choice, "warnings": list(warnings)} if warnings else choice
