"""Prompts: text or token IDs, one or many, in any of the four forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from .chat import ChatCompletionRequest
from .fields import Count, Text, empty, encodable, fault

MAX_PROMPTS = 2_048
_SLICE_ITEMS = 100_000

_FORMS = "must be a string, a list of strings, a list of token IDs or a list of such lists"

_FORMS_OF_ITEM = "must be a string, a token ID or a list of token IDs"
_ITEMS: dict[type, str] = {str: "a string", int: "a token ID", list: "a list of token IDs"}

Prompt = str | list[int]


def prompts_of(value: object) -> list[Prompt]:
    """Return the prompts as a list, from any of the four forms; raise ValueError for another."""
    if isinstance(value, str):
        return [_checked(value)]
    if not isinstance(value, list):
        # Of the two, pydantic only handles ValueError as invalid input.
        raise ValueError(_FORMS)  # noqa: TRY004
    if _are_all(value, int):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"must not have more than {MAX_PROMPTS:,} prompts: split the request")
    if not value:
        raise empty()
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
    """Refuse a list with an item of a different type."""
    if _are_all(items, kind):
        return
    index = next(index for index, item in enumerate(items) if type(item) is not kind)
    message = f"must be {_ITEMS[kind]}{', like the first item' if index else ''}"
    raise fault((*places, index), message, items[index])


def _are_all(items: Sequence[object], kind: type) -> bool:
    """Say whether there are items, all of this type; other threads run between the slices."""
    slices = range(0, len(items), _SLICE_ITEMS)
    return bool(items) and all(
        set(map(type, items[start : start + _SLICE_ITEMS])) == {kind} for start in slices
    )


def _prompt(value: object) -> Prompt:
    """Return one prompt."""
    prompts = prompts_of(value)
    if len(prompts) > 1:
        raise ValueError("must be one string or one list of token IDs")
    return prompts[0]


OnePrompt = Annotated[Prompt, PlainValidator(_prompt)]
Prompts = Annotated[list[Prompt], PlainValidator(prompts_of)]


MAX_TOKENS = 2**20
MAX_TEXT_CHARS = 4 * 2**20


class TokenizeTextRequest(BaseModel):
    """Request to tokenize a text; unknown fields are ignored, null fields are unset."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    prompt: Annotated[Text, Field(max_length=MAX_TEXT_CHARS)]
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatCompletionRequest):
    """Request to tokenize a conversation as `/v1/chat/completions` would render it."""

    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """Request to detokenize tokens."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    tokens: Annotated[list[Count], Field(fail_fast=True, max_length=MAX_TOKENS)]
