"""`/v1/completions`: one or many prompts in, one or more continuations of each out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tidemill.protocol.bodies import completion_body, response_id
from tidemill.protocol.completions import (
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
    completion_choice,
)
from tidemill.protocol.contract import Reply
from tidemill.protocol.prompts import Prompt
from tidemill.protocol.requests import read_body
from tidemill.protocol.routes import COMPLETIONS
from tidemill.protocol.stream import StreamOptions

from ..scheduling.sequence import Constraint, SequenceRequest, SequenceResult
from ..scheduling.token_logprobs import TokenLogprobs
from ..text.text_model import TextModel
from ..text.tokenizer import Tokenizer
from .choices import (
    FinishedChoice,
    choices_by_prompt,
    usage_of,
    verification_field,
)
from .confidence import AnswersConfidence, ConfidenceOf, ScoredAnswer
from .endpoint import OutputDelta, Prepared, RequestMetadata, ResponseStream
from .generation_requests import EndpointOptions, SequenceRequestBuilder
from .logprob_bodies import LEAST_LOGPROB, TextOffsets, completion_logprobs, prompt_logprobs
from .streaming import ChoiceDelta, ChoiceStreams, ChunkBuilder, StreamedConfidence, whole_choice

_Prepared = Prepared[SequenceRequest, CompletionRequest]


@dataclass(frozen=True, slots=True)
class _Echo:
    """The echoed prompt before a completion, or nothing.

    `text` is the prompt's own text, `token_ids` its tokens and `offsets` their start positions.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()


