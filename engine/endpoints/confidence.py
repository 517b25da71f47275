"""Confidence of constrained answers, field by field, from the choices of their tokens.

A token counts with its probability among the tokens that the constraint allowed; a forced token
does not count. For the distribution of a value with few alternatives, the paths that the answer did
not take are read by further requests, until each leads to one value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from tidemill.protocol.constraints.finite_values import MAX_VALUES, SchemaValues, value_text
from tidemill.protocol.constraints.request import OutputConstraint
from tidemill.protocol.constraints.schema_facts import pointer_part

from ..scheduling.sequence import Sampling, SequenceRequest, SequenceResult
from ..scheduling.token_choices import TokenChoice
from ..structured_output.token_constraints import Resumed
from ..text.tokenizer import Tokenizer
from .choices import FinishedChoice
from .endpoint import Prepared
from .value_distribution import (
    AFTER_JSON,
    AnswerTokens,
    Distribution,
    Path,
    PathReadings,
    distribution_of,
)

_SPACE = " \t\r\n"
_DECODER = json.JSONDecoder()
# A path is read with the likeliest tokens after it, most of which are the rest of a value.
_READ_TOKENS = 4
_MAX_PATHS = 64  # of a choice


class _Node(NamedTuple):
    """A value of a JSON text: its pointer, its span in characters, and its schema."""

    pointer: str
    start: int
    end: int
    schema: Any


class ScoredCall(NamedTuple):
    """A tool call as the model wrote it, with the `schema` of its arguments."""

    name: str
    arguments: str
    schema: Mapping[str, Any]


class ScoredAnswer(NamedTuple):
    """A choice, its constrained `text` without tool calls, and the constrained `calls`."""

    choice: FinishedChoice
    text: str = ""
    calls: Sequence[ScoredCall] = ()


class AnswersConfidence:
    """Confidence of a body's answers, from the results of their requests and of further ones.

    The requests of the answers are the first of `prepared`. `constraint` is that of texts, and
    `functions` are the names that calls may have.
    """

    def __init__(
        self,
        prepared: Prepared[SequenceRequest, Any],
        results: Sequence[SequenceResult],
        answers: Sequence[ScoredAnswer],
        *,
        constraint: OutputConstraint | None,
        tokenizer: Tokenizer,
        functions: Sequence[str] = (),
    ) -> None:
        self._prepared, count = prepared, len(answers)
        self.fields: list[dict[str, Any] | None] = []
        self._readings: list[PathReadings] = []
        known = _known_choices(prepared.requests[count:], results[count:])
        for answer in answers:
            result = answer.choice.result
            readings = PathReadings(known.get(tuple(answer.choice.prompt_ids), {}))
            tokens = AnswerTokens.of(result.token_ids, result.token_choices, tokenizer, readings)
            self.fields.append(_fields_of(answer, tokens, constraint, functions))
            self._readings.append(readings)

    def extended(self) -> Prepared[SequenceRequest, Any] | None:
        """Return the body with requests for paths whose values are unknown; None without any."""
        requests = self._prepared.requests
        further = [
            _path_request(request, path)
            for request, readings in zip(requests, self._readings, strict=False)
            for path in sorted(readings.wanted, key=readings.wanted.__getitem__)[-_MAX_PATHS:]
            if len(readings.known) < _MAX_PATHS and len(path) < request.max_tokens
        ]
        return replace(self._prepared, requests=[*requests, *further]) if further else None


ConfidenceOf = Callable[
    [Prepared[SequenceRequest, Any], Sequence[SequenceResult]], AnswersConfidence
]
"""A function that returns the confidence of the answers to a body."""


def _known_choices(
    requests: Sequence[SequenceRequest], results: Sequence[SequenceResult]
) -> Mapping[Path, Mapping[Path, TokenChoice]]:
    """Return the choices that further requests read, by the prompts and the tokens after them."""
    known: dict[Path, dict[Path, TokenChoice]] = {}
    for request, result in zip(requests, results, strict=True):
        assert isinstance(request.constraint, Resumed)
        path = request.constraint.token_ids
        prompt = tuple(request.prompt_ids[: len(request.prompt_ids) - len(path)])
        for token_id, choice in zip(result.token_ids, result.token_choices, strict=True):
            only = TokenChoice(None, np.array([token_id], np.int32), np.zeros(1, np.float32))
            known.setdefault(prompt, {})[path] = only if choice.logprob is None else choice
            path = (*path, token_id)
    return known


def _path_request(request: SequenceRequest, path: Path) -> SequenceRequest:
    """Return the request that reads the choices after a path of a constrained output."""
    assert request.constraint is not None
    return replace(
        request,
        prompt_ids=[*request.prompt_ids, *path],
        max_tokens=min(_READ_TOKENS, request.max_tokens - len(path)),
        min_tokens=0,
        sampling=Sampling(temperature=0.0, reads_confidence=True),
        stop_text=None,
        repetition=None,
        prompt_logprobs=None,
        constraint=Resumed(request.constraint, path),
    )


def _fields_of(
    answer: ScoredAnswer,
    tokens: AnswerTokens,
    constraint: OutputConstraint | None,
    functions: Sequence[str],
) -> dict[str, Any] | None:
    """Return the confidence of an answer's values by JSON pointer; `""` is the whole text.

    Pointers into tool calls are those of the message, and continue in the arguments. None for an
    answer that its constraint did not end, and for a free text.
    """
    choice, text = answer.choice, answer.text
    if choice.result.finish_reason != "stop" or choice.stop_reason is not None:
        return None
    try:
        if answer.calls:
            return _call_fields(tokens, answer.calls, functions)
        located = tokens.last(text.encode())
        if not text or constraint is None or located is None:
            return None
        if constraint.kind != "json_schema":
            return {"": _whole_text(located, text, constraint)}
        return _fields(located, text, json.loads(constraint.source))
    except (ValueError, RecursionError):
        return None  # a text that only `stop` or a token limit can leave


def _call_fields(
    tokens: AnswerTokens, calls: Sequence[ScoredCall], functions: Sequence[str]
) -> dict[str, Any] | None:
    """Return the confidence of each call's name and arguments; None if one is not in the tokens.

    The last call is located first, because reasoning may mention calls.
    """
    fields: dict[str, Any] = {}
    end = len(tokens.data)
    for number, call in reversed([*enumerate(calls)]):
        arguments = tokens.last(call.arguments.encode(), end)
        name = arguments and tokens.last(call.name.encode(), arguments.start)
        if arguments is None or name is None:
            return None
        end, pointer = name.start, f"/tool_calls/{number}/function"
        inner = _fields(arguments, call.arguments, call.schema)
        fields = {
            f"{pointer}/name": _name(tokens, end, call.name, functions),
            **{f"{pointer}/arguments{place}": field for place, field in inner.items()},
            **fields,
        }
    return fields


def _name(tokens: AnswerTokens, begin: int, name: str, functions: Sequence[str]) -> dict[str, Any]:
    """Return the confidence of a function's name; all names have the same text after them."""
    end = begin + len(name.encode())
    if len(functions) <= MAX_VALUES:
        texts, after = [one.encode() for one in functions], tokens.data[end : end + 1]
        found = distribution_of(tokens, texts, begin, end, after=after)
        if found is not None:
            return _finite(found, functions)
    return {"confidence": _product(tokens, begin, end, is_open=True)}


def _whole_text(tokens: AnswerTokens, text: str, constraint: OutputConstraint) -> dict[str, Any]:
    begin = tokens.start
    end = begin + len(text.encode())
    if constraint.kind == "choice":
        choices = json.loads(constraint.source)
        if len(choices) <= MAX_VALUES:
            texts = [one.encode() for one in choices]
            found = distribution_of(tokens, texts, begin, end)
            if found is not None:
                return _finite(found, choices)
    return {"confidence": _product(tokens, begin, end, is_open=True)}


def _fields(tokens: AnswerTokens, text: str, root: Any) -> dict[str, Any]:
    values = SchemaValues(root)
    offsets = [*accumulate((len(char.encode()) for char in text), initial=tokens.start)]
    fields: dict[str, Any] = {}
    start = len(text) - len(text.lstrip(_SPACE))
    for node in _nodes(text, start, "", root, values):
        fields[node.pointer] = _value(tokens, node, text, values, offsets)
    return fields


def _value(
    tokens: AnswerTokens, node: _Node, text: str, values: SchemaValues, offsets: Sequence[int]
) -> dict[str, Any]:
    """Return the confidence of one value, with the distribution if its schema has few values."""
    first = text[node.start]
    begin, end = offsets[node.start], offsets[node.end]
    quote = int(first == '"' and values.is_text(node.schema))  # it chooses nothing
    begin += quote
    if first not in "{[" and (finite := values.finite(node.schema)) is not None:
        texts = [value_text(value)[quote:].encode() for value in finite]
        may_indent = tokens.data[begin - 1 : begin] != b'"'
        found = distribution_of(tokens, texts, begin, end, after=AFTER_JSON, may_indent=may_indent)
        if found is not None:
            return _finite(found, finite)
    # Another digit may follow a number, so the token after it is part of its choice.
    is_open = first not in '"{[tfn'
    return {"confidence": _product(tokens, begin, end, is_open=is_open)}


def _finite(found: Distribution, values: Sequence[Any]) -> dict[str, Any]:
    if found.is_forced:
        return {"confidence": None}
    field: dict[str, Any] = {
        "confidence": found.probabilities[found.chosen],
        "probabilities": [
            {"value": value, "probability": probability}
            for value, probability in zip(values, found.probabilities, strict=True)
        ],
    }
    if found.undecided:
        field["undecided"] = [
            {"values": [values[i] for i in sorted(places)], "probability": mass}
            for places, mass in found.undecided.items()
        ]
    return field


def _product(tokens: AnswerTokens, begin: int, end: int, *, is_open: bool) -> float | None:
    """Return the probability of a span's tokens; None if all of them were forced."""
    logprobs = [tokens.choices[place].logprob for place in tokens.span(begin, end, is_open=is_open)]
    free = [logprob for logprob in logprobs if logprob is not None]
    return math.exp(math.fsum(free)) if free else None


def _nodes(
    text: str, start: int, pointer: str, schema: Any, values: SchemaValues
) -> Iterator[_Node]:
    """Yield the value at a position and all values in it, each container before its values.

    Raises ValueError for invalid JSON.
    """
    _, end = _DECODER.raw_decode(text, start)
    yield _Node(pointer, start, end, schema)
    if text[start] not in "{[":
        return
    is_object, position, number = text[start] == "{", _skip(text, start + 1), 0
    while text[position] not in "]}":
        key: str | int = number
        if is_object:
            key, position = _DECODER.raw_decode(text, position)
            position = _skip(text, _skip(text, position) + 1)
        inner = f"{pointer}/{pointer_part(str(key))}"
        yield from _nodes(text, position, inner, values.member(schema, key), values)
        position = _skip(text, _DECODER.raw_decode(text, position)[1])
        if text[position] == ",":
            position = _skip(text, position + 1)
        number += 1


def _skip(text: str, position: int) -> int:
    while text[position] in _SPACE:
        position += 1
    return position
