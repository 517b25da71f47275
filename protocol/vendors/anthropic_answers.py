"""Anthropic's Messages API: answers of chats as messages, and errors in its form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import from_json

from ..reasoning_fields import reasoning_of

_STOP_REASONS: Final = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_INTERNAL_CODES: Final = ("internal", "internal_error")


def message_of_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message of a chat completion."""
    choice = body["choices"][0]
    content = _content(choice["message"])
    return {
        "id": message_id(body["id"]),
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": content,
        **stop_fields(choice, has_calls=any(block["type"] == "tool_use" for block in content)),
        "usage": message_usage(body.get("usage") or {}),
    }


def message_id(completion_id: str) -> str:
    """Return the ID of a message, the same in every run of the same request."""
    return f"msg_{completion_id.rpartition('-')[2]}"


def stop_fields(choice: Mapping[str, Any], *, has_calls: bool) -> dict[str, Any]:
    """Return the stop reason and the stop sequence of a choice with valid calls, or without."""
    sequence = choice.get("stop_reason")
    if isinstance(sequence, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    reason = choice["finish_reason"]
    if reason == "tool_calls" and not has_calls:
        reason = "stop"
    return {"stop_reason": _STOP_REASONS.get(reason, reason), "stop_sequence": None}


def message_usage(usage: Mapping[str, Any]) -> dict[str, int]:
    """Return the usage, whose input tokens do not include the cached ones."""
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") or 0
    return {
        "input_tokens": usage.get("prompt_tokens", 0) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.get("completion_tokens", 0),
    }


def message_error(status_code: int, message: str, request_id: str | None = None) -> dict[str, Any]:
    """Return an error in Anthropic's form."""
    kind = _ERROR_TYPES.get(status_code)
    if kind is None:
        kind = "invalid_request_error" if status_code < 500 else "api_error"
    error = {"type": kind, "message": message}
    return {"type": "error", "error": error, "request_id": request_id}


def streamed_error(error: Mapping[str, Any]) -> dict[str, Any]:
    """Return the event of an error within a stream, which has OpenAI's type and no status."""
    kind, message = error.get("type"), error["message"]
    status_code = next((code for code, name in _ERROR_TYPES.items() if name == kind), 500)
    if kind == "server_error" and error.get("code") not in _INTERNAL_CODES:
        status_code = 503  # the engine has failed
    return message_error(status_code, message)


def arguments_of(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call; None if they are not a complete JSON object."""
    try:
        arguments = from_json(text or "{}", allow_inf_nan=False)
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None


def call_text(name: str, arguments: str) -> str:
    """Return a call with invalid arguments as text: vendors' calls contain an object."""
    return f"{name} {arguments}"


def _content(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = []
    if reasoning := reasoning_of(message):
        content.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if text := message.get("content"):
        content.append({"type": "text", "text": text})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        name, arguments = function["name"], arguments_of(function["arguments"])
        if arguments is None:
            content.append({"type": "text", "text": call_text(name, function["arguments"])})
        else:
            content.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    return content
