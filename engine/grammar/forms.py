"""What was asked of an output, in the form that llguidance takes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast

from llguidance import LLMatcher

from engine.grammar.compiling import check_lark, check_regex
from engine.grammar.gbnf import is_gbnf, lark_of
from engine.grammar.tags import grammar_of_tag
from engine.protocol.automata import check_grammar
from engine.protocol.constraints import Asked, json_layout

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions


def grammar_of(asked: Asked) -> str:
    """Return what was asked for as a grammar; ValueError says why it cannot be."""
    source = asked.source
    match asked.kind:
        case "json_schema":
            layout = cast("JsonCompileOptions", json_layout(asked.whitespace))
            return LLMatcher.grammar_from_json_schema(source, overrides=layout)
        case "regex":
            check_regex(source)
            return LLMatcher.grammar_from_regex(source)
        case "choice":
            texts = [json.dumps(text, ensure_ascii=False) for text in json.loads(source)]
            # As one lexeme: as alternatives of a rule there may be no more than 2,000.
            return LLMatcher.grammar_from_lark("start: ONE\nONE: " + " | ".join(texts))
        case "structural_tag":
            return grammar_of_tag(json.loads(source), asked.whitespace)
        case "lark":
            check_grammar(source)  # of all tools together
            return LLMatcher.grammar_from_lark(source)
        case "grammar":
            lark = lark_of(source) if is_gbnf(source) else source
            check_lark(lark)
            return LLMatcher.grammar_from_lark(lark)
