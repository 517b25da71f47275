"""Constraints of chat answers: structured outputs, grammars of tool calls, thinking budgets."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tidemill.protocol.chat import ChatCompletionRequest
from tidemill.protocol.constraints.request import (
    JSON_WHITESPACE,
    MAX_SOURCE_CHARS,
    OutputConstraint,
    json_layout,
)
from tidemill.protocol.errors import RequestError

from ..parsers.call_grammar import CallableTool, grammar_of
from ..parsers.harmony import HARMONY
from ..parsers.reasoning import ReasoningStart
from ..parsers.registry import ParserSet
from ..scheduling.sequence import Constraint
from ..structured_output.thinking_budget import ThinkingBudget
from ..structured_output.token_constraints import all_of
from ..text.text_model import TextModel


class ChatConstraints:
    """Builds the constraints of one model's answers; `mark_ids` maps its marks to token ids."""

    def __init__(self, model: TextModel, mark_ids: Mapping[str, int]) -> None:
        self._grammars = model.grammars
        self._tokenizer = model.tokenizer
        self._mark_ids = mark_ids

    def constraint(
        self, request: ChatCompletionRequest, parsers: ParserSet, start: ReasoningStart
    ) -> Constraint | None:
        """Return the constraint of the answers to a request, in these parsers' syntax.

        Only the thinking budget applies to reasoning. Raises `RequestError` for an invalid
        constraint.
        """
        return all_of(
            [
                self._thinking_budget(request, parsers, start),
                self._answer_constraint(request, parsers, start),
            ]
        )

    def _thinking_budget(
        self, request: ChatCompletionRequest, parsers: ParserSet, start: ReasoningStart
    ) -> ThinkingBudget | None:
        budget = request.thinking_token_budget
        if budget in (None, -1):
            return None
        if parsers.reasoning is None:
            raise RequestError(
                "`thinking_token_budget` requires a model with reasoning marks; this model's chat"
                " template has none.",
                param="thinking_token_budget",
            )
        opener = self._tokenizer.encode(parsers.reasoning.opens[0], add_special_tokens=False)
        if start == "closed" or (start == "before" and len(opener) != 1):
            return None
        ends = self._tokenizer.encode(parsers.reasoning.closes[0], add_special_tokens=False)
        first = opener[0] if start == "before" else None
        return ThinkingBudget(budget, tuple(ends), first, self._tokenizer)

    def _answer_constraint(
        self, request: ChatCompletionRequest, parsers: ParserSet, start: ReasoningStart
    ) -> Constraint | None:
        requested = request.output_constraint
        if request.constrains_calls:
            requested = self._call_grammar(request, parsers)
        elif requested is not None and parsers.has_channels:
            return self._grammars.constraint(requested, begins_after=HARMONY.final)
        if requested is None:
            return None
        if parsers.reasoning is None or start == "closed":
            return self._grammars.constraint(requested)
        return self._grammars.constraint(
            requested,
            begins_after=parsers.reasoning.closes[0],
            opened_by=None if start == "open" else parsers.reasoning.opens[0],
        )

    def _call_grammar(self, request: ChatCompletionRequest, parsers: ParserSet) -> OutputConstraint:
        param = "tool_choice" if request.needs_call else "tools"
        assert parsers.tool_calls is not None
        marks = parsers.tool_calls.marks
        syntax = parsers.tool_calls.syntax_for(parsers.template)
        answer = None
        if request.output_constraint is not None and not request.needs_call:
            answer = _grammar_rule(
                request.output_constraint, has_call_mark=syntax.begins.startswith(marks)
            )
        grammar = grammar_of(
            syntax,
            [
                CallableTool(
                    tool.function.name,
                    _schema_with_layout(tool.arguments_schema(), JSON_WHITESPACE),
                )
                for tool in request.callable_tools
            ],
            {mark: self._mark_ids.get(mark) for mark in marks},
            must_call=request.needs_call,
            is_single=request.parallel_tool_calls is False,
            answer=answer,
        )
        if len(grammar) > MAX_SOURCE_CHARS:
            raise RequestError(
                f"`tools` have schemas of {len(grammar):,} characters in total; the limit for"
                f" constrained calls is {MAX_SOURCE_CHARS:,}.",
                param="tools",
            )
        return OutputConstraint("lark", grammar, param)


def _grammar_rule(requested: OutputConstraint, *, has_call_mark: bool) -> str:
    """Return the requested constraint as the body of a grammar rule, an alternative to calls.

    Raises `RequestError` if the grammar cannot separate the two, such as JSON from JSON calls.
    """
    if requested.kind == "json_schema" and has_call_mark:
        return f"%json {_schema_with_layout(json.loads(requested.source), requested.whitespace)}"
    if requested.kind == "choice" and has_call_mark:
        return " | ".join(json.dumps(text) for text in json.loads(requested.source))
    raise RequestError(
        f'`{requested.param}` and `tools` cannot be combined here: set `tool_choice` to "none" or'
        ' "required".',
        param=requested.param,
    )


def _schema_with_layout(schema: Mapping[str, object], whitespace: str) -> str:
    """Return a schema for a grammar, with the whitespace allowed between its tokens."""
    return json.dumps({**schema, "x-guidance": json_layout(whitespace)})
