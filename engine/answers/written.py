"""How calls of tools are written in each form, and grammars that hold an answer to that.

Grammars are llguidance's Lark. A mark that is a special token is told by its id there: no text is
ever taken for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

NAME = "\0name"
TEXT = "\0text"


@dataclass(frozen=True, slots=True)
class Written:
    """Calls as a model writes them: `prefix`, calls with `between` between them, `suffix`.

    A call is `head`, in which the function's name stands for `NAME`, its arguments and `tail`.
    `between` None is for a form that has one call and no more. `introduces` are what may stand
    before all else, any number of times, and `says` is an answer; in both `TEXT` is any text.
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
        """Return what comes first of calls."""
        return self.prefix + self.head


@dataclass(frozen=True, slots=True)
class Callable:
    """A tool that may be called; `schema` is that of its arguments, as JSON."""

    name: str
    schema: str


LISTED = Written(
    prefix="[", head=f'{{"name": "{NAME}", "arguments": ', tail="}", between=", ", suffix="]"
)
"""A list of JSON objects, for models whose own form is none that a grammar could say."""


def grammar_of(
    written: Written,
    tools: Sequence[Callable],
    marks: Mapping[str, int | None],
    *,
    must_call: bool,
    is_single: bool,
    answer: str | None = None,
) -> str:
    """Return the grammar of an answer whose calls are those of `tools` alone.

    `marks` are all marks of the form, with the ids of those that are special tokens. Where it need
    not call, it is a text, or what `answer`, the body of a rule, allows.
    """
    spelt = _Spelling(marks)
    calls = _rules_of_calls(written, tools, spelt, is_single=is_single)
    before = "intro* " if written.introduces else ""
    rules = ["TEXT: /(.|\\n)*/"]
    if written.introduces:
        rules.append("intro: " + " | ".join(map(spelt, written.introduces)))
    if answer is not None:
        rules.append(f"answer: {answer}")
    if must_call:
        rules = [f"start: {before}calls", *rules, *calls]
    elif answer is not None or written.introduces:
        said = spelt(written.says, text="TEXT" if answer is None else "answer")
        rules = [f"start: {before}(calls | {said})", *rules, *calls]
    else:
        rules += _beside_text(written, tools, spelt, is_single=is_single)
    return "\n".join(rules)


def _rules_of_calls(
    written: Written, tools: Sequence[Callable], spelt: _Spelling, *, is_single: bool
) -> list[str]:
    rules = []
    for i, tool in enumerate(tools):
        head = written.head.replace(NAME, tool.name)
        rules.append(f"call{i}: {spelt(head)} args{i} {spelt(written.tail)}")
        rules.append(f"args{i}: %json {tool.schema}")
    rules.append("call: " + " | ".join(f"call{i}" for i in range(len(tools))))
    more = ""
    if written.between is not None and not is_single:
        more = f"({spelt(written.between)} call)*"
    return [*rules, f"calls: {spelt(written.prefix)} call {more} {spelt(written.suffix)}"]


def _beside_text(
    written: Written, tools: Sequence[Callable], spelt: _Spelling, *, is_single: bool
) -> list[str]:
    """Return the rules of a text in which calls may stand, and what begins one begins no other."""
    first, *_ = spelt.parts(written.begins)
    times = "?" if is_single else "*"
    if first in spelt.special:
        start = [f"start: TEXT (calls TEXT){times}"]
    elif first in spelt.marks:
        # A mark that is text like any other: wherever it stands, a call follows.
        start = [f"start: (lead calls){times} TEXT", f"lead[lazy]: TEXT {json.dumps(first)}"]
        if written.prefix:
            written = replace(written, prefix=written.prefix.removeprefix(first))
        else:
            written = replace(written, head=written.head.removeprefix(first), between=None)
    else:
        start = ["start: calls | OTHER", f"OTHER: /(\\s*[^\\s{re.escape(first[0])}](.|\\n)*)?/"]
    return [*start, *_rules_of_calls(written, tools, spelt, is_single=is_single)]


class _Spelling:
    """Spells texts out in Lark: marks that are special tokens by their ids, all else as strings."""

    def __init__(self, marks: Mapping[str, int | None]) -> None:
        self.marks = frozenset(marks)
        self.special = {mark: token for mark, token in marks.items() if token is not None}
        self._split = re.compile("|".join(map(re.escape, sorted([*marks, TEXT], reverse=True))))

    def parts(self, text: str) -> list[str]:
        """Return marks and what stands between them."""
        found, start = [], 0
        for match in self._split.finditer(text):
            found += [text[start : match.start()], match[0]]
            start = match.end()
        return [part for part in [*found, text[start:]] if part]

    def __call__(self, written: str, *, text: str = "TEXT") -> str:
        """Return it as Lark, empty for nothing; the rule `text` is any text."""
        return " ".join(self._part(part, text) for part in self.parts(written))

    def _part(self, part: str, text: str) -> str:
        if part == TEXT:
            return text
        if part in self.special:
            return f"<[{self.special[part]}]>"
        return json.dumps(part)
