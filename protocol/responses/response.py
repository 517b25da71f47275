"""The response body of `/v1/responses`, and its output items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from .request import ResponsesRequest

TRUNCATED = "max_output_tokens"
"""Reason of an incomplete response that reached its token limit."""

_ERROR_CODES: Final = {429: "rate_limit_exceeded"}


def response_id(request_id: str) -> str:
    """Return the ID of a response, the same in every run of the same line."""
    return f"resp_{request_id.removeprefix('req_')}"


def response_body(
    request: ResponsesRequest, request_id: str, *, created: int, model: str
) -> dict[str, Any]:
    """Return a response without output; `created` is in seconds since the epoch."""
    text, reasoning = request.text, request.reasoning
    return {
        "id": response_id(request_id),
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


def failed_body(body: Mapping[str, Any], error: Mapping[str, Any], status: int) -> dict[str, Any]:
    """Return a response that failed with an error of this HTTP status; its code is OpenAI's."""
    code = _ERROR_CODES.get(status, "invalid_prompt" if status < 500 else "server_error")
    return {**body, "status": "failed", "error": {"code": code, "message": error["message"]}}


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
