"""`/v1/completions`: one or many prompts in, the text that follows each out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from engine.contract import Reply
from engine.endpoints.choices import choices_of, usage_of
from engine.endpoints.endpoint import Heading, Prepared, Told, Unfolding
from engine.endpoints.growing import Chunks, GrowingChoices, Growth, whole
from engine.endpoints.logprobs import TextOffsets, completion_logprobs, prompt_logprobs
from engine.endpoints.proofs import proof
from engine.endpoints.sequences import Terms, TextSequences
from engine.protocol.bodies import completion_body, response_id, usage_body
from engine.protocol.completions import (
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
    completion_choice,
)
from engine.protocol.prompts import Prompt
from engine.protocol.requests import read_body
from engine.protocol.routes import COMPLETIONS
from engine.protocol.stream import StreamOptions
from engine.scheduling.sequence import (
    Constraint,
    SequenceRequest,
    SequenceResult,
    TokenLogprob,
)
from engine.text.text_model import TextModel
from engine.text.tokenizer import Tokenizer

_Prepared = Prepared[SequenceRequest, CompletionRequest]


@dataclass(frozen=True, slots=True)
class _Echo:
    """What stands before a completion: its prompt when it is echoed, else nothing.

    `text` are the prompt's own characters, `token_ids` its tokens and `offsets` where each begins.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()


