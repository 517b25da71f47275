"""`/v1/chat/completions`: a conversation in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.contract import Reply
from engine.endpoints.choices import Choice, choices_of, usage_of
from engine.endpoints.endpoint import Heading, Prepared
from engine.endpoints.logprobs import chat_logprobs, prompt_logprobs
from engine.endpoints.sequences import Terms, TextSequences
from engine.protocol.bodies import completion_body, response_id, usage_body
from engine.protocol.chat import ChatCompletionRequest, chat_choice
from engine.protocol.errors import RequestError
from engine.protocol.requests import read_body
from engine.protocol.routes import CHAT_COMPLETIONS
from engine.scheduling.sequence import SequenceRequest, SequenceResult
from engine.text.text_model import TextModel

_Prepared = Prepared[SequenceRequest, ChatCompletionRequest]


class ChatCompletions:
    """The endpoint of a chat model; `seed` keys requests that name none."""

    route = CHAT_COMPLETIONS

    def __init__(self, model: TextModel, *, seed: int) -> None:
        self._template = model.chat_template
        self._tokenizer = model.tokenizer
        self._sequences = TextSequences(model, seed=seed)

    def prepare(self, body: dict[str, Any], heading: Heading) -> _Prepared:
        """Return a sequence for each choice of the conversation's next message."""
        request = read_body(ChatCompletionRequest, body)
        # Templates write the tokens that open a text themselves, so none are added by default.
        prompt_ids = self._sequences.tokenized(
            self._prompt_text(request, heading.created),
            param="messages",
            add_special_tokens=bool(request.add_special_tokens),
        )
        sequences = self._sequences.of(
            [prompt_ids], request, _terms(request), request_id=heading.request_id
        )
        return Prepared(sequences, request, heading)

    def finish(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> Reply:
        """Return the chat completion with one message for each choice."""
        request, heading = prepared.context, prepared.heading
        [choices] = choices_of(prepared.requests, results, request, self._tokenizer)
        usage = usage_of([choices])
        answer = completion_body(
            "chat.completion",
            response_id("chatcmpl", heading.request_id),
            created=heading.created,
            model=heading.model,
            choices=[self._choice(i, choice, request) for i, choice in enumerate(choices)],
            usage=usage_body(usage.prompt_tokens, usage.completion_tokens),
        )
        if request.return_token_ids:
            answer["prompt_token_ids"] = choices[0].prompt_ids
        if request.prompt_logprobs is not None:
            entries = choices[0].result.prompt_logprobs or []
            answer["prompt_logprobs"] = prompt_logprobs(entries, self._tokenizer)
        return Reply(200, answer, usage)

    def _prompt_text(self, request: ChatCompletionRequest, created: int) -> str:
        if self._template is None:
            raise RequestError(
                "This model has no chat template; pass one with --chat-template, or send text to"
                " /v1/completions.",
                param="messages",
                code="chat_template_missing",
            )
        variables = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", request.reasoning_effort)
        goes_on = bool(request.continue_final_message)
        opens = not goes_on and request.add_generation_prompt is not False
        return self._template.render(
            request.messages,
            created=created,
            add_generation_prompt=opens,
            continue_final_message=goes_on,
            documents=request.documents,
            variables=variables,
        )

    def _choice(self, index: int, choice: Choice, request: ChatCompletionRequest) -> dict[str, Any]:
        result = choice.result
        logprobs = None
        if request.logprobs:
            logprobs = chat_logprobs(result.logprobs or [], self._tokenizer)
        shown = chat_choice(
            index,
            _echoed(request) + choice.text,
            logprobs=logprobs,
            finish_reason=result.finish_reason,
            stop_reason=choice.stop_reason,
        )
        if request.return_token_ids:
            shown["token_ids"] = result.token_ids
        return shown


def _terms(request: ChatCompletionRequest) -> Terms:
    old_name = request.max_completion_tokens is None
    return Terms(
        prompt_param="messages",
        max_tokens=request.max_tokens if old_name else request.max_completion_tokens,
        max_tokens_param="max_tokens" if old_name else "max_completion_tokens",
        logprobs=request.num_logprobs,
        prompt_logprobs=request.prompt_logprobs,
    )


def _echoed(request: ChatCompletionRequest) -> str:
    """Return what `echo` puts before the answer: the assistant's message that it goes on with."""
    last = request.messages[-1]
    return "\n".join(last.texts()) if request.echo and last.role == "assistant" else ""
