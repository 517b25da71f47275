"""Prompts: text or token IDs, one or many, in any of the four forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from .chat import ChatCompletionRequest
from .decisions.questions import MAX_ORDERS
from .fields import MAX_CHOICES, Count, Text, encodable, fault

MAX_PROMPTS = 2_048
_SLICE_ITEMS = 100_000

# Fields of all endpoints with a list of about one sequence per item.
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

_FORMS = "must be a string, a list of strings, a list of token IDs or a list of such lists"

_FORMS_OF_ITEM = "must be a string, a token ID or a list of token IDs"
_ITEMS: dict[type, str] = {str: "a string", int: "a token ID", list: "a list of token IDs"}

Prompt = str | list[int]


def _prompts(value: object) -> list[Prompt]:
    """Return the prompts as a list, from any of the four forms."""
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


def num_sequences(body: Mapping[str, Any]) -> int:
    """Return an estimate of the number of sequences of a body, valid or not."""
    count = 1
    for name in _LISTS:
        value = body.get(name)
        if isinstance(value, list) and value and not isinstance(value[0], int):
            count = max(count, len(value))
    questions, orders = body.get("questions"), body.get("debias")
    if isinstance(questions, (list, dict)):
        num_orders = orders if isinstance(orders, int) and 0 < orders <= MAX_ORDERS else 1
        count = max(count, len(questions) * num_orders)
    num_choices = body.get("n")
    if isinstance(num_choices, int) and 0 < num_choices <= MAX_CHOICES:
        return count * num_choices
    return count


def _prompt(value: object) -> Prompt:
    """Return one prompt."""
    prompts = _prompts(value)
    if len(prompts) > 1:
        raise ValueError("must be one string or one list of token IDs")
    return prompts[0]


OnePrompt = Annotated[Prompt, PlainValidator(_prompt)]
Prompts = Annotated[list[Prompt], PlainValidator(_prompts)]


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
