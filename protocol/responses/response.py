"""The response body of `/v1/responses`, and its output items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .request import ResponsesRequest

TRUNCATED = "max_output_tokens"
"""Reason of an incomplete response that reached its token limit."""


def response_body(
    request: ResponsesRequest, body_id: str, *, created: int, model: str
) -> dict[str, Any]:
    """Return a response without output; `created` is in seconds since the epoch."""
    text, reasoning = request.text, request.reasoning
    return {
        "id": body_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {
            "effort": reasoning and reasoning.effort,
            "summary": reasoning and reasoning.summary,
        },
        "service_tier": request.service_tier or "default",
        "store": False,
        "temperature": request.temperature,
        "text": {
            "format": (text and text.format) or {"type": "text"},
            "verbosity": text and text.verbosity,
        },
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def ended_body(
    body: Mapping[str, Any],
    output: Sequence[Mapping[str, Any]],
    usage: Mapping[str, Any],
    *,
    is_truncated: bool,
) -> dict[str, Any]:
    """Return a response with its output items and the usage of its chat."""
    inputs, outputs = (usage.get(f"{kind}_tokens_details") for kind in ("prompt", "completion"))
    return {
        **body,
        "status": "incomplete" if is_truncated else "completed",
        "incomplete_details": {"reason": TRUNCATED} if is_truncated else None,
        "output": [*output],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            # OpenAI's clients require these fields.
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0, **(inputs or {})},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0, **(outputs or {})},
            "total_tokens": usage["total_tokens"],
        },
    }


class OutputItems:
    """Output items of one response, with IDs that are the same in every run of the same line."""

    def __init__(self, name: str) -> None:
        """Create items of the response with this name, which is part of their IDs."""
        self._name = name
        self.items: list[dict[str, Any]] = []

    def reasoning(self) -> dict[str, Any]:
        """Add reasoning without text."""
        return self._add("rs", {"type": "reasoning", "summary": [], "content": []})

    def message(self) -> dict[str, Any]:
        """Add a message without text."""
        return self._add("msg", {"type": "message", "role": "assistant", "content": []})

    def call(self, call_id: str, function: str) -> dict[str, Any]:
        """Add a function call without arguments."""
        call = {"type": "function_call", "call_id": call_id, "name": function, "arguments": ""}
        return self._add("fc", call)

    def _add(self, prefix: str, fields: dict[str, Any]) -> dict[str, Any]:
        item = {"id": f"{prefix}_{self._name}_{len(self.items)}", **fields, "status": "in_progress"}
        self.items.append(item)
        return item


def text_part(text: str = "") -> dict[str, Any]:
    """Return a part of a message, whose log-probabilities follow it."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def reasoning_part(text: str = "") -> dict[str, Any]:
    """Return a part of reasoning."""
    return {"type": "reasoning_text", "text": text}


def items_of(name: str, choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the output items of a chat's choice."""
    output, message = OutputItems(name), choice["message"]
    if message.get("reasoning"):
        output.reasoning()["content"].append(reasoning_part(message["reasoning"]))
    if message.get("content") is not None:
        part = text_part(message["content"])
        part["logprobs"] = (choice.get("logprobs") or {}).get("content") or []
        output.message()["content"].append(part)
    for call in message.get("tool_calls") or ():
        function = call["function"]
        output.call(call["id"], function["name"])["arguments"] = function["arguments"]
    for item in output.items:
        item["status"] = "completed"
    if choice["finish_reason"] == "length" and output.items:
        output.items[-1]["status"] = "incomplete"
    return output.items
