"""What answers of a chat are held to: what was asked for, calls of tools, and where that begins."""

from __future__ import annotations

import json
from collections.abc import Mapping

from engine.answers.forms import AnswerForms
from engine.answers.harmony import HARMONY
from engine.answers.thinking import Begins
from engine.answers.written import Callable, grammar_of
from engine.grammar.named_tokens import all_of
from engine.grammar.thinking_budget import ThinkingBudget
from engine.protocol.chat import ChatCompletionRequest
from engine.protocol.constraints import (
    JSON_WHITESPACE,
    MAX_SOURCE_CHARS,
    Asked,
    json_layout,
)
from engine.protocol.errors import RequestError
from engine.scheduling.sequence import Constraint
from engine.text.text_model import TextModel


class Holds:
    """Makes the constraints of one model's answers; `mark_ids` are those of its special tokens."""

    def __init__(self, model: TextModel, mark_ids: Mapping[str, int]) -> None:
        self._grammars = model.grammars
        self._tokenizer = model.tokenizer
        self._mark_ids = mark_ids

    def constraint(
        self, request: ChatCompletionRequest, forms: AnswerForms, begins: Begins
    ) -> Constraint | None:
        """Return what the answers to a request, written in these forms, are held to.

        What a model thinks before is held to a budget alone. Raises `RequestError` for what cannot
        be.
        """
        return all_of(
            [self._budget(request, forms, begins), self._of_answer(request, forms, begins)]
        )

    def _budget(
        self, request: ChatCompletionRequest, forms: AnswerForms, begins: Begins
    ) -> ThinkingBudget | None:
        budget = request.thinking_token_budget
        if budget in (None, -1):
            return None
        if forms.thinking is None:
            raise RequestError(
                "`thinking_token_budget` is of models that think between marks; by its template"
                " this one does not.",
                param="thinking_token_budget",
            )
        opener = self._tokenizer.encode(forms.thinking.opens[0], add_special_tokens=False)
        if begins == "closed" or (begins == "before" and len(opener) != 1):
            return None
        ends = self._tokenizer.encode(forms.thinking.closes[0], add_special_tokens=False)
        first = opener[0] if begins == "before" else None
        return ThinkingBudget(budget, tuple(ends), first, self._tokenizer)

    def _of_answer(
        self, request: ChatCompletionRequest, forms: AnswerForms, begins: Begins
    ) -> Constraint | None:
        asked = request.asked
        if holds_calls(request):
            asked = self._of_calls(request, forms)
        elif asked is not None and forms.has_channels:
            return self._grammars.constraint(asked, begins_after=HARMONY.final)
        if asked is None:
            return None
        if forms.thinking is None or begins == "closed":
            return self._grammars.constraint(asked)
        return self._grammars.constraint(
            asked,
            begins_after=forms.thinking.closes[0],
            opened_by=None if begins == "open" else forms.thinking.opens[0],
        )

    def _of_calls(self, request: ChatCompletionRequest, forms: AnswerForms) -> Asked:
        param = "tool_choice" if request.needs_call else "tools"
        assert forms.calls is not None
        marks = forms.calls.marks
        written = forms.calls.written(forms.template)
        answer = None
        if request.asked is not None and not request.needs_call:
            answer = _rule(request.asked, stands_apart=written.begins.startswith(marks))
        grammar = grammar_of(
            written,
            [
                Callable(tool.function.name, _schema(tool.arguments_schema(), JSON_WHITESPACE))
                for tool in request.callable_tools
            ],
            {mark: self._mark_ids.get(mark) for mark in marks},
            must_call=request.needs_call,
            is_single=request.parallel_tool_calls is False,
            answer=answer,
        )
        if len(grammar) > MAX_SOURCE_CHARS:
            raise RequestError(
                f"`tools` have schemas of {len(grammar):,} characters; calls are held to at most"
                f" {MAX_SOURCE_CHARS:,}.",
                param="tools",
            )
        return Asked("lark", grammar, param)


def holds_calls(request: ChatCompletionRequest) -> bool:
    """Say whether a grammar says where calls stand in the answers to a request."""
    tools = request.callable_tools
    must_hold = request.asked is not None or request.needs_call
    return bool(tools) and (must_hold or any(tool.function.strict for tool in tools))


def _rule(asked: Asked, *, stands_apart: bool) -> str:
    """Return what was asked for as the body of a rule beside those of calls.

    Raises `RequestError` where it cannot stand there, as JSON cannot beside calls that are JSON.
    """
    if asked.kind == "json_schema" and stands_apart:
        return f"%json {_schema(json.loads(asked.source), asked.whitespace)}"
    if asked.kind == "choice" and stands_apart:
        return " | ".join(json.dumps(text) for text in json.loads(asked.source))
    raise RequestError(
        f"`{asked.param}` and `tools` exclude each other, unless `tool_choice` says whether a tool"
        " is called.",
        param=asked.param,
    )


def _schema(schema: Mapping[str, object], whitespace: str) -> str:
    """Return a schema as it stands in a grammar, with what may stand between its tokens."""
    return json.dumps({**schema, "x-guidance": json_layout(whitespace)})
