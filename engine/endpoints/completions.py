"""`/v1/completions`: one or many prompts in, the text that follows each out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.contract import Reply
from engine.endpoints.choices import Choice, choices_of, usage_of
from engine.endpoints.endpoint import Heading, Prepared
from engine.endpoints.logprobs import completion_logprobs, prompt_logprobs, text_offsets
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
from engine.scheduling.sequence import (
    Constraint,
    SequenceRequest,
    SequenceResult,
    TokenLogprob,
)
from engine.text.text_model import TextModel

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

    def __init__(self, model: TextModel, *, seed: int) -> None:
        self._tokenizer = model.tokenizer
        self._grammars = model.grammars
        self._sequences = TextSequences(model, seed=seed)

    def prepare(self, body: dict[str, Any], heading: Heading) -> _Prepared:
        """Return a sequence for each choice of each prompt."""
        request = read_body(CompletionRequest, body)
        asked = request.asked
        constraint = None if asked is None else self._grammars.constraint(asked)
        terms = _terms(request, constraint)
        prompts = [self._ids(prompt, request, terms) for prompt in request.prompt]
        sequences = self._sequences.of(prompts, request, terms, request_id=heading.request_id)
        return Prepared(sequences, request, heading)

    def finish(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> Reply:
        """Return the text completion, its choices numbered prompt by prompt."""
        request, heading = prepared.context, prepared.heading
        by_prompt = choices_of(prepared.requests, results, request, self._tokenizer)
        shown: list[dict[str, Any]] = []
        for prompt, choices in zip(request.prompt, by_prompt, strict=True):
            echo = self._echo(prompt, choices[0].prompt_ids, request) if request.echo else _Echo()
            shown += [
                self._choice(len(shown) + i, echo, choice, request)
                for i, choice in enumerate(choices)
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
        return Reply(200, answer, usage)

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
            offsets = text_offsets(ids, self._tokenizer, skip_special_tokens=skip)
        if isinstance(prompt, str) and request.truncate_prompt_tokens is None:
            # A tokenizer may write a space before the first word that the prompt does not have.
            added = max(0, len(text) - len(prompt))
            text, offsets = prompt, [max(0, offset - added) for offset in offsets]
        return _Echo(text, tuple(ids), tuple(offsets))

    def _choice(
        self, index: int, echo: _Echo, choice: Choice, request: CompletionRequest
    ) -> dict[str, Any]:
        result = choice.result
        shown = completion_choice(
            index,
            echo.text + choice.text,
            logprobs=None if request.logprobs is None else self._logprobs(echo, result, request),
            finish_reason=result.finish_reason,
            stop_reason=choice.stop_reason,
        )
        if request.return_token_ids:
            shown["prompt_token_ids"] = choice.prompt_ids
            shown["token_ids"] = result.token_ids
        if request.prompt_logprobs is not None:
            entries = result.prompt_logprobs or []
            shown["prompt_logprobs"] = prompt_logprobs(
                [_shortened(entry, request.prompt_logprobs) for entry in entries], self._tokenizer
            )
        return shown

    def _logprobs(
        self, echo: _Echo, result: SequenceResult, request: CompletionRequest
    ) -> dict[str, Any]:
        entries: list[TokenLogprob | None] = [*(result.logprobs or [])]
        if echo.token_ids:
            prompt_entries = result.prompt_logprobs or []
            entries = [
                _shortened(entry, request.logprobs or 0) for entry in prompt_entries
            ] + entries
        offsets = text_offsets(
            result.token_ids,
            self._tokenizer,
            start=len(echo.text),
            skip_special_tokens=request.skip_special_tokens is not False,
        )
        return completion_logprobs(
            entries,
            [*echo.token_ids, *result.token_ids],
            [*echo.offsets, *offsets],
            self._tokenizer,
            as_ids=bool(request.return_tokens_as_token_ids),
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
