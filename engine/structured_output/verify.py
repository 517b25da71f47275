"""Verification of constrained output, with validators that share nothing with the grammar bitmask.

JSON is validated by jsonschema against the schema as received, regular expressions by `regex`, and
grammars by Lark. Constraints that these cannot read, or that take too long, stay unverified.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import regex
from jsonschema import Draft202012Validator, FormatChecker, SchemaError, validators
from jsonschema.exceptions import ValidationError, best_match
from lark import Lark, LarkError, UnexpectedInput

from tidemill.protocol.constraints.formats import FORMATS
from tidemill.protocol.constraints.request import Kind, OutputConstraint

from .gbnf import is_gbnf, lark_of

_MOST_SECONDS = 2.0
# The time of Earley's parser grows with the cube of the length.
_MOST_PARSED_CHARS = 2_000

_until = ContextVar[float]("until")  # by the monotonic clock


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a verification: `holds`, or the reason `why` not; None if unverified."""

    holds: bool | None
    by: str
    why: str | None = None


class _Unjudged(Exception):
    """The reason why a text could not be verified."""


def verify(text: str, constraint: OutputConstraint) -> Verdict:
    """Return the verdict on a text under its constraint."""
    by, judge = _JUDGES[constraint.kind]
    try:
        reason = judge(text, constraint)
    except _Unjudged as exc:
        return Verdict(None, by, str(exc))
    return Verdict(reason is None, by, reason)


def _json_fault(text: str, constraint: OutputConstraint) -> str | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        return f"it is not valid JSON: {exc}"
    schema = constraint.source if constraint.sent is None else constraint.sent
    source = schema if isinstance(schema, str) else json.dumps(schema)
    limit = _until.set(time.monotonic() + _MOST_SECONDS)
    try:
        fault = best_match(_validator(source).iter_errors(value))
    except _Unjudged:
        raise
    except Exception as exc:  # overflows, dangling references, and the like
        raise _Unjudged(f"the schema could not be evaluated: {exc!r}") from exc
    finally:
        _until.reset(limit)
    return None if fault is None else f"{fault.json_path}: {fault.message[:500]}"


@lru_cache(maxsize=512)
def _validator(source: str) -> Any:
    schema = json.loads(source)
    kind = validators.validator_for(schema, default=Draft202012Validator)
    follow = _in_time(kind.VALIDATORS["$ref"])
    judge = validators.extend(kind, {"pattern": _pattern, "$ref": follow})
    try:
        kind.check_schema(schema)
    except SchemaError as exc:
        raise _Unjudged(f"the schema is invalid for jsonschema: {exc.message[:500]}") from exc
    supported = kind.FORMAT_CHECKER.checkers
    formats = FormatChecker(formats=())
    formats.checkers = {name: supported[name] for name in supported.keys() & FORMATS}
    return judge(schema, format_checker=formats)


def _in_time(follow: Callable[..., Any]) -> Callable[..., Iterator[ValidationError]]:
    """Follow references within the time limit: some double endlessly at each step."""

    def followed(*arguments: Any) -> Iterator[ValidationError]:
        if time.monotonic() > _until.get():
            raise TimeoutError
        yield from follow(*arguments) or ()

    return followed


def _pattern(_: Any, pattern: str, value: object, __: Any) -> Any:
    """Validate `pattern` with a time limit, which jsonschema lacks; in ECMAScript's dialect."""
    if isinstance(value, str) and not regex.search(
        pattern, value, flags=regex.ASCII, timeout=_MOST_SECONDS
    ):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _regex_fault(text: str, constraint: OutputConstraint) -> str | None:
    try:
        match = regex.fullmatch(constraint.source, text, timeout=_MOST_SECONDS)
    except (TimeoutError, regex.error, RecursionError) as exc:
        raise _Unjudged(f"the expression could not be evaluated: {exc!r}") from exc
    return None if match else "the expression does not match the whole text"


def _choice_fault(text: str, constraint: OutputConstraint) -> str | None:
    return None if text in json.loads(constraint.source) else "it is not one of the choices"


def _grammar_fault(text: str, constraint: OutputConstraint) -> str | None:
    if len(text) > _MOST_PARSED_CHARS:
        raise _Unjudged(f"it has more than {_MOST_PARSED_CHARS:,} characters")
    try:
        _parser(constraint.source).parse(text)
    except UnexpectedInput as exc:
        return f"it does not match the grammar: {str(exc)[:500]}"
    return None


@lru_cache(maxsize=512)
def _parser(source: str) -> Lark:
    try:
        grammar = lark_of(source, for_lark=True) if is_gbnf(source) else source
        # The lexemes of GBNF are characters, which rules may divide in any way.
        return Lark(grammar, parser="earley", lexer="dynamic_complete")
    except (LarkError, ValueError, RecursionError) as exc:
        raise _Unjudged(f"the grammar could not be parsed: {str(exc)[:500]}") from exc


def _unjudged(text: str, constraint: OutputConstraint) -> str | None:
    del text
    raise _Unjudged(f"{constraint.kind} has no validator")


_JUDGES: Mapping[Kind, tuple[str, Callable[[str, OutputConstraint], str | None]]] = {
    "json_schema": ("jsonschema", _json_fault),
    "regex": ("regex", _regex_fault),
    "choice": ("equality", _choice_fault),
    "grammar": ("lark", _grammar_fault),
    "lark": ("lark", _grammar_fault),
    "structural_tag": ("nobody", _unjudged),
}
