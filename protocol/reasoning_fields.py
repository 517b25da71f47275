"""Fields of messages and deltas with reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

REASONING_FIELDS: Final = ("reasoning", "reasoning_content")
"""Response fields with reasoning: vLLM's name, and its old name, which SGLang uses."""

ReasoningField = Literal["both", "reasoning", "reasoning_content"]


def reasoning_fields(name: ReasoningField) -> tuple[str, ...]:
    """Return the names of the response fields with reasoning."""
    return REASONING_FIELDS if name == "both" else (name,)


def reasoning_of(message: Mapping[str, Any]) -> str | None:
    """Return the reasoning of an answer's message or delta, under either name."""
    return message.get("reasoning") or message.get("reasoning_content")
