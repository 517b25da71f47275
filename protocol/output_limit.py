"""Output limit: the maximum number of tokens in all answers of one body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

UNTOLD_TOKENS: Final = 512
"""Estimate for a body without a limit, while nothing is known about its answers."""

_WRITING: Final = frozenset({"messages", "prompt", "file"})


def max_output_tokens(body: Mapping[str, Any]) -> int | None:
    """Return the maximum number of tokens in all answers of a body; None without a limit.

    It is 0 for vectors and scores, which have no output.
    """
    if _WRITING.isdisjoint(body):
        return 0
    most = body.get("max_completion_tokens")
    most = body.get("max_tokens") if most is None else most
    if not isinstance(most, int) or most < 0:
        return None
    prompts, num_choices = body.get("prompt"), body.get("n")
    is_list = isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int)
    num_answers = len(prompts) if is_list and prompts is not None else 1
    num_answers *= num_choices if isinstance(num_choices, int) and num_choices > 0 else 1
    return most * num_answers
