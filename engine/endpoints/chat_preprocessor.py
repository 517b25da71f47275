"""Chat preprocessing: renders messages to a prompt, and selects the parser of the answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tidemill.protocol.chat import ChatCompletionRequest
from tidemill.protocol.errors import RequestError

from ..parsers.output_parser import ModelOutputParser
from ..parsers.parsed_output import OutputParser, PlainTextParser
from ..parsers.reasoning import ReasoningStart
from ..parsers.registry import ParserSet
from ..scheduling.sequence import Constraint
from ..text.text_model import TextModel
from .constraints import ChatConstraints
from .endpoint import RequestMetadata

# Template variables that switch reasoning off, with their values; the last is Seed-OSS's.
_SWITCHES = {"enable_thinking": False, "thinking": False, "thinking_budget": 0}


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat request, its rendered prompt, the parser of its answers, and its `constraint`."""

    request: ChatCompletionRequest
    prompt: str
    parser: OutputParser
    constraint: Constraint | None
    reasoning_fields: tuple[str, ...]


class ChatPreprocessor:
    """Renders one model's conversations by its chat template; `parsers` parse its output."""

    def __init__(self, model: TextModel, parsers: ParserSet) -> None:
        self._template = model.chat_template
        self._parsers = parsers
        self._parsers_without_calls = parsers.without_calls
        ids = {mark: model.tokenizer.special_id(mark) for mark in parsers.marks}
        self._mark_ids = {mark: token for mark, token in ids.items() if token is not None}
        self._constraints = ChatConstraints(model, self._mark_ids)

    def preprocess(self, request: ChatCompletionRequest, metadata: RequestMetadata) -> Conversation:
        """Return a request with its prompt; raise `RequestError` if it is not supported."""
        prompt = self.prompt_text(request, metadata.created)
        parsers = self._parsers_for(request)
        start = _reasoning_start(parsers, request, prompt)
        return Conversation(
            request,
            prompt,
            self._parser(request, parsers, metadata, start),
            self._constraints.constraint(request, parsers, start)
            if _may_be_constrained(request)
            else None,
            self._parsers.reasoning_fields,
        )

    def prompt_text(self, request: ChatCompletionRequest, created: int) -> str:
        """Return a request's rendered prompt; raise `RequestError` if that is not possible."""
        if self._template is None:
            raise RequestError(
                "This model has no chat template: pass `--chat-template`, or send text to"
                " /v1/completions.",
                param="messages",
                code="chat_template_missing",
            )
        tools = (
            [tool.as_template_reads() for tool in request.offered_tools] if request.tools else []
        )
        if tools and not self._template.knows_tools:
            raise RequestError(
                "This model's chat template does not support tools: pass another one with"
                " `--chat-template`.",
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

    def _parsers_for(self, request: ChatCompletionRequest) -> ParserSet:
        """Return the parsers of a request's answers, which depend on whether it offers tools."""
        if not (request.tools and request.offered_tools):
            return self._parsers_without_calls
        if request.needs_call:
            return self._parsers.with_forced_calls
        if self._parsers.tool_calls is None:
            raise RequestError(
                "Unknown tool-call format for this model: pass `--tool-call-parser`.",
                param="tools",
                code="tools_not_supported",
            )
        return self._parsers

    def _parser(
        self,
        request: ChatCompletionRequest,
        parsers: ParserSet,
        metadata: RequestMetadata,
        start: ReasoningStart,
    ) -> OutputParser:
        if parsers.tool_calls is None and parsers.reasoning is None:
            return PlainTextParser()
        ids = [token for mark, token in self._mark_ids.items() if mark in parsers.marks]
        return ModelOutputParser(
            parsers.without_reasoning if request.separate_reasoning is False else parsers,
            metadata.request_id,
            is_open=start == "open",
            tools={
                tool.function.name: tool.function.parameters or {} for tool in request.offered_tools
            },
            is_single=request.parallel_tool_calls is False,
            is_constrained=request.constrains_calls,
            markers=frozenset(ids),
        )


def _may_be_constrained(request: ChatCompletionRequest) -> bool:
    """Return whether a request constrains its answers; a plain chat does not."""
    budget, tools = request.thinking_token_budget, request.tools
    return request.is_constrained or budget is not None or bool(tools)


def _variables(request: ChatCompletionRequest) -> dict[str, Any]:
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
        if request.reasoning_effort == "none" and not variables.keys() & _SWITCHES.keys():
            variables |= _SWITCHES
    if request.verbosity is not None:
        variables.setdefault("verbosity", request.verbosity)
    return variables


def _reasoning_start(
    parsers: ParserSet, request: ChatCompletionRequest, prompt: str
) -> ReasoningStart:
    """Return where an answer starts: the prompt may open or close the reasoning."""
    if parsers.reasoning is None:
        return "closed"
    if request.continue_final_message:
        return parsers.reasoning.start_continuing("".join(request.messages[-1].texts()))
    return parsers.reasoning.start_after(prompt)
