"""`/v1/chat/completions`: a conversation in, the assistant's next message out."""

from __future__ import annotations

from typing import Any

from engine.contract import Reply
from engine.endpoints.generation import Generated, Terms, TextGeneration, usage_of
from engine.endpoints.logprobs import chat_logprobs, prompt_logprobs
from engine.protocol.bodies import completion_body, response_id, usage_body
from engine.protocol.chat import ChatCompletionRequest, chat_choice
from engine.protocol.errors import RequestError
from engine.protocol.requests import read_body
from engine.protocol.routes import CHAT_COMPLETIONS


class ChatCompletions:
    """The endpoint of a chat model."""

    route = CHAT_COMPLETIONS

    def __init__(self, generation: TextGeneration) -> None:
        self._generation = generation

    async def reply_to(
        self, body: dict[str, Any], *, model: str, request_id: str, created: int
    ) -> Reply:
        """Answer a chat body; raises `RequestError` for what is wrong in it."""
        request = read_body(ChatCompletionRequest, body)
        # Templates write the tokens that open a text themselves, so none are added by default.
        prompt_ids = await self._generation.tokenize(
            self._prompt_text(request, created),
            param="messages",
            add_special_tokens=bool(request.add_special_tokens),
        )
        [choices] = await self._generation.run(
            [prompt_ids], request, _terms(request), request_id=request_id
        )
        usage = usage_of([prompt_ids], [choices])
        answer = completion_body(
            "chat.completion",
            response_id("chatcmpl", request_id),
            created=created,
            model=model,
            choices=[self._choice(i, choice, request) for i, choice in enumerate(choices)],
            usage=usage_body(usage.prompt_tokens, usage.completion_tokens),
        )
        if request.return_token_ids:
            answer["prompt_token_ids"] = prompt_ids
        if request.prompt_logprobs is not None:
            entries = choices[0].result.prompt_logprobs or []
            answer["prompt_logprobs"] = prompt_logprobs(entries, self._generation.model.tokenizer)
        return Reply(200, answer, usage)

    def _prompt_text(self, request: ChatCompletionRequest, created: int) -> str:
        template = self._generation.model.chat_template
        if template is None:
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
        return template.render(
            request.messages,
            created=created,
            add_generation_prompt=opens,
            continue_final_message=goes_on,
            documents=request.documents,
            variables=variables,
        )

    def _choice(
        self, index: int, generated: Generated, request: ChatCompletionRequest
    ) -> dict[str, Any]:
        result = generated.result
        logprobs = None
        if request.logprobs:
            logprobs = chat_logprobs(result.logprobs or [], self._generation.model.tokenizer)
        choice = chat_choice(
            index,
            _echoed(request) + generated.text,
            logprobs=logprobs,
            finish_reason=result.finish_reason,
            stop_reason=generated.stop_reason,
        )
        if request.return_token_ids:
            choice["token_ids"] = result.token_ids
        return choice


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