class Completions:
    """The completions endpoint of a text model; `seed` is the default for requests without one."""

    route = COMPLETIONS

    def __init__(self, model: TextModel, *, seed: int, verifies: bool = False) -> None:
        self._tokenizer = model.tokenizer
        self._grammars = model.grammars
        self._sequences = SequenceRequestBuilder(model, seed=seed)
        self._verifies = verifies

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> _Prepared:
        """Return a sequence for each choice of each prompt."""
        request = self._sequences.with_truncation(read_body(CompletionRequest, body))
        requested = request.output_constraint
        constraint = None if requested is None else self._grammars.constraint(requested)
        options = _options(request, constraint)
        prompts = [self._ids(prompt, request, options) for prompt in request.prompt]
        sequences = self._sequences.build(prompts, request, options, metadata=metadata)
        return Prepared(sequences, request, metadata, may_follow=bool(request.confidence))

    def finish(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> Reply:
        """Return the text completion, its choices numbered prompt by prompt."""
        request, metadata = prepared.context, prepared.metadata
        by_prompt = self._choices(prepared, results)
        body = [
            text.body(whole_choice(place, choice))
            for place, (text, choice) in enumerate(
                zip(self._texts(prepared), chain(*by_prompt), strict=True)
            )
        ]
        if request.confidence:
            confidence = self._confidence(prepared, results)
            for choice, field in zip(body, confidence.fields, strict=True):
                choice["confidence"] = field
        usage = usage_of(by_prompt)
        answer = completion_body(
            "text_completion",
            response_id("cmpl", metadata.request_id),
            created=metadata.created,
            model=metadata.model,
            choices=body,
            usage=metadata.usage_body(usage),
        )
        if self._verifies and request.output_constraint is not None:
            texts = [choice.text for choice in chain(*by_prompt)]
            answer["tidemill"] = verification_field(texts, request.output_constraint)
        return Reply(200, answer, usage)

    def follow_up(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> _Prepared | None:
        """Return the prompts with the reads that the confidence of the texts needs, if any."""
        return self._confidence(prepared, results).extended()

    def _choices(
        self, prepared: _Prepared, results: Sequence[SequenceResult]
    ) -> list[list[FinishedChoice]]:
        """Return the choices of each prompt, without the reads that followed them."""
        request = prepared.context
        num_choices = len(request.prompt) * (request.n or 1)
        return choices_by_prompt(
            prepared.requests[:num_choices], results[:num_choices], request, self._tokenizer
        )

    def _confidence(
        self, prepared: _Prepared, results: Sequence[SequenceResult]
    ) -> AnswersConfidence:
        choices = chain(*self._choices(prepared, results))
        return AnswersConfidence(
            prepared,
            results,
            [ScoredAnswer(one, one.text) for one in choices],
            constraint=prepared.context.output_constraint,
            tokenizer=self._tokenizer,
        )

    def stream(self, prepared: _Prepared, options: StreamOptions) -> ResponseStream:
        """Return the stream of a text completion."""
        choices = ChoiceStreams(prepared.requests, prepared.context, self._tokenizer)
        return _CompletionStream(
            choices,
            [*self._texts(prepared)],
            ChunkBuilder("text_completion", "cmpl", prepared.metadata, options),
            self._confidence,
        )

    def _texts(self, prepared: _Prepared) -> Iterator[_ChoiceText]:
        """Yield the renderer of each choice, prompt by prompt."""
        request, num_choices = prepared.context, prepared.context.n or 1
        for number, prompt in enumerate(request.prompt):
            ids = prepared.requests[number * num_choices].prompt_ids
            echo = self._echo(prompt, ids, request) if request.echo else _Echo()
            for _ in range(num_choices):
                yield _ChoiceText(request, ids, echo, self._tokenizer)

    def _ids(
        self, prompt: Prompt, request: CompletionRequest, options: EndpointOptions
    ) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        return self._sequences.tokenize_prompt(
            prompt, request, options, add_special_tokens=request.add_special_tokens is not False
        )

    def _echo(self, prompt: Prompt, ids: list[int], request: CompletionRequest) -> _Echo:
        skip = request.skip_special_tokens is not False
        text = self._tokenizer.text(ids, skip_special_tokens=skip)
        offsets = [0] * len(ids)
        if request.logprobs is not None:
            offsets = TextOffsets(self._tokenizer, skip_special_tokens=skip).next_offsets(ids)
        if isinstance(prompt, str) and request.truncate_prompt_tokens is None:
            # A tokenizer may add a space before the first word, which the prompt does not contain.
            added = max(0, len(text) - len(prompt))
            text, offsets = prompt, [max(0, offset - added) for offset in offsets]
        return _Echo(text, tuple(ids), tuple(offsets))


class _ChoiceText:
    """Renders one choice: as a whole or in deltas."""

    def __init__(
        self, request: CompletionRequest, prompt_ids: list[int], echo: _Echo, tokenizer: Tokenizer
    ) -> None:
        self._request = request
        self._prompt_ids = prompt_ids
        self._echo = echo
        self._tokenizer = tokenizer
        skip = request.skip_special_tokens is not False
        self._offsets = TextOffsets(tokenizer, start=len(echo.text), skip_special_tokens=skip)

    def body(self, choice_delta: ChoiceDelta) -> dict[str, Any]:
        """Return the body of a delta of the choice."""
        request, finished = self._request, choice_delta.finished
        body = completion_choice(
            choice_delta.place,
            (self._echo.text if choice_delta.is_first else "") + choice_delta.text,
            logprobs=None if request.logprobs is None else self._logprobs(choice_delta),
            finish_reason=None if finished is None else finished.result.finish_reason,
            stop_reason=None if finished is None else finished.stop_reason,
        )
        if finished is not None and request.notes:
            body["warnings"] = [*request.notes]
        if request.return_token_ids:
            if choice_delta.is_first:
                body["prompt_token_ids"] = self._prompt_ids
            body["token_ids"] = choice_delta.token_ids
        if request.prompt_logprobs is not None and choice_delta.is_first:
            entries = self._narrowed(choice_delta, request.prompt_logprobs)
            body["prompt_logprobs"] = prompt_logprobs(entries, self._tokenizer)
        return body

    @staticmethod
    def _narrowed(choice_delta: ChoiceDelta, num_top: int) -> TokenLogprobs:
        """Return the prompt's logprobs, limited to the alternatives that one field requests."""
        logprobs = choice_delta.prompt_logprobs
        return logprobs if num_top < 0 else logprobs.narrowed(num_top)

    def _logprobs(self, choice_delta: ChoiceDelta) -> dict[str, Any]:
        rows = choice_delta.logprobs.rows(LEAST_LOGPROB)
        ids, offsets = [*choice_delta.token_ids], self._offsets.next_offsets(choice_delta.token_ids)
        if choice_delta.is_first and self._echo.token_ids:
            before = self._narrowed(choice_delta, self._request.logprobs or 0).rows(LEAST_LOGPROB)
            rows, ids = before + rows, [*self._echo.token_ids, *ids]
            offsets = [*self._echo.offsets, *offsets]
        as_ids = bool(self._request.return_tokens_as_token_ids)
        return completion_logprobs(rows, ids, offsets, self._tokenizer, as_ids=as_ids)


class _CompletionStream(StreamedConfidence):
    """A streamed text completion."""

    def __init__(
        self,
        choices: ChoiceStreams,
        texts: list[_ChoiceText],
        chunks: ChunkBuilder,
        confidence_of: ConfidenceOf,
    ) -> None:
        super().__init__(confidence_of)
        self._choices = choices
        self._texts = texts
        self._chunks = chunks

    def add(
        self, place: int, delta: OutputDelta, result: SequenceResult | None
    ) -> list[dict[str, Any]]:
        """Return the chunks for new output of the choice at this place."""
        chunks = []
        for choice_delta in self._choices.add(place, delta, result):
            choice = self._texts[choice_delta.place].body(choice_delta)
            choice |= self.confidence_field(choice_delta)
            if _has_content(choice):
                chunks.append(self._chunks.choice_chunk(choice, self._choices))
        return chunks

    def end(self) -> list[dict[str, Any]]:
        """Return the usage, if the request includes it."""
        return self._chunks.usage_chunk(self._choices.usage)


def _has_content(choice: dict[str, Any]) -> bool:
    """Return whether there is anything to send: some tokens add no text, or none yet."""
    return bool(
        choice["text"]
        or choice["finish_reason"]
        or choice["logprobs"]
        or choice.get("token_ids")
        or "prompt_logprobs" in choice
    )


def _options(request: CompletionRequest, constraint: Constraint | None) -> EndpointOptions:
    return EndpointOptions(
        prompt_param="prompt",
        max_tokens=request.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=request.logprobs,
        prompt_logprobs=request.num_prompt_logprobs,
        constraint=constraint,
        repeats_prompts=True,
        reads_confidence=bool(request.confidence),
    )
