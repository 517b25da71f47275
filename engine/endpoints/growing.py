"""What chat and text completions share while they stream: choices as they come, and the usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.contract import Usage
from engine.endpoints.choices import Choice, choice_of
from engine.endpoints.endpoint import Heading, Told
from engine.protocol.bodies import chunk_body, response_id, usage_body
from engine.protocol.fields import GenerationRequest
from engine.protocol.stream import StreamOptions
from engine.scheduling.sequence import SequenceRequest, SequenceResult, TokenLogprob
from engine.text.growing import Beginnings, GrowingText
from engine.text.stop_strings import StopStrings
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Growth:
    """What has come for the choice at `place` since the last time.

    `text` is what of it is certain now. The prompt's log-probabilities come with the first one,
    where they were asked for. `ended` is the whole choice, once there is no more.
    """

    place: int
    is_first: bool
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    prompt_logprobs: Sequence[TokenLogprob | None]
    ended: Choice | None


def whole(place: int, choice: Choice) -> Growth:
    """Return all of a finished choice as what has come for it at once."""
    result = choice.result
    return Growth(
        place=place,
        is_first=True,
        text=choice.text,
        token_ids=result.token_ids,
        logprobs=result.logprobs or (),
        prompt_logprobs=result.prompt_logprobs or (),
        ended=choice,
    )


class GrowingChoices:
    """The choices of one request while they come; `markers` are tokens that stay in the texts."""

    def __init__(
        self,
        sequences: Sequence[SequenceRequest],
        request: GenerationRequest,
        tokenizer: Tokenizer,
        *,
        markers: frozenset[int] = frozenset(),
    ) -> None:
        self._sequences = sequences
        self._request = request
        self._tokenizer = tokenizer
        self._markers = markers
        beginnings = None
        stops = sequences[0].stop_text  # which all of them share
        if (
            isinstance(stops, StopStrings)
            and stops.stops
            and not request.include_stop_str_in_output
        ):
            beginnings = Beginnings([stop.encode() for stop in stops.stops])
        skip = request.skip_special_tokens is not False
        self._texts = [
            GrowingText(tokenizer, beginnings, skip_special_tokens=skip, markers=markers)
            for _ in sequences
        ]
        self._num_tokens = [0] * len(sequences)
        self._has_begun = [False] * len(sequences)
        # Of each prompt, whose scores its first choice has: what came for others before those did.
        self._prompt_logprobs: dict[int, Sequence[TokenLogprob | None]] = {}
        self._early: dict[int, list[tuple[int, Told, SequenceResult | None]]] = {}

    def add(self, place: int, told: Told, result: SequenceResult | None) -> list[Growth]:
        """Take in what came for one of them; `result` once it is finished."""
        first = place - place % (self._request.n or 1)
        if self._sequences[first].prompt_logprobs is None:
            return [self._growth(place, told, result)]
        if told.prompt_logprobs:
            self._prompt_logprobs[first] = told.prompt_logprobs
        elif first not in self._prompt_logprobs:
            self._early.setdefault(first, []).append((place, told, result))
            return []
        early = self._early.pop(first, [])
        return [self._growth(*each) for each in [(place, told, result), *early]]

    def _growth(self, place: int, told: Told, result: SequenceResult | None) -> Growth:
        is_first, self._has_begun[place] = not self._has_begun[place], True
        self._num_tokens[place] += len(told.new_token_ids)
        text, ended = self._texts[place], None
        if result is None:
            new = text.push(told.new_token_ids)
        else:
            ended = choice_of(
                self._sequences[place],
                result,
                self._request,
                self._tokenizer,
                markers=self._markers,
            )
            new = text.end(ended.text)
        scores = self._prompt_logprobs.get(place - place % (self._request.n or 1), ())
        return Growth(
            place=place,
            is_first=is_first,
            text=new,
            token_ids=told.new_token_ids,
            logprobs=told.new_logprobs,
            prompt_logprobs=scores if is_first else (),
            ended=ended,
        )

    @property
    def usage(self) -> Usage:
        """Return the tokens so far: each prompt once, and what has come for every choice."""
        firsts = self._sequences[:: self._request.n or 1]
        return Usage(
            prompt_tokens=sum(len(first.prompt_ids) for first in firsts),
            completion_tokens=sum(self._num_tokens),
        )


class Chunks:
    """Makes the chunks of one stream: what all of them say, and the usage where it was asked for.

    `prefix` is that of the response's id.
    """

    def __init__(
        self,
        kind: Literal["chat.completion.chunk", "text_completion"],
        prefix: str,
        heading: Heading,
        options: StreamOptions,
    ) -> None:
        self._frame = chunk_body(
            kind,
            response_id(prefix, heading.request_id),
            created=heading.created,
            model=heading.model,
        )
        self._options = options

    def of(self, choice: dict[str, Any], choices: GrowingChoices) -> dict[str, Any]:
        """Return the chunk that tells of a choice."""
        chunk = self._frame | {"choices": [choice]}
        if self._options.continuous_usage_stats:
            chunk["usage"] = _shown(choices.usage)
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def last(self, usage: Usage, *, reasoning_tokens: int | None = None) -> list[dict[str, Any]]:
        """Return what follows the choices: all that it cost, where that was asked for.

        `reasoning_tokens` None is for a model that does not think.
        """
        if not self._options.include_usage:
            return []
        shown = usage_body(
            usage.prompt_tokens, usage.completion_tokens, reasoning_tokens=reasoning_tokens
        )
        return [self._frame | {"choices": [], "usage": shown}]


def _shown(usage: Usage) -> dict[str, Any]:
    return usage_body(usage.prompt_tokens, usage.completion_tokens)
