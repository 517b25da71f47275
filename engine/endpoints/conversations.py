"""What a conversation asks of the engine: its messages as a prompt, and how answers are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.answers.answer import Reading
from engine.answers.forms import AnswerForms
from engine.answers.plain import PlainReading
from engine.answers.reading import FormedReading
from engine.endpoints.endpoint import Heading
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
        self._grammars = model.grammars
        self._forms = forms
        ids = {mark: model.tokenizer.special_id(mark) for mark in forms.marks}
        self._marker_ids = {mark: token for mark, token in ids.items() if token is not None}

    def of(self, request: ChatCompletionRequest, heading: Heading) -> Conversation:
        """Return a request as its model reads it; raises `RequestError` where that cannot be."""
        asked = request.asked
        constraint = None if asked is None else self._grammars.constraint(asked)
        prompt = self._prompt_text(request, heading.created)
        return Conversation(request, prompt, self._reading(request, prompt, heading), constraint)

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

    def _reading(self, request: ChatCompletionRequest, prompt: str, heading: Heading) -> Reading:
        has_tools = bool(request.offered_tools)
        if request.needs_call or any(tool.function.strict for tool in request.offered_tools):
            raise RequestError(
                "A call that must come, or that must follow its schema, is not served yet.",
                param="tool_choice" if request.needs_call else "tools",
                code="unsupported_parameter",
            )
        if has_tools and self._forms.calls is None:
            raise RequestError(
                "It is not known how this model writes calls of tools: name the form with"
                " --tool-call-parser.",
                param="tools",
                code="tools_not_supported",
            )
        forms = self._forms if has_tools else self._forms.without_calls
        if not forms.marks:
            return PlainReading()
        ids = [token for mark, token in self._marker_ids.items() if mark in forms.marks]
        if request.separate_reasoning is False:
            forms = forms.without_thinking
        return FormedReading(
            forms,
            heading.request_id,
            is_open=_is_open(forms, request, prompt),
            tools={
                tool.function.name: tool.function.parameters or {} for tool in request.offered_tools
            },
            is_single=request.parallel_tool_calls is False,
            markers=frozenset(ids),
        )


def _variables(request: ChatCompletionRequest) -> dict[str, Any]:
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
        if request.reasoning_effort == "none" and not variables.keys() & set(_SWITCHES):
            variables |= dict.fromkeys(_SWITCHES, False)
    return variables


def _is_open(forms: AnswerForms, request: ChatCompletionRequest, prompt: str) -> bool:
    """Say whether the answer begins inside the thinking: the prompt may have opened it."""
    if forms.thinking is None:
        return False
    if not request.continue_final_message:
        return forms.thinking.is_open_after(prompt)
    return forms.thinking.is_open_in("".join(request.messages[-1].texts()))
