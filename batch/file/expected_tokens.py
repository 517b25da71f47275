"""Expected tokens: what lines are taken to read and write while nothing has run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tidemill.protocol.output_limit import UNTOLD_TOKENS, max_output_tokens

PREFILL_SHARE: Final = 1 / 8
"""Cost of a token of a prompt in generated ones."""

BYTES_A_TOKEN: Final = 4
# Longer lines hold images or sound, whose bytes are no text.
_MAX_TEXT_BYTES: Final = 2**17
# Nobody writes more, whatever a line asks for, and a table holds the sum of all.
_MAX_OUTPUT: Final = 2**20


@dataclass(frozen=True, slots=True)
class ExpectedTokens:
    """Tokens of prompts, by their bytes, and those that answers may have at most."""

    input: int = 0
    output: int = 0

    def __add__(self, other: ExpectedTokens) -> ExpectedTokens:
        """Return the sum."""
        return ExpectedTokens(self.input + other.input, self.output + other.output)

    def __sub__(self, other: ExpectedTokens) -> ExpectedTokens:
        """Return what is left, never less than nothing."""
        return ExpectedTokens(max(0, self.input - other.input), max(0, self.output - other.output))

    @property
    def work(self) -> float:
        """Return what they cost, in generated tokens."""
        return work_of(self.input, self.output)


NO_TOKENS: Final = ExpectedTokens()


def work_of(input_tokens: float, output_tokens: float) -> float:
    """Return what tokens cost, in generated ones."""
    return PREFILL_SHARE * input_tokens + output_tokens


def expected_tokens(body: Mapping[str, Any], num_bytes: int) -> ExpectedTokens:
    """Return what a line of so many bytes is expected to take."""
    most = max_output_tokens(body)
    num_read = max(1, min(num_bytes, _MAX_TEXT_BYTES) // BYTES_A_TOKEN)
    return ExpectedTokens(num_read, UNTOLD_TOKENS if most is None else min(most, _MAX_OUTPUT))
