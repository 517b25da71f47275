"""Check of constraints without a model: compiles each distinct one once, with a token per byte."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from hashlib import blake2b
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel

from tidemill.protocol.chat import ChatCompletionRequest
from tidemill.protocol.constraints.request import ConstrainedRequest, OutputConstraint
from tidemill.protocol.errors import RequestError

from ..text.stop_patterns import StopPattern
from .grammar import compile_grammar, grammar_of, pattern_fault, refusal

MAX_CHECK_SECONDS = 60.0
_DIGEST_BYTES = 16
# Errors of grammars that name tokens of the model's own vocabulary.
_OF_VOCABULARY = ("unknown special token", "Token range end too large")


class ConstraintCheck:
    """Compiles the constraints of requests like an engine, each distinct one once.

    Results are cached by content, in about 100 bytes each. After `max_seconds` of compiling,
    constraints that are not cached stay unchecked: `num_unchecked` counts their requests.
    """

    def __init__(self, max_seconds: float = MAX_CHECK_SECONDS) -> None:
        self._errors: dict[bytes, str | None] = {}
        self._seconds_left = max_seconds
        self.num_compiled = 0
        self.num_unchecked = 0

    def check(self, request: BaseModel) -> None:
        """Raise the `RequestError` of the first constraint of a request that does not compile."""
        is_checked = [self._check(each) for each in _constraints_of(request)]
        self.num_unchecked += not all(is_checked)

    def _check(self, constraint: _Constraint) -> bool:
        """Check one constraint; return whether it could be checked, or raise its error."""
        content = constraint.content.encode("utf-8", "surrogatepass")
        key = blake2b(content, digest_size=_DIGEST_BYTES).digest()
        if key not in self._errors:
            if self._seconds_left <= 0:
                return False
            start = time.monotonic()
            self._errors[key] = constraint.compile()
            self._seconds_left -= time.monotonic() - start
            self.num_compiled += 1
        if (reason := self._errors[key]) is not None:
            raise constraint.error(reason)
        return True


class _Constraint(NamedTuple):
    """A constraint by its content: `compile` returns the reason for a failure, if any."""

    content: str
    compile: Callable[[], str | None]
    error: Callable[[str], RequestError]


def _constraints_of(request: BaseModel) -> Iterator[_Constraint]:
    for constraint in _output_constraints(request):
        content = f"{constraint.kind}\0{constraint.whitespace}\0{constraint.source}"
        yield _Constraint(content, partial(_reason, constraint), partial(refusal, constraint.param))
    for pattern in getattr(request, "stop_regex", None) or ():
        error = partial(RequestError, param="stop_regex")
        yield _Constraint(f"stop_regex\0{pattern}", partial(_reason_of_stop, pattern), error)


def _output_constraints(request: BaseModel) -> Iterator[OutputConstraint]:
    calls = [*_call_constraints(request)] if isinstance(request, ChatCompletionRequest) else []
    yield from calls
    must_call = isinstance(request, ChatCompletionRequest) and bool(calls) and request.needs_call
    # If a call is required, nothing else constrains the output.
    if isinstance(request, ConstrainedRequest) and not must_call and request.output_constraint:
        yield request.output_constraint


def _call_constraints(request: ChatCompletionRequest) -> Iterator[OutputConstraint]:
    if request.constrains_calls:
        callable_tools = set(map(id, request.callable_tools))
        for place, tool in enumerate(request.tools or ()):
            if id(tool) in callable_tools:
                schema = json.dumps(tool.arguments_schema(), ensure_ascii=False)
                param = f"tools.{place}.function.parameters"
                yield OutputConstraint("json_schema", schema, param)


def _reason(constraint: OutputConstraint) -> str | None:
    try:
        result, _ = compile_grammar(_byte_tokens(), grammar_of(constraint))
    except ValueError as exc:
        return str(exc)
    if isinstance(result, LLMatcher) or any(words in result for words in _OF_VOCABULARY):
        return None
    fault = pattern_fault(constraint.source) if constraint.kind == "json_schema" else None
    return fault or result


def _reason_of_stop(pattern: str) -> str | None:
    try:
        StopPattern(pattern)
    except RequestError as exc:
        return exc.message
    return None


@lru_cache(maxsize=1)
def _byte_tokens() -> LLTokenizer:
    return LLTokenizer("byte")
