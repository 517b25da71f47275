"""Choices of chat and text completions, from finished sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tidemill.protocol.constraints.request import OutputConstraint
from tidemill.protocol.contract import Usage
from tidemill.protocol.fields import GenerationRequest

from ..scheduling.sequence import SequenceRequest, SequenceResult
from ..text.stop_strings import StopStrings
from ..text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """One finished choice: prompt, sequence result, text and stop reason."""

    prompt_ids: list[int]
    result: SequenceResult
    text: str
    stop_reason: int | str | None


def choices_by_prompt(
    sequences: Sequence[SequenceRequest],
    results: Sequence[SequenceResult],
    request: GenerationRequest,
    tokenizer: Tokenizer,
    *,
    markers: frozenset[int] = frozenset(),
) -> list[list[FinishedChoice]]:
    """Return the choices of each prompt; they share the prompt logprobs of its first choice.

    `markers` are special tokens that stay in the texts even if others are skipped.
    """
    num_choices = request.n or 1
    choices = [
        finished_choice(
            sequence,
            replace(result, prompt_logprobs=results[i - i % num_choices].prompt_logprobs)
            if i % num_choices
            else result,
            request,
            tokenizer,
            markers=markers,
        )
        for i, (sequence, result) in enumerate(zip(sequences, results, strict=True))
    ]
    return [choices[i : i + num_choices] for i in range(0, len(choices), num_choices)]


def finished_choice(
    sequence: SequenceRequest,
    result: SequenceResult,
    request: GenerationRequest,
    tokenizer: Tokenizer,
    *,
    markers: frozenset[int] = frozenset(),
) -> FinishedChoice:
    """Return the choice of one finished sequence."""
    return FinishedChoice(
        sequence.prompt_ids,
        result,
        _text(sequence, result, request, tokenizer, markers),
        _stop_reason(result, request),
    )


def usage_of(choices: Sequence[Sequence[FinishedChoice]]) -> Usage:
    """Return the usage of a request: each prompt once, and the tokens of every choice."""
    return Usage(
        prompt_tokens=sum(len(first.prompt_ids) for first, *_ in choices),
        cached_tokens=sum(first.result.num_cached_tokens for first, *_ in choices),
        completion_tokens=sum(
            len(choice.result.token_ids) for prompt_choices in choices for choice in prompt_choices
        ),
    )


def _text(
    sequence: SequenceRequest,
    result: SequenceResult,
    request: GenerationRequest,
    tokenizer: Tokenizer,
    markers: frozenset[int],
) -> str:
    """Return the text of a sequence, cut at the stop string or stop token that ended it."""
    with_stop = bool(request.include_stop_str_in_output)
    ids, stops = result.token_ids, sequence.stop_text
    has_stopped = result.finish_reason == "stop"
    if has_stopped and isinstance(stops, StopStrings) and isinstance(result.stop_reason, str):
        data = stops.kept(ids, result.stop_reason, with_stop=with_stop)
    else:
        if has_stopped and isinstance(result.stop_reason, int) and not with_stop:
            ids = ids[:-1]
        skip_special_tokens = request.skip_special_tokens is not False
        data = tokenizer.text_bytes(ids, skip_special_tokens=skip_special_tokens, markers=markers)
    return data.decode("utf-8", "replace")


def _stop_reason(result: SequenceResult, request: GenerationRequest) -> int | str | None:
    """Return vLLM's stop reason of a sequence: null for the model's own end token."""
    reason = result.stop_reason
    if isinstance(reason, int) and reason not in (request.stop_token_ids or ()):
        return None
    return reason


def verification_field(texts: Sequence[str | None], constraint: OutputConstraint) -> dict[str, Any]:
    """Return Tidemill's field of a body: a verdict on each choice's text, or null."""
    # Imported here: validators load slowly, and most engines never verify.
    from ..structured_output.verify import verify

    verdicts = [None if text is None else asdict(verify(text, constraint)) for text in texts]
    return {"proof": verdicts}
