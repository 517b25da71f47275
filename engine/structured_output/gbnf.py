"""GBNF grammars (llama.cpp's format, XGrammar's EBNF) translated to llguidance's Lark.

Each character is a separate lexeme, so that a rule matches all its texts, regardless of how they
are divided among its parts: a longer lexeme would match greedily.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn

MAX_NESTING = 25
_TOKEN = re.compile(
    r"""
      (?P<space>    (?:\s | \#[^\n]*)+ )
    | (?P<begins>   (?P<rule>[A-Za-z_][\w.-]*) (?:\s | \#[^\n]*)* ::= )
    | (?P<name>     [A-Za-z_][\w.-]* )
    | (?P<text>     "(?:[^"\\\n] | \\.)*" )
    | (?P<class>    \[\^?(?:[^\]\\\n] | \\.)*\] )
    | (?P<times>    \{\s*\d{1,9}\s*(?:,\s*(?:\d{1,9})?\s*)?\} )
    | (?P<mark>     [()|*+?.] )
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x(\w{2})|u(\w{4})|U(\w{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "a": "\a", "f": "\f", "v": "\v", "b": "\b"}
_MARKS = frozenset("\"\\'[]^-/?")


class GrammarError(ValueError):
    """An invalid grammar: the fault and its line."""


class _Token(NamedTuple):
    kind: str
    text: str
    place: int


def is_gbnf(source: str) -> bool:
    """Return whether a grammar is GBNF, judged by the sign between a rule's name and its body."""
    return "::=" in source


def lark_of(source: str, *, for_lark: bool = False) -> str:
    """Return a grammar as llguidance's Lark; raise `GrammarError` with the fault and its place.

    With `for_lark` it uses the Lark library's dialect, which has another syntax for repetitions.
    """
    return _Translation(source, for_lark=for_lark).lark()


class _Translation:
    """Recursive descent over the tokens of one grammar."""

    def __init__(self, source: str, *, for_lark: bool) -> None:
        self._source = source
        self._for_lark = for_lark
        self._tokens = list(self._read())
        self._next = 0
        self._names: dict[str, str] = {}
        for token in self._tokens:
            if token.kind == "begins":
                if token.text in self._names:
                    self._fail(f"rule `{token.text}` is defined twice", token)
                word = re.sub(r"\W", "_", token.text).lower()
                self._names[token.text] = f"{word}_{len(self._names)}"
        if "root" not in self._names:
            raise GrammarError("rule `root`, the start of the grammar, is missing")
        self._names["root"] = "start"

    def lark(self) -> str:
        """Return all rules."""
        lines = []
        while self._peek().kind != "end":
            rule = self._expect("begins", "a rule (a name and `::=`)")
            lines.append(f"{self._names[rule.text]}: {self._alternatives(0)}")
        return "\n".join(lines)

    def _read(self) -> Iterator[_Token]:
        place = 0
        while place < len(self._source):
            match = _TOKEN.match(self._source, place)
            if match is None:
                self._fail("invalid syntax", _Token("", "", place))
            kind = match.lastgroup or ""
            if match["rule"] is not None:
                yield _Token("begins", match["rule"], place)
            elif kind != "space":
                yield _Token(kind, match[0], place)
            place = match.end()
        yield _Token("end", "", place)

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _expect(self, kind: str, wanted: str) -> _Token:
        token = self._peek()
        if token.kind != kind:
            self._fail(f"expected {wanted}", token)
        self._next += 1
        return token

    def _alternatives(self, depth: int) -> str:
        ways = [self._sequence(depth)]
        while self._peek()[:2] == ("mark", "|"):
            self._next += 1
            ways.append(self._sequence(depth))
        return " | ".join(ways)

    def _sequence(self, depth: int) -> str:
        items = []
        while (item := self._item(depth)) is not None:
            items.append(self._repeated(item))
        return " ".join(items)

    def _item(self, depth: int) -> str | None:
        """Return the next part of a sequence; None at its end."""
        token = self._peek()
        if token.kind == "name":
            if token.text not in self._names:
                self._fail(f"rule `{token.text}` is not defined", token)
            part = self._names[token.text]
        elif token.kind == "text":
            text = self._unescaped(token.text[1:-1], token)
            part = json.dumps("".join(text), ensure_ascii=False)
        elif token.kind == "class":
            part = self._class(token)
        elif token[:2] == ("mark", "."):
            part = "/(?s:.)/"
        elif token[:2] == ("mark", "("):
            return self._group(depth)
        else:
            return None
        self._next += 1
        return part

    def _group(self, depth: int) -> str:
        opening = self._peek()
        if depth == MAX_NESTING:
            self._fail(f"groups are nested more than {MAX_NESTING} deep", opening)
        self._next += 1
        inside = self._alternatives(depth + 1)
        closing = self._peek()
        if closing[:2] != ("mark", ")"):
            self._fail("expected `)`", closing)
        self._next += 1
        return f"({inside})"

    def _repeated(self, item: str) -> str:
        """Return a part with its repetition."""
        token = self._peek()
        is_sign = token.kind == "mark" and token.text in "*+?"
        if token.kind != "times" and not is_sign:
            return item
        self._next += 1
        again = self._peek()
        if again.kind == "times" or (again.kind == "mark" and again.text in "*+?"):
            self._fail("a repetition is repeated: put it in a group", again)
        times = re.sub(r"\s", "", token.text)
        if is_sign or not self._for_lark:
            return item + times
        least, is_range, most = times.strip("{}").partition(",")
        if is_range and not most:
            return f"{item}~{least} {item}*"
        return f"{item}~{least}" + (f"..{most}" if is_range else "")

    def _class(self, token: _Token) -> str:
        """Return a character class as a regular expression, with each character as a code point."""
        inside = token.text[1:-1]
        negation = "^" if inside.startswith("^") else ""
        characters = self._unescaped(inside[len(negation) :], token, keep=lambda sign: f"\\{sign}")
        parts, place = "", 0
        while place < len(characters):
            first = characters[place]
            is_range = characters[place + 1 : place + 2] == ["-"] and place + 2 < len(characters)
            last = characters[place + 2] if is_range else first
            low, high = ord(first[-1]), ord(last[-1])
            if low > high:
                self._fail(f"a range in {token.text} ends before it begins", token)
            parts += f"\\U{low:08X}" + (f"-\\U{high:08X}" if is_range else "")
            place += 3 if is_range else 1
        if not parts:
            self._fail("the character class is empty", token)
        return f"/[{negation}{parts}]/"

    def _unescaped(
        self, text: str, token: _Token, keep: Callable[[str], str] = lambda sign: sign
    ) -> list[str]:
        """Return characters without escapes; `keep` marks an escaped character."""
        characters: list[str] = []
        place = 0
        while place < len(text):
            match = _ESCAPE.match(text, place) if text[place] == "\\" else None
            if match is None:
                characters.append(text[place])
                place += 1
                continue
            *codes, sign = match.groups()
            code = next((code for code in codes if code is not None), None)
            characters.append(
                self._of_code(code, token) if code else self._of_sign(sign or "", token, keep)
            )
            place = match.end()
        return characters

    def _of_code(self, code: str, token: _Token) -> str:
        try:
            character = chr(int(code, 16))
            character.encode()
        except (ValueError, OverflowError):
            self._fail(f"{code} is not a valid code point", token)
        return character

    def _of_sign(self, sign: str, token: _Token, keep: Callable[[str], str]) -> str:
        if sign in _ESCAPED:
            return _ESCAPED[sign]
        if sign not in _MARKS:
            self._fail(f"\\{sign} is not a valid escape", token)
        return keep(sign)

    def _fail(self, words: str, token: _Token) -> NoReturn:
        line = self._source.count("\n", 0, token.place) + 1
        column = token.place - self._source.rfind("\n", 0, token.place)
        excerpt = self._source[token.place : token.place + 20].split("\n")[0]
        raise GrammarError(f"{words}; line {line}, column {column}, at {excerpt!r}")