class Completions:
    """The endpoint of any text model; `seed` keys requests that name none."""

    route = COMPLETIONS

    def __init__(self, model: TextModel, *, seed: int, proves: bool = False) -> None:
        self._tokenizer = model.tokenizer
        self._grammars = model.grammars
        self._sequences = TextSequences(model, seed=seed)
        self._proves = proves

    def prepare(self, body: dict[str, Any], heading: Heading) -> _Prepared:
        """Return a sequence for each choice of each prompt."""
        request = read_body(CompletionRequest, body)
        asked = request.asked
        constraint = None if asked is None else self._grammars.constraint(asked)
        terms = _terms(request, constraint)
        prompts = [self._ids(prompt, request, terms) for prompt in request.prompt]
        sequences = self._sequences.of(prompts, request, terms, heading=heading)
        return Prepared(sequences, request, heading)

    def finish(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> Reply:
        """Return the text completion, its choices numbered prompt by prompt."""
        request, heading = prepared.context, prepared.heading
        by_prompt = choices_of(prepared.requests, results, request, self._tokenizer)
        shown = [
            text.shown(whole(place, choice))
            for place, (text, choice) in enumerate(
                zip(self._texts(prepared), chain(*by_prompt), strict=True)
            )
        ]
        usage = usage_of(by_prompt)
        answer = completion_body(
            "text_completion",
            response_id("cmpl", heading.request_id),
            created=heading.created,
            model=heading.model,
            choices=shown,
            usage=usage_body(usage.prompt_tokens, usage.completion_tokens),
        )
        if self._proves and request.asked is not None:
            texts = [choice.text for choice in chain(*by_prompt)]
            answer["tidemill"] = proof(texts, request.asked)
        return Reply(200, answer, usage)

    def unfold(self, prepared: _Prepared, options: StreamOptions) -> Unfolding:
        """Return the text completion before anything of it has come."""
        choices = GrowingChoices(prepared.requests, prepared.context, self._tokenizer)
        return _Unfolding(
            choices,
            [*self._texts(prepared)],
            Chunks("text_completion", "cmpl", prepared.heading, options),
        )

    def _texts(self, prepared: _Prepared) -> Iterator[_ShownText]:
        """Yield what shows each choice, prompt by prompt."""
        request, num_choices = prepared.context, prepared.context.n or 1
        for number, prompt in enumerate(request.prompt):
            ids = prepared.requests[number * num_choices].prompt_ids
            echo = self._echo(prompt, ids, request) if request.echo else _Echo()
            for _ in range(num_choices):
                yield _ShownText(request, ids, echo, self._tokenizer)

    def _ids(self, prompt: Prompt, request: CompletionRequest, terms: Terms) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        return self._sequences.tokenized(
            prompt, request, terms, add_special_tokens=request.add_special_tokens is not False
        )

    def _echo(self, prompt: Prompt, ids: list[int], request: CompletionRequest) -> _Echo:
        skip = request.skip_special_tokens is not False
        text = self._tokenizer.text(ids, skip_special_tokens=skip)
        offsets = [0] * len(ids)
        if request.logprobs is not None:
            offsets = TextOffsets(self._tokenizer, skip_special_tokens=skip).of(ids)
        if isinstance(prompt, str) and request.truncate_prompt_tokens is None:
            # A tokenizer may write a space before the first word that the prompt does not have.
            added = max(0, len(text) - len(prompt))
            text, offsets = prompt, [max(0, offset - added) for offset in offsets]
        return _Echo(text, tuple(ids), tuple(offsets))


class _ShownText:
    """Shows one choice: all at once, or each stretch of it as it comes."""

    def __init__(
        self, request: CompletionRequest, prompt_ids: list[int], echo: _Echo, tokenizer: Tokenizer
    ) -> None:
        self._request = request
        self._prompt_ids = prompt_ids
        self._echo = echo
        self._tokenizer = tokenizer
        skip = request.skip_special_tokens is not False
        self._offsets = TextOffsets(tokenizer, start=len(echo.text), skip_special_tokens=skip)

    def shown(self, growth: Growth) -> dict[str, Any]:
        """Return what has come for the choice as a response shows it."""
        request, ended = self._request, growth.ended
        shown = completion_choice(
            growth.place,
            (self._echo.text if growth.is_first else "") + growth.text,
            logprobs=None if request.logprobs is None else self._logprobs(growth),
            finish_reason=None if ended is None else ended.result.finish_reason,
            stop_reason=None if ended is None else ended.stop_reason,
        )
        if request.return_token_ids:
            if growth.is_first:
                shown["prompt_token_ids"] = self._prompt_ids
            shown["token_ids"] = growth.token_ids
        if request.prompt_logprobs is not None and growth.is_first:
            entries = [
                _shortened(entry, request.prompt_logprobs) for entry in growth.prompt_logprobs
            ]
            shown["prompt_logprobs"] = prompt_logprobs(entries, self._tokenizer)
        return shown

    def _logprobs(self, growth: Growth) -> dict[str, Any]:
        entries: list[TokenLogprob | None] = [*growth.logprobs]
        ids, offsets = [*growth.token_ids], self._offsets.of(growth.token_ids)
        if growth.is_first and self._echo.token_ids:
            num_top = self._request.logprobs or 0
            before = [_shortened(entry, num_top) for entry in growth.prompt_logprobs]
            entries, ids = before + entries, [*self._echo.token_ids, *ids]
            offsets = [*self._echo.offsets, *offsets]
        as_ids = bool(self._request.return_tokens_as_token_ids)
        return completion_logprobs(entries, ids, offsets, self._tokenizer, as_ids=as_ids)


class _Unfolding:
    """A text completion as it comes."""

    def __init__(self, choices: GrowingChoices, texts: list[_ShownText], chunks: Chunks) -> None:
        self._choices = choices
        self._texts = texts
        self._chunks = chunks

    def add(self, place: int, told: Told, result: SequenceResult | None) -> list[dict[str, Any]]:
        """Return the chunks of what came for the choice at this place."""
        shown = (
            self._texts[growth.place].shown(growth)
            for growth in self._choices.add(place, told, result)
        )
        return [self._chunks.of(choice, self._choices) for choice in shown if _says(choice)]

    def end(self) -> list[dict[str, Any]]:
        """Return the usage, where it was asked for."""
        return self._chunks.last(self._choices.usage)


def _says(choice: dict[str, Any]) -> bool:
    """Say whether there is anything to tell: some tokens bring no text, or none yet."""
    return bool(
        choice["text"]
        or choice["finish_reason"]
        or choice["logprobs"]
        or choice.get("token_ids")
        or "prompt_logprobs" in choice
    )


def _terms(request: CompletionRequest, constraint: Constraint | None) -> Terms:
    return Terms(
        prompt_param="prompt",
        max_tokens=request.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=request.logprobs,
        prompt_logprobs=_num_prompt_logprobs(request),
        constraint=constraint,
    )


def _num_prompt_logprobs(request: CompletionRequest) -> int | None:
    """Return the alternatives to take at each prompt token, for the echo and for the asking."""
    asked = [] if request.prompt_logprobs is None else [request.prompt_logprobs]
    if request.echo and request.logprobs is not None:
        asked.append(request.logprobs)
    return max(asked, default=None)


def _shortened(entry: TokenLogprob | None, num_top: int) -> TokenLogprob | None:
    if entry is None or len(entry.top) <= num_top:
        return entry
    return TokenLogprob(entry.token_id, entry.logprob, entry.top[:num_top])
