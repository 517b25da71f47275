"""Response bodies: common fields, an ID derived from the line, usage and errors."""

from __future__ import annotations

from typing import Any, Literal

from .errors import RequestError


def response_id(prefix: str, request_id: str) -> str:
    """Return the ID of a response body, the same in every run of the same line."""
    return f"{prefix}-{request_id.removeprefix('req_')}"


def usage_body(
    prompt_tokens: int,
    completion_tokens: int,
    *,
    reasoning_tokens: int | None = None,
    cached_tokens: int | None = None,
) -> dict[str, Any]:
    """Return the usage object of a row; `reasoning_tokens` is None for a model without reasoning.

    `cached_tokens` are listed only on request, because they depend on other requests.
    """
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    if reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return usage


def list_body(
    body_id: str,
    *,
    created: int,
    model: str,
    data: list[dict[str, Any]],
    num_tokens: int,
    **more: Any,
) -> dict[str, Any]:
    """Return the response body of an endpoint with an item per input; `more` precedes the items."""
    return {
        "id": body_id,
        "object": "list",
        "created": created,
        "model": model,
        **more,
        "data": data,
        "usage": usage_body(num_tokens, 0),
    }


def completion_body(
    kind: Literal["chat.completion", "text_completion"],
    body_id: str,
    *,
    created: int,
    model: str,
    choices: list[dict[str, Any]],
    usage: dict[str, Any],
) -> dict[str, Any]:
    """Return a response body of either endpoint; `created` is in seconds since the epoch."""
    return {
        "id": body_id,
        "object": kind,
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage,
        "system_fingerprint": None,
    }


def chunk_body(
    kind: Literal["chat.completion.chunk", "text_completion"],
    body_id: str,
    *,
    created: int,
    model: str,
) -> dict[str, Any]:
    """Return the common fields of every chunk of a stream, without its choices."""
    return {
        "id": body_id,
        "object": kind,
        "created": created,
        "model": model,
        "choices": [],
        "system_fingerprint": None,
    }


def error_body(error: RequestError) -> dict[str, Any]:
    """Return the body of a failed request: `{"error": {message, type, param, code}}`."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }
