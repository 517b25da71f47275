"""Bounds of an answer's size: a few bytes of a request must not ask for gigabytes."""

from __future__ import annotations

from tidemill.protocol.errors import RequestError

MAX_VALUES = 2**20
"""Log-probabilities, and tokens of prompts that choices repeat; an answer of about 65 MB."""

# Where a request leaves `max_tokens` open and the bound leaves fewer, it must name a number.
_LEAST_OPEN_TOKENS = 256


def open_max_tokens(
    max_tokens: int | None,
    *,
    max_model_len: int,
    num_sequences: int,
    values_per_token: int,
    prompt_values: int,
    param: str,
) -> int | None:
    """Return how many tokens a sequence may have if `max_tokens` is None; None for no bound.

    Each new token shows `values_per_token` values, and all choices show `prompt_values` of their
    prompts. Raises `RequestError`, which names `param`, for an answer above the bound.
    """
    values_per_step = num_sequences * values_per_token
    num_values = prompt_values + values_per_step * (max_tokens or 0)
    if num_values > MAX_VALUES:
        raise _refusal(f"asks for {num_values:,} values", param)
    if max_tokens is not None or not values_per_token:
        return None
    limit = (MAX_VALUES - num_values) // values_per_step
    if limit < min(_LEAST_OPEN_TOKENS, max_model_len):
        raise _refusal(f"leaves room for {limit} tokens per choice and sets no maximum", param)
    return limit


def _refusal(words: str, param: str) -> RequestError:
    return RequestError(
        f"The request {words}; an answer may have at most {MAX_VALUES:,} log-probabilities and "
        "repeated prompt tokens: reduce `n`, `max_tokens` or the number of alternatives.",
        param=param,
    )
