"""What response bodies share: their frame, an id that the line alone decides, and the usage."""

from __future__ import annotations

from typing import Any, Literal

from engine.protocol.errors import RequestError


def response_id(prefix: str, request_id: str) -> str:
    """Return the id of a response body, the same in every run of the same line."""
    return f"{prefix}-{request_id.removeprefix('req_')}"


def usage_body(
    prompt_tokens: int, completion_tokens: int, *, reasoning_tokens: int | None = None
) -> dict[str, Any]:
    """Return the usage object of a row; `reasoning_tokens` None is for a model that does not think.

    Tokens found in the KV cache are not counted apart: they depend on what else ran, and a row
    must not.
    """
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return usage


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
    """Return what every chunk of a streamed body says; its choices are still to come."""
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
