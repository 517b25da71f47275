"""Bounds of requests and answers: a few bytes of a body must not ask for gigabytes."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.protocol.errors import RequestError

MAX_VALUES = 2**20
"""Log-probabilities, and tokens of prompts that choices repeat; an answer of about 65 MB."""

MAX_PROMPT_TOKENS = 2**24
"""Prompt tokens of all sequences of a request, which take four bytes each: 64 MB."""

MAX_PAIR_CHARS = 2**26
"""Characters of all pairs of a request: a query counts once for each of its documents."""

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


def check_prompt_tokens(num_tokens: int, param: str) -> None:
    """Raise `RequestError` for too many prompt tokens in all sequences of a request."""
    if num_tokens > MAX_PROMPT_TOKENS:
        raise RequestError(
            f"The request has {num_tokens:,} prompt tokens: a prompt counts once for each of its "
            f"choices or items; it may have at most {MAX_PROMPT_TOKENS:,}: use more requests.",
            param=param,
        )


def check_pair_chars(firsts: Sequence[str], seconds: Sequence[str], param: str) -> None:
    """Raise `RequestError` for too many characters in all pairs; one first text goes with all."""
    num_chars = sum(map(len, seconds)) + sum(map(len, firsts)) * (
        len(seconds) if len(firsts) == 1 else 1
    )
    if num_chars > MAX_PAIR_CHARS:
        raise RequestError(
            f"The pairs have {num_chars:,} characters; a request may have at most "
            f"{MAX_PAIR_CHARS:,}: send fewer documents in one request.",
            param=param,
        )


def _refusal(words: str, param: str) -> RequestError:
    return RequestError(
        f"The request {words}; an answer may have at most {MAX_VALUES:,} log-probabilities and "
        "repeated prompt tokens: reduce `n`, `max_tokens` or the number of alternatives.",
        param=param,
    )
