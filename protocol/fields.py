"""Sampling and generation parameters that chat and text completions share, and their types.

Every field may be null, which is the same as leaving it out. Types are strict: `"5"` is not a
number and `1` is not a boolean; only `16.0` is accepted as 16, because spreadsheets and data
frames write integers that way.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Literal, Self, cast

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

MAX_CHOICES = 128
_MAX_STOP_STRINGS = 64
_MAX_STOP_PATTERNS = 16
_MAX_STOP_CHARS = 1_000
_MAX_STOP_TOKENS = 1_000
_MAX_TOKEN_DIGITS = 10
_MAX_BAD_WORDS = 1_000
_MAX_ALLOWED_TOKENS = 2**19  # more than any vocabulary has
MAX_NAMED_TOKENS = 128
_SLICE_ITEMS = 1_000
_MAX_PATTERN = 1_000
_MAX_FIELDS = 100
_LEAST_REPEATS = 2
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
MAX_PRIORITY = 2**31 - 1


def _whole(value: object) -> object:
    return int(value) if type(value) is float and value.is_integer() else value


def encodable(text: str) -> str:
    """Return the text, or raise ValueError if UTF-8 cannot encode it."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("must be valid Unicode, without lone surrogates") from None
    return text


def text_or_list_of(items: str) -> Discriminator:
    """Return the discriminator of a text, tag `<text>`, and a list of these items, tag `<list>`."""
    return Discriminator(
        _form_of_text_or_list,
        custom_error_type="text_or_list",
        custom_error_message=f"Input should be a string or a list of {items}",
    )


def _form_of_text_or_list(value: object) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<list>" if isinstance(value, list) else None


def empty() -> PydanticCustomError:
    """Return the error of an empty value, as pydantic's own."""
    return PydanticCustomError("too_short", "must not be empty")


def fault(places: tuple[int | str, ...], message: str, value: object) -> ValidationError:
    """Return a validation error of one item; pydantic adds the item's path in the whole body."""
    kind = PydanticCustomError("value_error", message)
    details = InitErrorDetails(type=kind, loc=places, input=value)
    return ValidationError.from_exception_data("item", [details])


def few_fields(value: object) -> object:
    """Return a value, or raise ValueError for an object with far more fields than any model has.

    Each forbidden field takes a kilobyte of the error.
    """
    if isinstance(value, dict) and len(value) > _MAX_FIELDS:
        raise ValueError(f"must not have more than {_MAX_FIELDS} fields")
    return value


def listed(value: object) -> object:
    """Return a string as a list of one; other values are unchanged."""
    return [value] if isinstance(value, str) else value


def _token_id(key: object) -> int:
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= _MAX_TOKEN_DIGITS:
        return int(key)
    raise ValueError("must be a token ID in decimal digits")


def _in_slices(value: object, validate: ValidatorFunctionWrapHandler) -> dict[int, float]:
    """Validate a large object up to the slice with its first fault: each fault takes a kilobyte."""
    if not isinstance(value, dict) or len(value) <= _SLICE_ITEMS:
        return cast("dict[int, float]", validate(value))
    items, checked = iter(value.items()), dict[int, float]()
    while some := dict(islice(items, _SLICE_ITEMS)):
        checked |= validate(some)
    return checked


def _cut(value: int) -> int:
    if value == 0:
        raise ValueError("must be at least 1, or -1 for the model's maximum")
    return value


Whole = Annotated[int, BeforeValidator(_whole)]
# Number of log-probabilities in a request; the engine sets the limit. -1 is the whole vocabulary.
NumLogprobs = Annotated[Whole, Field(ge=-1)]
Count = Annotated[Whole, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Penalty = Annotated[Finite, Field(ge=-2, le=2)]
Share = Annotated[Finite, Field(ge=0, le=1)]
Temperature = Annotated[Finite, Field(ge=0)]
Seed = Annotated[Whole, Field(ge=_INT64_MIN, le=_INT64_MAX)]
Priority = Annotated[Whole, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
TopK = Annotated[Whole, Field(ge=-1)]
RepetitionPenalty = Annotated[Finite, Field(ge=0.01, le=100)]
Text = Annotated[str, AfterValidator(encodable)]
StopString = Annotated[Text, Field(min_length=1, max_length=_MAX_STOP_CHARS)]
StopStrings = Annotated[
    list[StopString],
    Field(fail_fast=True, max_length=_MAX_STOP_STRINGS),
    BeforeValidator(listed),
]
StopPatterns = Annotated[
    list[StopString],
    Field(fail_fast=True, max_length=_MAX_STOP_PATTERNS),
    BeforeValidator(listed),
]
Bias = Annotated[Finite, Field(ge=-100, le=100)]
CutTo = Annotated[Whole, Field(ge=-1), AfterValidator(_cut)]
Side = Literal["left", "right"]


class RepetitionDetection(BaseModel):
    """Repetition detection, as in vLLM; a `max_pattern_size` of 0 disables it.

    It ends an output whose end has `min_count` copies of one pattern of `min_pattern_size` to
    `max_pattern_size` tokens.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    max_pattern_size: Annotated[Whole, Field(ge=0, le=_MAX_PATTERN)] = 0
    min_pattern_size: Count = 0
    min_count: Count = 0

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError("must not have a `min_pattern_size` above its `max_pattern_size`")
        if self.max_pattern_size and self.min_count < _LEAST_REPEATS:
            raise ValueError(f"must have a `min_count` of at least {_LEAST_REPEATS}")
        return self


class SamplingFields(BaseModel):
    """Sampling parameters of text generation and transcription; unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    seed: Seed | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None

    priority: Priority | None = None


class GenerationRequest(SamplingFields):
    """Fields of chat and text completions; unknown fields are ignored."""

    model: str | None = None

    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Temperature | None = None
    logit_bias: (
        Annotated[dict[Annotated[int, BeforeValidator(_token_id)], Bias], WrapValidator(_in_slices)]
        | None
    ) = None

    max_tokens: Count | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: (
        Annotated[list[Count], Field(fail_fast=True, max_length=_MAX_ALLOWED_TOKENS)] | None
    ) = None
    bad_words: (
        Annotated[list[StopString], Field(fail_fast=True, max_length=_MAX_BAD_WORDS)] | None
    ) = None
    stop: StopStrings | None = None
    stop_token_ids: (
        Annotated[list[Count], Field(fail_fast=True, max_length=_MAX_STOP_TOKENS)] | None
    ) = None
    # The second name is SGLang's.
    stop_regex: StopPatterns | None = None
    include_stop_str_in_output: Annotated[
        bool | None,
        Field(validation_alias=AliasChoices("include_stop_str_in_output", "no_stop_trim")),
    ] = None
    repetition_detection: Annotated[RepetitionDetection, BeforeValidator(few_fields)] | None = None

    echo: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    # SGLang's name.
    logprob_start_len: NumLogprobs | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    logprob_token_ids: (
        Annotated[list[Count], Field(fail_fast=True, max_length=MAX_NAMED_TOKENS)] | None
    ) = None

    truncate_prompt_tokens: CutTo | None = None
    truncation_side: Side | None = None

    cache_salt: Annotated[Text, Field(min_length=1)] | None = None
