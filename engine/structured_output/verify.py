"""Verification of constrained output, by validators that share nothing with the grammar bitmask.

JSON is validated by jsonschema against the schema as it was sent; regular expressions by `regex`;
grammars by Lark. Constraints that these cannot read, or take too long over, stay unverified.
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
# Earley's parser takes time that grows with the cube.
_MOST_PARSED_CHARS = 2_000

_until = ContextVar[float]("until")  # by the monotonic clock


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a verification: `holds`, or `why` not; None where it could not be verified."""

    holds: bool | None
    by: str
    why: str | None = None


class _Unjudged(Exception):
    """The reason why a text could not be verified."""


def verify(text: str, asked: OutputConstraint) -> Verdict:
    """Return whether a text keeps to its constraint."""
    by, judge = _JUDGES[asked.kind]
    try:
        why = judge(text, asked)
    except _Unjudged as exc:
        return Verdict(None, by, str(exc))
    return Verdict(why is None, by, why)


def _why_no_json(text: str, asked: OutputConstraint) -> str | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        return f"it is no JSON: {exc}"
    schema = asked.source if asked.sent is None else asked.sent
    source = schema if isinstance(schema, str) else json.dumps(schema)
    limit = _until.set(time.monotonic() + _MOST_SECONDS)
    try:
        fault = best_match(_validator(source).iter_errors(value))
    except _Unjudged:
        raise
    except Exception as exc:  # numbers that overflow, references that lead nowhere, and the like
        raise _Unjudged(f"the schema could not be gone through: {exc!r}") from exc
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
        raise _Unjudged(f"the schema is none to it: {exc.message[:500]}") from exc
    known = kind.FORMAT_CHECKER.checkers
    formats = FormatChecker(formats=())
    formats.checkers = {name: known[name] for name in known.keys() & FORMATS}
    return judge(schema, format_checker=formats)


def _in_time(follow: Callable[..., Any]) -> Callable[..., Iterator[ValidationError]]:
    """Follow references within the time limit: some double at each step, without end."""

    def followed(*arguments: Any) -> Iterator[ValidationError]:
        if time.monotonic() > _until.get():
            raise TimeoutError
        yield from follow(*arguments) or ()

    return followed


def _pattern(_: Any, pattern: str, value: object, __: Any) -> Any:
    """Validate `pattern` with a time limit, which jsonschema lacks; as ECMAScript, not Python."""
    if isinstance(value, str) and not regex.search(
        pattern, value, flags=regex.ASCII, timeout=_MOST_SECONDS
    ):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _why_no_match(text: str, asked: OutputConstraint) -> str | None:
    try:
        match = regex.fullmatch(asked.source, text, timeout=_MOST_SECONDS)
    except (TimeoutError, regex.error, RecursionError) as exc:
        raise _Unjudged(f"the expression could not be gone through: {exc!r}") from exc
    return None if match else "the expression does not match all of it"


def _why_no_choice(text: str, asked: OutputConstraint) -> str | None:
    return None if text in json.loads(asked.source) else "it is none of the choices"


def _why_no_text_of_grammar(text: str, asked: OutputConstraint) -> str | None:
    if len(text) > _MOST_PARSED_CHARS:
        raise _Unjudged(f"it has more than {_MOST_PARSED_CHARS:,} characters")
    try:
        _parser(asked.source).parse(text)
    except UnexpectedInput as exc:
        return f"it is no text of the grammar: {str(exc)[:500]}"
    return None


@lru_cache(maxsize=512)
def _parser(source: str) -> Lark:
    try:
        grammar = lark_of(source, for_lark=True) if is_gbnf(source) else source
        # The lexemes of GBNF are characters, which may be divided among rules in any way.
        return Lark(grammar, parser="earley", lexer="dynamic_complete")
    except (LarkError, ValueError, RecursionError) as exc:
        raise _Unjudged(f"the grammar could not be read: {str(exc)[:500]}") from exc


def _unjudged(text: str, asked: OutputConstraint) -> str | None:
    del text
    raise _Unjudged(f"nobody knows how to judge {asked.kind}")


_JUDGES: Mapping[Kind, tuple[str, Callable[[str, OutputConstraint], str | None]]] = {
    "json_schema": ("jsonschema", _why_no_json),
    "regex": ("regex", _why_no_match),
    "choice": ("equality", _why_no_choice),
    "grammar": ("lark", _why_no_text_of_grammar),
    "lark": ("lark", _why_no_text_of_grammar),
    "structural_tag": ("nobody", _unjudged),
}
