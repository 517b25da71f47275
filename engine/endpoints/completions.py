"""`/v1/completions`: one or many prompts in, the text that follows each out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.contract import Reply
from engine.endpoints.generation import Generated, Terms, TextGeneration, usage_of
from engine.endpoints.logprobs import completion_logprobs, prompt_logprobs, text_offsets
from engine.protocol.bodies import completion_body, response_id, usage_body
from engine.protocol.completions import (
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
    Prompt,
    completion_choice,
)
from engine.protocol.requests import read_body
from engine.protocol.routes import COMPLETIONS
from engine.scheduling.sequence import TokenLogprob


@dataclass(frozen=True, slots=True)
class _Echo:
    """What stands before a completion: its prompt when it is echoed, else nothing.

    `text` are the prompt's own characters, `token_ids` its tokens and `offsets` where each begins.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()


class Completions:
    """The endpoint of any text model."""

    route = COMPLETIONS

    def __init__(self, generation: TextGeneration) -> None:
        self._generation = generation
        self._tokenizer = generation.model.tokenizer

    async def reply_to(
        self, body: dict[str, Any], *, model: str, request_id: str, created: int
    ) -> Reply:
        """Answer a completion body; raises `RequestError` for what is wrong in it."""
        request = read_body(CompletionRequest, body)
        prompts = [await self._ids(prompt, request) for prompt in request.prompt]
        generated = await self._generation.run(
            prompts, request, _terms(request), request_id=request_id
        )
        choices: list[dict[str, Any]] = []
        for prompt, ids, results in zip(request.prompt, prompts, generated, strict=True):
            echo = self._echo(prompt, ids, request) if request.echo else _Echo()
            choices += [
                self._choice(len(choices) + i, ids, echo, result, request)
                for i, result in enumerate(results)
            ]
        usage = usage_of(prompts, generated)
        answer = completion_body(
            "text_completion",
            response_id("cmpl", request_id),
            created=created,
            model=model,
            choices=choices,
            usage=usage_body(usage.prompt_tokens, usage.completion_tokens),
        )
        return Reply(200, answer, usage)

    async def _ids(self, prompt: Prompt, request: CompletionRequest) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        return await self._generation.tokenize(
            prompt, param="prompt", add_special_tokens=request.add_special_tokens is not False
        )

    def _echo(self, prompt: Prompt, ids: list[int], request: CompletionRequest) -> _Echo:
        skip = request.skip_special_tokens is not False
        text = self._tokenizer.text(ids, skip_special_tokens=skip)
        offsets = [0] * len(ids)
        if request.logprobs is not None:
            offsets = text_offsets(ids, self._tokenizer, skip_special_tokens=skip)
        if isinstance(prompt, str):
            # A tokenizer may write a space before the first word that the prompt does not have.
            added = max(0, len(text) - len(prompt))
            text, offsets = prompt, [max(0, offset - added) for offset in offsets]
        return _Echo(text, tuple(ids), tuple(offsets))

    def _choice(
        self,
        index: int,
        prompt_ids: list[int],
        echo: _Echo,
        generated: Generated,
        request: CompletionRequest,
    ) -> dict[str, Any]:
        result = generated.result
        choice = completion_choice(
            index,
            echo.text + generated.text,
            logprobs=None if request.logprobs is None else self._logprobs(echo, generated, request),
            finish_reason=result.finish_reason,
            stop_reason=generated.stop_reason,
        )
        if request.return_token_ids:
            choice["prompt_token_ids"] = prompt_ids
            choice["token_ids"] = result.token_ids
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                [
                    _shortened(entry, request.prompt_logprobs)
                    for entry in result.prompt_logprobs or []
                ],
                self._tokenizer,
            )
        return choice

    def _logprobs(
        self, echo: _Echo, generated: Generated, request: CompletionRequest
    ) -> dict[str, Any]:
        result = generated.result
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
        )


def _terms(request: CompletionRequest) -> Terms:
    return Terms(
        prompt_param="prompt",
        max_tokens=request.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=request.logprobs,
        prompt_logprobs=_num_prompt_logprobs(request),
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
