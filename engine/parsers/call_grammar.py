"""Call grammar: the syntax of tool calls in each format, and grammars that constrain answers to it.

Grammars are in llguidance's Lark. A mark that is a special token appears in them by its id, so that
text is never mistaken for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

NAME = "\0name"
INDEX = "\0index"
TEXT = "\0text"


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Syntax of a model's calls: `prefix`, calls with `between` between them, `suffix`.

    A call is `head`, with `NAME` for the function's name and `INDEX` for a number that the model
    counts, its arguments and `tail`. `between` is None if only one call is possible. `introduces`
    may precede everything, any number of times, and `says` is an answer without calls; in both
    `TEXT` is any text.
    """

    head: str
    tail: str = ""
    prefix: str = ""
    between: str | None = ""
    suffix: str = ""
    introduces: tuple[str, ...] = ()
    says: str = TEXT

    @property
    def begins(self) -> str:
        """Return the text that calls begin with."""
        return self.prefix + self.head


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that may be called; `schema` is the JSON schema of its arguments."""

    name: str
    schema: str


LISTED_SYNTAX = CallSyntax(
    prefix="[", head=f'{{"name": "{NAME}", "arguments": ', tail="}", between=", ", suffix="]"
)
"""A list of JSON objects, for models whose syntax cannot be expressed in a grammar."""


def grammar_of(
    syntax: CallSyntax,
    tools: Sequence[CallableTool],
    marks: Mapping[str, int | None],
    *,
    must_call: bool,
    is_single: bool,
    answer: str | None = None,
) -> str:
    """Return the grammar of an answer whose calls are limited to `tools`.

    `marks` are all marks of the syntax, with the ids of special tokens. Unless it `must_call`, an
    answer may be a text, or match `answer`, the body of a rule.
    """
    spelling = _Spelling(marks)
    calls = _rules_of_calls(syntax, tools, spelling, is_single=is_single)
    before = "intro* " if syntax.introduces else ""
    rules = ["TEXT: /(.|\\n)*/"]
    if INDEX in syntax.head:
        rules.append("INDEX: /[0-9]+/")
    if syntax.introduces:
        rules.append("intro: " + " | ".join(map(spelling, syntax.introduces)))
    if answer is not None:
        rules.append(f"answer: {answer}")
    if must_call:
        rules = [f"start: {before}calls", *rules, *calls]
    elif answer is not None or syntax.introduces:
        says = spelling(syntax.says, text="TEXT" if answer is None else "answer")
        rules = [f"start: {before}(calls | {says})", *rules, *calls]
    else:
        rules += _text_with_calls(syntax, tools, spelling, is_single=is_single)
    return "\n".join(rules)


def _rules_of_calls(
    syntax: CallSyntax, tools: Sequence[CallableTool], spelling: _Spelling, *, is_single: bool
) -> list[str]:
    rules = []
    for i, tool in enumerate(tools):
        head = syntax.head.replace(NAME, tool.name)
        rules.append(f"call{i}: {spelling(head)} args{i} {spelling(syntax.tail)}")
        rules.append(f"args{i}: %json {tool.schema}")
    rules.append("call: " + " | ".join(f"call{i}" for i in range(len(tools))))
    more = ""
    if syntax.between is not None and not is_single:
        more = f"({spelling(syntax.between)} call)*"
    return [*rules, f"calls: {spelling(syntax.prefix)} call {more} {spelling(syntax.suffix)}"]


def _text_with_calls(
    syntax: CallSyntax, tools: Sequence[CallableTool], spelling: _Spelling, *, is_single: bool
) -> list[str]:
    """Return the rules of a text that contains calls; only calls may begin like a call."""
    first, *_ = spelling.parts(syntax.begins)
    times = "?" if is_single else "*"
    if first in spelling.special:
        start = [f"start: TEXT (calls TEXT){times}"]
    elif first in spelling.marks:
        # A mark of ordinary text: a call follows every occurrence.
        start = [f"start: (lead calls){times} TEXT", f"lead[lazy]: TEXT {json.dumps(first)}"]
        if syntax.prefix:
            syntax = replace(syntax, prefix=syntax.prefix.removeprefix(first))
        else:
            syntax = replace(syntax, head=syntax.head.removeprefix(first), between=None)
    else:
        start = ["start: calls | OTHER", f"OTHER: /(\\s*[^\\s{re.escape(first[0])}](.|\\n)*)?/"]
    return [*start, *_rules_of_calls(syntax, tools, spelling, is_single=is_single)]


class _Spelling:
    """Spells texts in Lark: special tokens as ids, everything else as strings."""

    def __init__(self, marks: Mapping[str, int | None]) -> None:
        self.marks = frozenset(marks)
        self.special = {mark: token for mark, token in marks.items() if token is not None}
        self._split = re.compile(
            "|".join(map(re.escape, sorted([*marks, TEXT, INDEX], reverse=True)))
        )

    def parts(self, text: str) -> list[str]:
        """Return marks and the texts between them."""
        parts, start = [], 0
        for match in self._split.finditer(text):
            parts += [text[start : match.start()], match[0]]
            start = match.end()
        return [part for part in [*parts, text[start:]] if part]

    def __call__(self, syntax: str, *, text: str = "TEXT") -> str:
        """Return the text in Lark, or an empty string; the rule `text` matches any text."""
        return " ".join(self._part(part, text) for part in self.parts(syntax))

    def _part(self, part: str, text: str) -> str:
        if part == TEXT:
            return text
        if part == INDEX:
            return "INDEX"
        if part in self.special:
            return f"<[{self.special[part]}]>"
        return json.dumps(part)
