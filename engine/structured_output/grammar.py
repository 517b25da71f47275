"""Grammars of structured output requests, and their compilation with a vocabulary's tokens.

This module needs no model, so that a file can be checked without one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, cast

from llguidance import LLMatcher, LLTokenizer

from tidemill.protocol.constraints.automata import check_grammar
from tidemill.protocol.constraints.look_ahead import looks_around
from tidemill.protocol.constraints.request import OutputConstraint, json_layout
from tidemill.protocol.constraints.schema_facts import pointer_part
from tidemill.protocol.errors import RequestError

from .compiler import MAX_SECONDS, check_lark, check_regex, compiled
from .gbnf import is_gbnf, lark_of
from .structural_tags import grammar_of_tag, terminal_of

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_REGEX_ERROR = re.compile(
    r"regex parse error:\n {4}(?P<regex>[^\n]*)\n(?:.*\n)?error: (?P<reason>[^\n]*)", re.DOTALL
)
_ANCHOR_ERROR = re.compile(
    r"lookarounds not supported yet; (?P<kind>\w+) in regex /(?P<regex>[^\n]*)/"
)
_ANCHORS = {
    "Start": "`^` except at the start",
    "End": "`$` except at the end",
    "WordUnicode": r"the word boundary `\b`",
    "WordUnicodeNegate": r"`\B`",
}
_MAX_PATTERNS = 2_000
_PLACE = re.compile(r"^at (\d+)\((\d+)\): ")
# The compiler's name for a grammar without any text.
_EMPTY = "NoExtensionBias"


def grammar_of(constraint: OutputConstraint) -> str:
    """Return the grammar of a structured output request; raise ValueError if there is none."""
    source = constraint.source
    match constraint.kind:
        case "json_schema":
            layout = cast("JsonCompileOptions", json_layout(constraint.whitespace))
            return LLMatcher.grammar_from_json_schema(source, overrides=layout)
        case "regex":
            check_regex(source)
            if looks_around(source):
                return LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {terminal_of(source)}")
            return LLMatcher.grammar_from_regex(source)
        case "choice":
            texts = [json.dumps(text, ensure_ascii=False) for text in json.loads(source)]
            # As one lexeme: a rule may have at most 2,000 alternatives.
            return LLMatcher.grammar_from_lark("start: ONE\nONE: " + " | ".join(texts))
        case "structural_tag":
            return grammar_of_tag(json.loads(source), constraint.whitespace)
        case "lark":
            check_grammar(source)  # of all tools together
            return LLMatcher.grammar_from_lark(source)
        case "grammar":
            lark = lark_of(source) if is_gbnf(source) else source
            check_lark(lark)
            return LLMatcher.grammar_from_lark(lark)


def compile_grammar(tokens: LLTokenizer, grammar: str) -> tuple[LLMatcher | str, float]:
    """Return the matcher of a grammar, or its error, and the CPU seconds that it took."""
    try:
        matcher, seconds = compiled(tokens, grammar)
    except TimeoutError:
        return f"it takes more than {MAX_SECONDS:g} seconds to compile", 0.0
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return error_summary(matcher.get_error()), 0.0
    return matcher, seconds


@lru_cache(maxsize=64)
def pattern_fault(source: str) -> str | None:
    """Return the fault of the first invalid pattern of a JSON schema, with its place."""
    for place, pattern in islice(_patterns(json.loads(source), ""), _MAX_PATTERNS):
        schema = json.dumps({"type": "string", "pattern": pattern})
        error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
        if (match := _REGEX_ERROR.search(error)) is not None:
            return f"`{place}` is {pattern!r}: {match['reason']}"
        if (match := _ANCHOR_ERROR.search(error)) is not None:
            return f"`{place}` is {pattern!r}: {_anchor(match['kind'])}"
    return None


def _patterns(node: object, place: str) -> Iterator[tuple[str, str]]:
    """Yield the JSON pointers and texts of possible patterns in a schema."""
    if isinstance(node, list):
        for number, each in enumerate(node):
            yield from _patterns(each, f"{place}/{number}")
    elif isinstance(node, dict):
        for name, value in node.items():
            inner = f"{place}/{pointer_part(name)}"
            if name == "pattern" and isinstance(value, str):
                yield inner, value
            elif place.endswith("/patternProperties"):
                yield inner, name
            yield from _patterns(value, inner)


def _anchor(kind: str) -> str:
    return f"{_ANCHORS.get(kind, 'an anchor')} is not supported"


def error_summary(error: str) -> str:
    """Return an error of llguidance as one line, without internals and carets."""
    text = error.split("\n<", 1)[0].strip()
    if text == _EMPTY:
        return "no text matches it"
    if (match := _REGEX_ERROR.search(text)) is not None:
        return f"{match['regex']!r} is not a valid regular expression: {match['reason']}"
    if (match := _ANCHOR_ERROR.search(text)) is not None:
        return f"{match['regex']!r} is not supported: {_anchor(match['kind'])}"
    return _PLACE.sub(r"line \1, column \2: ", text.split("\n", 1)[0])


def refusal(param: str, words: str) -> RequestError:
    """Return the error for a constraint that cannot be compiled."""
    return RequestError(
        f"`{param}` is not a supported constraint: {words}", param=param, code="invalid_constraint"
    )
