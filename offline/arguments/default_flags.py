"""Flags of default parameters, for lines that do not set them."""

from __future__ import annotations

import argparse

from .argument_types import nonblank_text, positive_int, temperature
from .defaults import MAX_TOKENS, SYSTEM_PROMPT, TEMPERATURE, Defaults


def add_default_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags of default parameters."""
    add = group.add_argument
    add(
        "--temperature",
        type=temperature,
        metavar="T",
        help="set the sampling temperature; 0 is greedy",
    )
    add("--max-tokens", type=positive_int, metavar="N", help="limit the tokens of an answer")
    add(
        "--system-prompt",
        type=nonblank_text,
        metavar="TEXT",
        help="add this message to conversations without a system or developer message",
    )


def default_arguments(defaults: Defaults) -> list[str]:
    """Return the defaults as command-line flags for another process."""
    given = {
        TEMPERATURE: defaults.temperature,
        MAX_TOKENS: defaults.max_tokens,
        SYSTEM_PROMPT: defaults.system_prompt,
    }
    return [f"{flag}={value}" for flag, value in given.items() if value is not None]


def defaults_of(arguments: argparse.Namespace) -> Defaults:
    """Return the defaults of the parsed arguments."""
    return Defaults(arguments.temperature, arguments.max_tokens, arguments.system_prompt)
