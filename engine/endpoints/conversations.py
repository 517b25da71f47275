"""What a conversation asks of the engine: its messages as a prompt, and how answers are read."""

from __future__ import annotations

from dataclasses import dataclass

from engine.answers.answer import Reading
from engine.answers.plain import PlainReading
from engine.protocol.chat import ChatCompletionRequest
from engine.protocol.errors import RequestError
from engine.scheduling.sequence import Constraint
from engine.text.text_model import TextModel


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request, the prompt that its messages come to, and how the answers to it are read.

    Each answer is held to the `constraint`.
    """

    request: ChatCompletionRequest
    prompt: str
    reading: Reading
    constraint: Constraint | None


class Conversations:
    """Makes prompts of one model's conversations, by its template."""

    def __init__(self, model: TextModel) -> None:
        self._template = model.chat_template
        self._grammars = model.grammars

    def of(self, request: ChatCompletionRequest, *, created: int) -> Conversation:
        """Return a request as its model reads it; raises `RequestError` where that cannot be."""
        asked = request.asked
        constraint = None if asked is None else self._grammars.constraint(asked)
        prompt = self._prompt_text(request, created)
        return Conversation(request, prompt, PlainReading(), constraint)

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
