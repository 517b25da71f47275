"""What a conversation asks of the engine: its messages as a prompt, and how answers are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.answers.answer import Reading
from engine.answers.forms import AnswerForms
from engine.answers.plain import PlainReading
from engine.answers.reading import FormedReading
from engine.answers.thinking import Begins
from engine.endpoints.endpoint import Heading
from engine.endpoints.holds import Holds, holds_calls
from engine.protocol.chat import ChatCompletionRequest
from engine.protocol.errors import RequestError
from engine.scheduling.sequence import Constraint
from engine.text.text_model import TextModel

# What templates call the variables that let a model think, or not.
_SWITCHES = ("enable_thinking", "thinking")


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
    """Makes prompts of one model's conversations, by its template; it answers in `forms`."""

    def __init__(self, model: TextModel, forms: AnswerForms) -> None:
        self._template = model.chat_template
        self._forms = forms
        ids = {mark: model.tokenizer.special_id(mark) for mark in forms.marks}
        self._mark_ids = {mark: token for mark, token in ids.items() if token is not None}
        self._holds = Holds(model, self._mark_ids)

    def of(self, request: ChatCompletionRequest, heading: Heading) -> Conversation:
        """Return a request as its model reads it; raises `RequestError` where that cannot be."""
        prompt = self._prompt_text(request, heading.created)
        forms = self._forms_for(request)
        begins = _begins(forms, request, prompt)
        return Conversation(
            request,
            prompt,
            self._reading(request, forms, heading, begins),
            self._holds.constraint(request, forms, begins),
        )

    def _prompt_text(self, request: ChatCompletionRequest, created: int) -> str:
        if self._template is None:
            raise RequestError(
                "This model has no chat template; pass one with --chat-template, or send text to"
                " /v1/completions.",
                param="messages",
                code="chat_template_missing",
            )
        tools = [tool.as_template_reads() for tool in request.offered_tools]
        if tools and not self._template.knows_tools:
            raise RequestError(
                "The chat template of this model shows it no tools: pass one that does with"
                " --chat-template.",
                param="tools",
                code="tools_not_supported",
            )
        goes_on = bool(request.continue_final_message)
        opens = not goes_on and request.add_generation_prompt is not False
        return self._template.render(
            request.messages,
            created=created,
            add_generation_prompt=opens,
            continue_final_message=goes_on,
            documents=request.documents,
            tools=tools or None,
            variables=_variables(request),
        )

    def _forms_for(self, request: ChatCompletionRequest) -> AnswerForms:
        """Return how the model answers a request, by whether there are tools."""
        if not request.offered_tools:
            return self._forms.without_calls
        if request.needs_call:
            return self._forms.that_must_call
        if self._forms.calls is None:
            raise RequestError(
                "It is not known how this model writes calls of tools: name the form with"
                " --tool-call-parser.",
                param="tools",
                code="tools_not_supported",
            )
        return self._forms

    def _reading(
        self, request: ChatCompletionRequest, forms: AnswerForms, heading: Heading, begins: Begins
    ) -> Reading:
        if forms.calls is None and forms.thinking is None:
            return PlainReading()
        ids = [token for mark, token in self._mark_ids.items() if mark in forms.marks]
        return FormedReading(
            forms.without_thinking if request.separate_reasoning is False else forms,
            heading.request_id,
            is_open=begins == "open",
            tools={
                tool.function.name: tool.function.parameters or {} for tool in request.offered_tools
            },
            is_single=request.parallel_tool_calls is False,
            is_held=holds_calls(request),
            markers=frozenset(ids),
        )


def _variables(request: ChatCompletionRequest) -> dict[str, Any]:
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
        if request.reasoning_effort == "none" and not variables.keys() & set(_SWITCHES):
            variables |= dict.fromkeys(_SWITCHES, False)
    return variables


def _begins(forms: AnswerForms, request: ChatCompletionRequest, prompt: str) -> Begins:
    """Return where an answer begins: the prompt may have opened or closed the thinking."""
    if forms.thinking is None:
        return "closed"
    if request.continue_final_message:
        return forms.thinking.goes_on("".join(request.messages[-1].texts()))
    return forms.thinking.begins_after(prompt)
