"""Text completions: the request body and the response body."""

from __future__ import annotations

from typing import Any, Self

from pydantic import model_validator

from .constraints.request import CONSTRAINT_FIELDS, ConstrainedRequest
from .errors import RequestError
from .fields import NumLogprobs
from .prompts import Prompts

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES_IN_ALL = 8_192


class CompletionRequest(ConstrainedRequest):
    """The body of a request to `/v1/completions`."""

    prompt: Prompts
    logprobs: NumLogprobs | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Refuse parameters that contradict each other, and unsupported constraints."""
        if not self.model_fields_set.isdisjoint(CONSTRAINT_FIELDS):
            self.parse_constraint()
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise RequestError(
                "`max_tokens` must be at least 1; 0 scores the prompt and requires `echo` or"
                " `prompt_logprobs`.",
                param="max_tokens",
            )
        if self.logprob_token_ids and self.logprobs is None:
            raise RequestError(
                "`logprob_token_ids` requires `logprobs` of at least 0.", param="logprob_token_ids"
            )
        if self.logprob_start_len is not None and self.num_prompt_logprobs is None:
            raise RequestError(
                "`logprob_start_len` requires `prompt_logprobs`, or `echo` with `logprobs`.",
                param="logprob_start_len",
            )
        if len(self.prompt) * (self.n or 1) > MAX_CHOICES_IN_ALL:
            raise RequestError(
                f"{len(self.prompt)} prompts times `n` must not exceed {MAX_CHOICES_IN_ALL}"
                " choices: split the request.",
                param="n",
            )
        return self

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of alternatives that each prompt token needs, for `echo` and `prompt_logprobs`."""
        counts = [] if self.prompt_logprobs is None else [self.prompt_logprobs]
        if self.echo and self.logprobs is not None:
            counts.append(self.logprobs)
        return -1 if -1 in counts else max(counts, default=None)


def completion_choice(
    index: int,
    text: str,
    *,
    logprobs: dict[str, Any] | None,
    finish_reason: str | None,
    stop_reason: int | str | None,
) -> dict[str, Any]:
    """Return one choice of a text completion, or of one of its chunks."""
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }
