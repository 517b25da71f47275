"""What every response body shares: an id that its line alone decides, and the usage object."""

from __future__ import annotations


def response_id(prefix: str, request_id: str) -> str:
    """Return the id of a response body, the same in every run of the same line."""
    return f"{prefix}-{request_id.removeprefix('req_')}"


def usage_body(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return the usage object of a row.

    Tokens found in the KV cache are not counted apart: they depend on what else ran, and a row
    must not.
    """
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
