"""Text completions on the wire: the request's body, and the body that answers it."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, PlainValidator, model_validator

from engine.protocol.errors import RequestError
from engine.protocol.fields import MAX_TOP_LOGPROBS, Count, GenerationRequest, encodable

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 2_048
MAX_CHOICES_IN_ALL = 8_192

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
        raise ValueError(f"must not hold more than {MAX_PROMPTS} prompts; use more lines")
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


class CompletionRequest(GenerationRequest):
    """The body of a request to `/v1/completions`."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts)]
    logprobs: Annotated[Count, Field(le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Refuse parameters that contradict each other."""
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise RequestError(
                "`max_tokens` must be at least 1; 0 scores the prompt, with `echo` or"
                " `prompt_logprobs`.",
                param="max_tokens",
            )
        if len(self.prompt) * (self.n or 1) > MAX_CHOICES_IN_ALL:
            raise RequestError(
                f"{len(self.prompt)} prompts times `n` must not be above {MAX_CHOICES_IN_ALL}"
                " choices; use more lines.",
                param="n",
            )
        return self


def completion_choice(
    index: int,
    text: str,
    *,
    logprobs: dict[str, Any] | None,
    finish_reason: str,
    stop_reason: int | str | None,
) -> dict[str, Any]:
    """Return one choice of a text completion."""
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }
