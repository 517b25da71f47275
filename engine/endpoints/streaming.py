"""Streaming: choices of chat and text completions as their tokens arrive, as chunks with usage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tidemill.protocol.bodies import chunk_body, response_id, usage_body
from tidemill.protocol.chat import chat_choice
from tidemill.protocol.contract import Usage
from tidemill.protocol.fields import GenerationRequest
from tidemill.protocol.reasoning_fields import REASONING_FIELDS
from tidemill.protocol.stream import StreamOptions

from ..parsers.parsed_output import DeltaMessage, DeltaToolCall, PlainTextParser
from ..scheduling.sequence import SequenceRequest, SequenceResult
from ..scheduling.token_logprobs import NO_LOGPROBS, TokenLogprobs
from ..text.detokenizer import IncrementalDetokenizer, StopPrefixes
from ..text.stop_strings import StopStrings
from ..text.tokenizer import Tokenizer
from .chat_messages import echoed_text, finish_reason, num_reasoning_tokens, shows_reasoning
from .chat_preprocessor import Conversation
from .choices import FinishedChoice, finished_choice
from .confidence import ConfidenceOf
from .custom_calls import CustomCalls
from .endpoint import OutputDelta, Prepared, RequestMetadata
from .logprob_bodies import chat_logprobs, prompt_logprobs


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """New output of the choice at `place` since its last delta.

    `text` is final: no later token changes it. The first delta includes the prompt's logprobs, if
    they were requested. `finished` is the whole choice, in the last delta.
    """

    place: int
    is_first: bool
    text: str
    token_ids: Sequence[int]
    logprobs: TokenLogprobs
    prompt_logprobs: TokenLogprobs
    finished: FinishedChoice | None


def whole_choice(place: int, choice: FinishedChoice) -> ChoiceDelta:
    """Return all of a finished choice as one delta."""
    result = choice.result
    return ChoiceDelta(
        place=place,
        is_first=True,
        text=choice.text,
        token_ids=result.token_ids,
        logprobs=result.logprobs or NO_LOGPROBS,
        prompt_logprobs=result.prompt_logprobs or NO_LOGPROBS,
        finished=choice,
    )


class ChoiceStreams:
    """The choices of one request as they stream; texts include special tokens in `markers`."""

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
        stops = sequences[0].stop_text  # all choices share them
        if (
            isinstance(stops, StopStrings)
            and stops.stops
            and not request.include_stop_str_in_output
        ):
            beginnings = StopPrefixes([stop.encode() for stop in stops.stops])
        skip = request.skip_special_tokens is not False
        self._texts = [
            IncrementalDetokenizer(tokenizer, beginnings, skip_special_tokens=skip, markers=markers)
            for _ in sequences
        ]
        self._num_tokens = [0] * len(sequences)
        self._has_begun = [False] * len(sequences)
        # By prompt: its first choice provides the prompt's logprobs, and output of the other
        # choices
        # waits for them.
        self._prompt_logprobs: dict[int, TokenLogprobs] = {}
        self._early: dict[int, list[tuple[int, OutputDelta, SequenceResult | None]]] = {}

    def add(
        self, place: int, delta: OutputDelta, result: SequenceResult | None
    ) -> list[ChoiceDelta]:
        """Return the deltas for new output of one choice; `result` with its last output."""
        first = place - place % (self._request.n or 1)
        if self._sequences[first].prompt_logprobs is None:
            return [self._choice_delta(place, delta, result)]
        if delta.prompt_logprobs:
            self._prompt_logprobs[first] = delta.prompt_logprobs
        elif first not in self._prompt_logprobs:
            self._early.setdefault(first, []).append((place, delta, result))
            return []
        early = self._early.pop(first, [])
        return [self._choice_delta(*each) for each in [(place, delta, result), *early]]

    def _choice_delta(
        self, place: int, delta: OutputDelta, result: SequenceResult | None
    ) -> ChoiceDelta:
        is_first, self._has_begun[place] = not self._has_begun[place], True
        self._num_tokens[place] += len(delta.new_token_ids)
        text, finished = self._texts[place], None
        if result is None:
            new = text.push(delta.new_token_ids)
        else:
            finished = finished_choice(
                self._sequences[place],
                result,
                self._request,
                self._tokenizer,
                markers=self._markers,
            )
            new = text.end(finished.text)
        scores = self._prompt_logprobs.get(place - place % (self._request.n or 1), NO_LOGPROBS)
        return ChoiceDelta(
            place=place,
            is_first=is_first,
            text=new,
            token_ids=delta.new_token_ids,
            logprobs=delta.new_logprobs,
            prompt_logprobs=scores if is_first else NO_LOGPROBS,
            finished=finished,
        )

    @property
    def usage(self) -> Usage:
        """Return the usage so far: each prompt once, and the tokens of every choice."""
        firsts = self._sequences[:: self._request.n or 1]
        return Usage(
            prompt_tokens=sum(len(first.prompt_ids) for first in firsts),
            completion_tokens=sum(self._num_tokens),
        )


class ChunkBuilder:
    """Builds the chunks of one stream: the common fields, and the usage if it is requested.

    `prefix` is the prefix of the response's id.
    """

    def __init__(
        self,
        kind: Literal["chat.completion.chunk", "text_completion"],
        prefix: str,
        metadata: RequestMetadata,
        options: StreamOptions,
    ) -> None:
        self._frame = chunk_body(
            kind,
            response_id(prefix, metadata.request_id),
            created=metadata.created,
            model=metadata.model,
        )
        self._metadata = metadata
        self._options = options

    def choice_chunk(self, choice: dict[str, Any], choices: ChoiceStreams) -> dict[str, Any]:
        """Return the chunk of a choice."""
        chunk = self._frame | {"choices": [choice]}
        if self._options.continuous_usage_stats:
            so_far = choices.usage
            chunk["usage"] = usage_body(so_far.prompt_tokens, so_far.completion_tokens)
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def usage_chunk(
        self, usage: Usage, *, reasoning_tokens: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the last chunk, with the usage, if it is requested.

        `reasoning_tokens` is None for a model without reasoning.
        """
        if not self._options.include_usage:
            return []
        shown = self._metadata.usage_body(usage, reasoning_tokens)
        return [self._frame | {"choices": [], "usage": shown}]


_OUTPUT_FIELDS = (*REASONING_FIELDS, "content", "tool_calls")


class StreamedConfidence:
    """The confidence of a stream's choices, which their last chunks contain."""

    def __init__(self, confidence_of: ConfidenceOf) -> None:
        self._confidence_of = confidence_of
        self._confidence: Sequence[Any] | None = None

    def follow(
        self, prepared: Prepared[SequenceRequest, Any], results: Sequence[SequenceResult]
    ) -> None:
        """Compute the confidence of the choices; see `FollowedStream`."""
        self._confidence = self._confidence_of(prepared, results).fields

    def confidence_field(self, choice_delta: ChoiceDelta) -> dict[str, Any]:
        """Return the field of a choice's chunk; empty before the last one."""
        if choice_delta.finished is None or self._confidence is None:
            return {}
        return {"confidence": self._confidence[choice_delta.place]}


class ChatStream(StreamedConfidence):
    """A streamed chat completion."""

    def __init__(
        self,
        choices: ChoiceStreams,
        conversation: Conversation,
        prompt_ids: list[int],
        chunks: ChunkBuilder,
        tokenizer: Tokenizer,
        *,
        confidence_of: ConfidenceOf,
    ) -> None:
        super().__init__(confidence_of)
        self._choices = choices
        self._conversation = conversation
        self._prompt_ids = prompt_ids
        self._chunks = chunks
        self._tokenizer = tokenizer
        num_choices = conversation.request.n or 1
        self._readers = [conversation.parser.for_choice(place) for place in range(num_choices)]
        self._last_arguments: list[list[str]] = [[] for _ in range(num_choices)]  # of the last call
        names = conversation.request.custom_tools
        self._custom_calls = [CustomCalls(names) for _ in range(num_choices)] if names else []
        self._has_output = [False] * num_choices
        self._may_be_silent = not isinstance(conversation.parser, PlainTextParser)
        self._num_thinking_tokens = 0
        self._has_prompt_fields = False

    def add(
        self, place: int, delta: OutputDelta, result: SequenceResult | None
    ) -> list[dict[str, Any]]:
        """Return the chunks for new output of the choice at this place."""
        chunks: list[dict[str, Any]] = []
        for choice_delta in self._choices.add(place, delta, result):
            *early, last = _runs(self._pieces(choice_delta))
            rest = choice_delta
            for pieces in early:
                chunks += self._chunks_of(replace(rest, finished=None), pieces)
                rest = replace(rest, is_first=False, token_ids=[], logprobs=NO_LOGPROBS)
            chunks += self._chunks_of(rest, last)
        return chunks

    def _chunks_of(
        self, choice_delta: ChoiceDelta, pieces: Sequence[DeltaMessage]
    ) -> list[dict[str, Any]]:
        """Return the chunk of a choice's new output; none if there is nothing to send."""
        choice = self._choice_body(choice_delta, pieces)
        if not _has_content(choice):
            return []
        chunk = self._chunks.choice_chunk(choice, self._choices)
        return [chunk | self._prompt_fields(choice_delta)]

    def end(self) -> list[dict[str, Any]]:
        """Return the usage, if it is requested."""
        thought = self._num_thinking_tokens if self._conversation.parser.has_reasoning else None
        return self._chunks.usage_chunk(self._choices.usage, reasoning_tokens=thought)

    def _prompt_fields(self, choice_delta: ChoiceDelta) -> dict[str, Any]:
        """Return the first chunk's fields about the prompt, if they are requested."""
        if self._has_prompt_fields:
            return {}
        self._has_prompt_fields = True
        request, shown = self._conversation.request, dict[str, Any]()
        if request.return_token_ids:
            shown["prompt_token_ids"] = self._prompt_ids
        if request.prompt_logprobs is not None:
            shown["prompt_logprobs"] = prompt_logprobs(
                choice_delta.prompt_logprobs, self._tokenizer
            )
        return shown

    def _pieces(self, choice_delta: ChoiceDelta) -> list[DeltaMessage]:
        """Return the parsed pieces of new output."""
        finished, reader = choice_delta.finished, self._readers[choice_delta.place]
        pieces = [*reader.push(choice_delta.text)]
        if finished is not None:
            pieces += reader.end()
            self._num_thinking_tokens += num_reasoning_tokens(
                finished.result.token_ids,
                reader.reasoning_spans,
                self._conversation,
                self._tokenizer,
            )
        return pieces

    def _choice_body(
        self, choice_delta: ChoiceDelta, pieces: Sequence[DeltaMessage]
    ) -> dict[str, Any]:
        request, finished = self._conversation.request, choice_delta.finished
        delta = self._delta(choice_delta, pieces)
        warnings = [piece.warning for piece in pieces if piece.warning is not None]
        shown = chat_choice(
            choice_delta.place,
            delta,
            as_field="delta",
            logprobs=self._logprobs(choice_delta),
            finish_reason=None
            if finished is None
            else finish_reason(
                finished.result.finish_reason,
                "".join(self._last_arguments[choice_delta.place]) or None,
            ),
            stop_reason=None if finished is None else finished.stop_reason,
            warnings=warnings if finished is None else [*request.notes, *warnings],
        )
        if request.return_token_ids:
            shown["token_ids"] = choice_delta.token_ids
        return shown | self.confidence_field(choice_delta)

    def _delta(self, choice_delta: ChoiceDelta, pieces: Sequence[DeltaMessage]) -> dict[str, Any]:
        """Return new output as a delta; content is null in all deltas only if the answer has none.

        So the first delta has null content, unless it has text or the answer cannot have
        other fields.
        """
        place, request = choice_delta.place, self._conversation.request
        is_shown = shows_reasoning(self._conversation)
        delta = _delta_of(pieces, self._conversation.reasoning_fields if is_shown else ())
        custom = self._custom_calls[place] if self._custom_calls else None
        calls: list[dict[str, Any]] = []
        for call in [call for piece in pieces for call in piece.calls]:
            if call.name is not None:
                self._last_arguments[place].clear()
            self._last_arguments[place].append(call.arguments)
            body = _function_call(call)
            calls += [body] if custom is None else custom.add(body)
        if custom is not None and choice_delta.finished is not None:
            calls += custom.end()
        if calls:
            delta["tool_calls"] = _joined_calls(calls)
        if choice_delta.is_first:
            content = echoed_text(request) + delta.get("content", "")
            delta = {"role": "assistant", **delta, "content": content or None}
        self._has_output[place] |= any(delta.get(name) for name in _OUTPUT_FIELDS)
        if not self._has_output[place] and (choice_delta.finished or not self._may_be_silent):
            delta["content"] = ""
            self._has_output[place] = True
        return delta

    def _logprobs(self, choice_delta: ChoiceDelta) -> dict[str, Any] | None:
        request = self._conversation.request
        if not request.logprobs:
            return None
        as_ids = bool(request.return_tokens_as_token_ids)
        return chat_logprobs(choice_delta.logprobs, self._tokenizer, as_ids=as_ids)


def _has_content(choice: dict[str, Any]) -> bool:
    """Return whether there is anything to send: some tokens add no text, or none yet."""
    return bool(
        choice["delta"]
        or choice["finish_reason"]
        or choice["logprobs"]
        or choice.get("token_ids")
        or choice.get("warnings")
    )


def _runs(pieces: Iterable[DeltaMessage]) -> list[list[DeltaMessage]]:
    """Return pieces in runs that have reasoning, content and calls in the order of a delta."""
    runs: list[list[DeltaMessage]] = [[]]
    last = 0
    for piece in pieces:
        place = 2 if piece.calls else 1 if piece.content else 0 if piece.reasoning else last
        if place < last:
            runs.append([])
        runs[-1].append(piece)
        last = place
    return runs


def _delta_of(pieces: Iterable[DeltaMessage], fields: Sequence[str]) -> dict[str, Any]:
    """Return reasoning, in its `fields`, and content of parser output, without empty fields."""
    delta: dict[str, Any] = {}
    for piece in pieces:
        for name, text in (
            *((name, piece.reasoning) for name in fields),
            ("content", piece.content),
        ):
            if text:
                delta[name] = delta.get(name, "") + text
    return delta


def _joined_calls(calls: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return new output of calls with one item for each call."""
    joined: dict[int, dict[str, Any]] = {}
    for more in calls:
        if (begun := joined.get(more["index"])) is None:
            joined[more["index"]] = more
        elif "custom" in more:
            begun["custom"]["input"] += more["custom"]["input"]
        else:
            begun["function"]["arguments"] += more["function"]["arguments"]
    return [*joined.values()]


def _function_call(piece: DeltaToolCall) -> dict[str, Any]:
    function = {"arguments": piece.arguments}
    if piece.name is None:
        return {"index": piece.index, "function": function}
    named = {"name": piece.name, **function}
    return {"index": piece.index, "id": piece.call_id, "type": "function", "function": named}
