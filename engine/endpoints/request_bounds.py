"""Limits on requests and answers, so that a small body cannot request gigabytes."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.protocol.errors import RequestError

MAX_VALUES = 2**20
"""Limit on log-probabilities and repeated prompt tokens; such an answer is about 65 MB."""

MAX_PROMPT_TOKENS = 2**24
"""Limit on the prompt tokens of all sequences of a request: 64 MB, four bytes each."""

MAX_PROMPT_CHARS = 2**26
"""Limit on the characters of the prompts of all reads of a decision."""

MAX_PAIR_CHARS = 2**26
"""Limit on the characters of all pairs of a request: a query counts once per document."""

# A request without `max_tokens` is rejected if the limit leaves fewer tokens than this.
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
    """Return the token limit of a sequence if `max_tokens` is None; None for no limit.

    Each new token adds `values_per_token` values, and all choices add `prompt_values` for their
    prompts. Raises `RequestError` naming `param` for an answer above the limit.
    """
    values_per_step = num_sequences * values_per_token
    num_values = prompt_values + values_per_step * (max_tokens or 0)
    if num_values > MAX_VALUES:
        raise _refusal(f"would return {num_values:,} values", param)
    if max_tokens is not None or not values_per_token:
        return None
    limit = (MAX_VALUES - num_values) // values_per_step
    if limit < min(_LEAST_OPEN_TOKENS, max_model_len):
        raise _refusal(f"allows {limit} tokens per choice and has no `max_tokens`", param)
    return limit


def check_prompt_tokens(num_tokens: int, param: str) -> None:
    """Raise `RequestError` for too many prompt tokens in all sequences of a request."""
    if num_tokens > MAX_PROMPT_TOKENS:
        raise RequestError(
            f"The request has {num_tokens:,} prompt tokens; the maximum is {MAX_PROMPT_TOKENS:,}. "
            "A prompt counts once for each choice or item: split the request.",
            param=param,
        )


def check_prompt_chars(num_chars: int, param: str) -> None:
    """Raise `RequestError` for too many characters in all prompts of a request."""
    if num_chars > MAX_PROMPT_CHARS:
        raise RequestError(
            f"The prompts of all questions have more than {MAX_PROMPT_CHARS:,} characters: split "
            "the request.",
            param=param,
        )


def check_pair_chars(firsts: Sequence[str], seconds: Sequence[str], param: str) -> None:
    """Raise `RequestError` for too many characters in all pairs; a single first text repeats."""
    num_chars = sum(map(len, seconds)) + sum(map(len, firsts)) * (
        len(seconds) if len(firsts) == 1 else 1
    )
    if num_chars > MAX_PAIR_CHARS:
        raise RequestError(
            f"The pairs have {num_chars:,} characters; the maximum is {MAX_PAIR_CHARS:,}: send "
            "fewer documents per request.",
            param=param,
        )


def _refusal(words: str, param: str) -> RequestError:
    return RequestError(
        f"The request {words}; the maximum is {MAX_VALUES:,} log-probabilities and repeated "
        "prompt tokens per answer: reduce `n`, `max_tokens` or the number of alternatives.",
        param=param,
    )
