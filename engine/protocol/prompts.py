"""Texts and token ids as a body lists them: one or many, in any of four forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import PlainValidator

from engine.protocol.fields import MAX_CHOICES, encodable, fault

MAX_PROMPTS = 2_048

# What each endpoint lists, an item a sequence, or about as many.
_LISTS = (
    "prompt",
    "input",
    "documents",
    "text_1",
    "text_2",
    "data_1",
    "data_2",
    "queries",
    "items",
)

_FORMS = "must be a string, a list of strings, a list of token ids or a list of such lists"

_FORMS_OF_ITEM = "must be a string, a token id or a list of token ids"
_ITEMS: dict[type, str] = {str: "a string", int: "a token id", list: "a list of token ids"}

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
    if not value:
        raise ValueError("must not be empty")
    first = type(value[0])
    if first not in _ITEMS:
        raise fault((0,), _FORMS_OF_ITEM, value[0])
    _same(value, first)
    return [_checked(item, index) for index, item in enumerate(value)]


def _checked(prompt: Prompt, *places: int) -> Prompt:
    if not prompt:
        raise fault(places, "must not be empty", prompt)
    if isinstance(prompt, list):
        _same(prompt, int, *places)
        return prompt
    try:
        return encodable(prompt)
    except ValueError as exc:
        raise fault(places, str(exc), prompt) from None


def _same(items: Sequence[object], kind: type, *places: int) -> None:
    """Refuse a list in which one item is of another kind."""
    if set(map(type, items)) == {kind}:
        return
    index = next(index for index, item in enumerate(items) if type(item) is not kind)
    told = f"must be {_ITEMS[kind]}{', as the first item is' if index else ''}"
    raise fault((*places, index), told, items[index])


def num_sequences(body: Mapping[str, Any]) -> int:
    """Return about how many sequences a body asks for, whatever it is; nothing is checked."""
    count = 1
    for name in _LISTS:
        value = body.get(name)
        if isinstance(value, list) and value and not isinstance(value[0], int):
            count = max(count, len(value))
    num_choices = body.get("n")
    if isinstance(num_choices, int) and 0 < num_choices <= MAX_CHOICES:
        return count * num_choices
    return count


Prompts = Annotated[list[Prompt], PlainValidator(_prompts)]
