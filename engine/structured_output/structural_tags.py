"""Structural tags as llguidance's Lark: free text with constrained parts."""

from __future__ import annotations

import json
from typing import Any

from llguidance import regex_to_lark

from tidemill.protocol.constraints.automata import check_grammar, check_joined
from tidemill.protocol.constraints.look_ahead import looks_around, plain_texts
from tidemill.protocol.constraints.request import json_layout

from .compiler import check_lark, check_regex
from .gbnf import is_gbnf, lark_of

_ANY = "/(?s:.*)/"
_ANY_ONE = "/(?s:.)/"


def grammar_of_tag(tree: dict[str, Any], whitespace: str) -> str:
    """Return a tree of formats as a grammar; raise ValueError for unsupported formats."""
    builder = _GrammarBuilder(whitespace)
    start = builder.format(tree)
    rules = "\n".join([f"start: {start}", *builder.rules])
    check_grammar(rules)  # of all tags together
    rules = "\n".join([rules, *builder.terminals])
    grammars = [{"name": "tags", "lark_grammar": rules}, *builder.grammars]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def terminal_of(pattern: str) -> str:
    """Return the body of a terminal for a regex with lookahead; raise ValueError if too large."""
    texts = plain_texts(pattern)
    check_joined(texts)
    return " & ".join(f"/(?:{regex_to_lark(text)})/" for text in texts)


class _GrammarBuilder:
    """Collects the rules of one tree, and grammars in addition to that of the tags."""

    def __init__(self, whitespace: str) -> None:
        self._json_options = json_layout(whitespace)
        self.rules: list[str] = []
        self.terminals: list[str] = []
        self.grammars: list[dict[str, str]] = []

    def format(self, node: dict[str, Any]) -> str:
        """Return a format as the body of a rule."""
        match node["type"]:
            case "const_string":
                return _text(node["value"])
            case "json_schema":
                schema = {**node["json_schema"], "x-guidance": self._json_options}
                return f"%json {json.dumps(schema, ensure_ascii=False)}"
            case "regex":
                return self._regex(node["pattern"])
            case "grammar":
                return self._grammar(node["grammar"])
            case "any_text":
                return f"{_ANY_ONE}*"
            case "sequence":
                return self._rule(" ".join(map(self.format, node["elements"])))
            case "or":
                return self._rule(" | ".join(map(self.format, node["elements"])))
            case "tag":
                return f"{_text(node['begin'])} {self._inside(node)}"
            case "triggered_tags":
                return self._triggered(node)
            case _:
                return self._separated(node)

    def _regex(self, pattern: str) -> str:
        check_regex(pattern)
        if not looks_around(pattern):
            return f"/{regex_to_lark(pattern)}/"
        name = f"LOOKS_AHEAD_{len(self.terminals)}"
        self.terminals.append(f"{name}: {terminal_of(pattern)}")
        return name

    def _inside(self, tag: dict[str, Any]) -> str:
        """Return a tag's part after its beginning; free text ends at the first end mark."""
        if tag["content"]["type"] == "any_text":
            return self._up_to(tag["end"]) if tag["end"] else _ANY
        return f"{self.format(tag['content'])} {_text(tag['end'])}"

    def _triggered(self, node: dict[str, Any]) -> str:
        ways = []
        for trigger in node["triggers"]:
            tags = [tag for tag in node["tags"] if tag["begin"].startswith(trigger)]
            bodies = [f"{_text(tag['begin'][len(trigger) :])} {self._inside(tag)}" for tag in tags]
            if bodies:
                ways.append(f"{self._up_to(trigger)} {self._rule(' | '.join(bodies))}")
        one = self._rule(" | ".join(ways))
        if node["at_least_one"]:  # then it comes first: endless text would never contain one
            first = self._rule(" | ".join(map(self.format, node["tags"])))
            return first if node["stop_after_first"] else f"{first} {one}* {_ANY}"
        return self._rule(f"{one} | {_ANY}") if node["stop_after_first"] else f"{one}* {_ANY}"

    def _separated(self, node: dict[str, Any]) -> str:
        one = self._rule(" | ".join(map(self.format, node["tags"])))
        several = one
        if not node["stop_after_first"]:
            several = self._rule(f"{one} ({_text(node['separator'])} {one})*")
        return several if node["at_least_one"] else f"{several}?"

    def _up_to(self, text: str) -> str:
        """Return free text up to and including the first occurrence of a text."""
        name = f"up_to_{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: {_ANY} {_text(text)}")
        return name

    def _rule(self, body: str) -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _grammar(self, source: str) -> str:
        check_lark(source)
        name = f"grammar_{len(self.grammars)}"
        lark = lark_of(source) if is_gbnf(source) else source
        self.grammars.append({"name": name, "lark_grammar": lark})
        return f"@{name}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
