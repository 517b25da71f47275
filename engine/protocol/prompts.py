"""Texts and token ids as a body lists them: one or many, in any of four forms."""

from __future__ import annotations

from typing import Annotated

from pydantic import PlainValidator

from engine.protocol.fields import encodable

MAX_PROMPTS = 2_048

_FORMS = "must be a string, a list of strings, a list of token ids or a list of such lists"

Prompt = str | list[int]


def _prompts(value: object) -> list[Prompt]:
    """Return the prompts one by one, whichever of the four forms they came in."""
    if isinstance(value, str):
        return [_checked(value)]
    if not isinstance(value, list):
        # Of the two, pydantic takes only ValueError for a fault of the input.
        raise ValueError(_FORMS)  # noqa: TRY004
    kinds = set(map(type, value))
    if kinds == {int}:
        return [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"must not hold more than {MAX_PROMPTS:,} of them; use more lines")
    if kinds not in ({str}, {list}):
        raise ValueError(_FORMS if value else "must not be empty")
    return [_checked(item) for item in value]


def _checked(prompt: Prompt) -> Prompt:
    if not prompt:
        raise ValueError("must not be empty")
    if isinstance(prompt, str):
        return encodable(prompt)
    if set(map(type, prompt)) != {int}:
        raise ValueError(_FORMS)
    return prompt


Prompts = Annotated[list[Prompt], PlainValidator(_prompts)]
