"""Expected tokens: an estimate of the tokens that lines read and write, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tidemill.protocol import routes

PREFILL_SHARE: Final = 1 / 8
"""Cost of a prompt token, in generated tokens."""

UNTOLD_TOKENS: Final = 512
"""Estimate for a body without a limit, while nothing is known about its answers."""

BYTES_A_TOKEN: Final = 4
# Longer lines contain images or audio, whose bytes are not text.
_MAX_TEXT_BYTES: Final = 2**17
# A practical limit whatever a line requests, because a table stores the sum over all lines.
_MAX_OUTPUT: Final = 2**20
_READING: Final = (
    *(routes.EMBEDDINGS, routes.COHERE_EMBED, routes.SCORE, routes.RERANK),
    *(
        routes.GENERATIVE_SCORING,
        routes.DECISIONS,
        routes.SYSTEM_ONE,
        routes.CLASSIFY,
        routes.MODERATIONS,
        routes.POOLING,
    ),
)


@dataclass(frozen=True, slots=True)
class ExpectedTokens:
    """Prompt tokens, estimated from bytes, and the maximum of output tokens."""

    input: int = 0
    output: int = 0

    def __add__(self, other: ExpectedTokens) -> ExpectedTokens:
        """Return the sum."""
        return ExpectedTokens(self.input + other.input, self.output + other.output)

    def __sub__(self, other: ExpectedTokens) -> ExpectedTokens:
        """Return the rest, never negative."""
        return ExpectedTokens(max(0, self.input - other.input), max(0, self.output - other.output))

    @property
    def work(self) -> float:
        """Return their cost, in generated tokens."""
        return work_of(self.input, self.output)


NO_TOKENS: Final = ExpectedTokens()


def work_of(input_tokens: float, output_tokens: float) -> float:
    """Return the cost of tokens, in generated tokens."""
    return PREFILL_SHARE * input_tokens + output_tokens


def max_output_tokens(url: str, body: Mapping[str, Any]) -> int | None:
    """Return the maximum number of tokens in all answers of a request; None without a limit.

    It is 0 for vectors, scores and probabilities, which have no output.
    """
    if routes.find_route(url) in _READING and body.get("decide_by") != "chat":
        return 0
    names = ("max_completion_tokens", "max_output_tokens", "max_tokens")
    most = next((body[name] for name in names if body.get(name) is not None), None)
    if not isinstance(most, int) or most < 0:
        return None
    prompts, num_choices = body.get("prompt"), body.get("n")
    is_list = isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int)
    num_answers = len(prompts) if is_list and prompts is not None else 1
    num_answers *= num_choices if isinstance(num_choices, int) and num_choices > 0 else 1
    return most * num_answers


def expected_tokens(url: str, body: Mapping[str, Any], num_bytes: int) -> ExpectedTokens:
    """Return the expected tokens of a line with this number of bytes."""
    most = max_output_tokens(url, body)
    num_read = max(1, min(num_bytes, _MAX_TEXT_BYTES) // BYTES_A_TOKEN)
    return ExpectedTokens(num_read, UNTOLD_TOKENS if most is None else min(most, _MAX_OUTPUT))
