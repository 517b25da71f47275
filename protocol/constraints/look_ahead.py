r"""Look-ahead in regular expressions, written without it: as an intersection of plain expressions.

`^(?=A)B$` matches what both `^A` and `^B$` match, and `^(?!A)B$` what `^B$` matches and `^A` does
not: both are regular languages. Such an expression is read as ECMAScript: `\d` and `\w` are ASCII.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import groupby
from typing import NamedTuple, NoReturn

from .regex_text import ALL_CHARS, NOT_NEWLINE, CharSet, chars, without
from .regular_languages import Languages, TooComplex

MAX_NESTING = 50
MAX_CHARS = 2_000
MAX_REPEATS = 1_000
MAX_COPIES = 8

# Parts of an expression that show whether it looks around.
_PART = re.compile(
    r"\\(?P<escape>.)|(?P<ahead>\(\?[=!])|(?P<behind>\(\?<[=!])|\[\^?\]?(?:\\.|[^\]\\])*\]?|.",
    re.DOTALL,
)
_BACK = frozenset("123456789k")
_QUANTIFIER = re.compile(r"(?:([*+?])|\{(\d{1,9})(,(\d{1,9})?)?\})([?+]?)")
_GROUP = re.compile(r"\((?:\?(?::|P?<[A-Za-z_]\w*>))?(?!\?)")
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|[ux]\{([0-9a-fA-F]{1,6})\})")
_BOUNDS: Mapping[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_SIGNS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_DIGITS = chars([(48, 57)])
_WORD = chars([(48, 57), (65, 90), (95, 95), (97, 122)])
_SPACE = chars(
    (code, code)
    for code in (
        *(*range(9, 14), 32, 0xA0, 0x1680, *range(0x2000, 0x200B)),
        *(0x2028, 0x2029, 0x202F, 0x205F, 0x3000, 0xFEFF),
    )
)
_CLASSES = {
    "d": _DIGITS,
    "w": _WORD,
    "s": _SPACE,
    "D": without(_DIGITS),
    "W": without(_WORD),
    "S": without(_SPACE),
}


class LookAroundError(ValueError):
    """An expression with an unsupported look-around or back-reference."""


@lru_cache(maxsize=1024)
def looks_around(pattern: str) -> bool:
    """Say whether an expression has look-ahead; raises `LookAroundError` for look-behind."""
    is_ahead = False
    for part in _PART.finditer(pattern):
        if part["behind"]:
            _fail("look-behind is not supported")
        if part["escape"] and part["escape"] in _BACK:
            _fail("back-references are not supported")
        is_ahead |= part["ahead"] is not None
    return is_ahead


def has_unmatched_parenthesis(pattern: str) -> bool:
    """Say whether the groups of an expression do not match, as in `a)|(b`."""
    depth = 0
    for part in _PART.finditer(pattern):
        depth += part[0].startswith("(") - (part[0] == ")")
        if depth < 0:
            return True
    return depth > 0


@lru_cache(maxsize=256)
def plain_texts(pattern: str) -> tuple[str, ...]:
    """Return expressions without look-ahead, all of which must match a whole text.

    The expression itself must match a text from end to end. Raises `LookAroundError`.
    """
    return _written(pattern, lambda graph, tree: [_Building(graph).whole(tree)], Languages.text)


@lru_cache(maxsize=256)
def plain_patterns(pattern: str) -> tuple[str, ...]:
    """Return anchored expressions without look-ahead, all of which must match a text.

    Unless it is anchored, the expression itself matches any part of a text; if that is too complex,
    it must match at the beginning. Raises `LookAroundError`.
    """
    return _written(pattern, lambda made, tree: _Building(made).parts(tree), Languages.pattern)


@lru_cache(maxsize=256)
def plain_pattern(pattern: str) -> tuple[str, ...]:
    """Return one anchored expression without look-ahead; raises `LookAroundError`."""
    return _written(
        pattern, lambda graph, tree: _Building(graph).parts(tree), Languages.pattern, is_one=True
    )


def _written(
    pattern: str,
    build: Callable[[Languages, _Tree], Sequence[int]],
    write: Callable[[Languages, int], str | None],
    *,
    is_one: bool = False,
) -> tuple[str, ...]:
    """Return the expressions of a pattern in the first way that is not too complex."""
    graph = Languages()
    reason = ""
    if len(pattern) > MAX_CHARS:
        _fail(f"look-ahead is not supported in expressions of more than {MAX_CHARS:,} characters")
    try:
        for parts in _ways(graph, build(graph, _Parser(pattern).expression()), is_one=is_one):
            try:
                texts = [write(graph, part) for part in parts]
            except TooComplex as exc:
                reason = reason or str(exc)
                continue
            if None in texts:
                _fail("its look-ahead excludes every text")
            return tuple(text for text in texts if text is not None)
    except RecursionError:
        reason = "is nested too deeply"
    raise LookAroundError(f"its look-ahead {reason}")


def _ways(graph: Languages, languages: Sequence[int], *, is_one: bool) -> Iterator[Sequence[int]]:
    """Yield ways to write an intersection of languages: as its parts, or as one."""
    for language in languages:
        if not is_one:
            yield graph.conjuncts(language)
        yield [language]


def _fail(words: str) -> NoReturn:
    raise LookAroundError(words)


class _Tree(NamedTuple):
    """A parsed expression; `least` and `most` are of a repetition, `is_negative` of look-ahead."""

    kind: str
    parts: tuple[_Tree, ...] = ()
    charset: CharSet = ()
    least: int = 0
    most: int | None = None
    is_negative: bool = False

    @property
    def looks(self) -> bool:
        """Say whether it contains an anchor or a look-ahead."""
        return self.kind in ("start", "end", "ahead") or any(part.looks for part in self.parts)


_NO_TEXT = _Tree("sequence")


class _Parser:
    """Recursive descent parser of an expression with look-ahead."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._place = 0
        self._depth = 0

    def expression(self) -> _Tree:
        """Return the whole expression."""
        tree = self._alternatives()
        if self._place < len(self._pattern):
            _fail("unmatched closing parenthesis")
        return tree

    def _rest(self, text: str) -> bool:
        """Accept a text, and say whether it was there."""
        is_there = self._pattern.startswith(text, self._place)
        self._place += len(text) if is_there else 0
        return is_there

    def _alternatives(self) -> _Tree:
        self._depth += 1
        if self._depth > MAX_NESTING:
            _fail(f"more than {MAX_NESTING} nested groups are not supported")
        ways = [self._sequence()]
        while self._rest("|"):
            ways.append(self._sequence())
        self._depth -= 1
        return ways[0] if len(ways) == 1 else _Tree("either", (*ways,))

    def _sequence(self) -> _Tree:
        parts = []
        while self._place < len(self._pattern) and self._pattern[self._place] not in "|)":
            parts.append(self._quantified(self._atom()))
        return _Tree("sequence", (*parts,))

    def _quantified(self, part: _Tree) -> _Tree:
        match = _QUANTIFIER.match(self._pattern, self._place)
        if match is None:
            return part
        self._place = match.end()
        sign, least, comma, most, after = match.groups()
        if after == "+" or _QUANTIFIER.match(self._pattern, self._place):
            _fail("a repetition of a repetition is not supported next to look-ahead")
        bounds = _BOUNDS.get(sign)
        if bounds is None:
            last = int(most) if most else None if comma else int(least)
            bounds = int(least), last
        if max(bounds[0], bounds[1] or 0) > MAX_REPEATS:
            _fail(f"more than {MAX_REPEATS:,} repetitions are not supported next to look-ahead")
        if bounds[1] is not None and bounds[0] > bounds[1]:
            _fail("a repetition has a maximum below its minimum")
        if not part.looks:
            return _Tree("repeat", (part,), least=bounds[0], most=bounds[1])
        if max(bounds[0], bounds[1] or 0) > MAX_COPIES:
            _fail(f"look-ahead in a repetition of more than {MAX_COPIES} times is not supported")
        tree = _NO_TEXT if bounds[1] is not None else _Tree("loop", (part,))
        for _ in range((bounds[1] or bounds[0]) - bounds[0]):
            tree = _Tree("either", (_Tree("sequence", (part, tree)), _NO_TEXT))
        return _Tree("sequence", (*[part] * bounds[0], tree))

    def _atom(self) -> _Tree:
        for text, is_negative in (("(?=", False), ("(?!", True)):
            if self._rest(text):
                return _Tree("ahead", (self._closed(),), is_negative=is_negative)
        if self._pattern.startswith("(", self._place):
            match = _GROUP.match(self._pattern, self._place)
            if match is None:
                _fail("flags are not supported next to look-ahead")
            self._place = match.end()
            return self._closed()
        for text, kind in (("^", "start"), ("$", "end")):
            if self._rest(text):
                return _Tree(kind)
        if self._rest("."):
            return _Tree("set", charset=NOT_NEWLINE)
        if self._rest("["):
            return _Tree("set", charset=self._class())
        if self._pattern[self._place] in "*+?":
            _fail("nothing to repeat")
        return _Tree("set", charset=self._char(in_class=False))

    def _closed(self) -> _Tree:
        tree = self._alternatives()
        if not self._rest(")"):
            _fail("missing closing parenthesis")
        return tree

    def _char(self, *, in_class: bool) -> CharSet:
        """Return one character, or the class of an escape."""
        char = self._pattern[self._place]
        if char != "\\":
            self._place += 1
            return ((ord(char), ord(char)),)
        if (match := _CODE.match(self._pattern, self._place)) is not None:
            self._place = match.end()
            return chars([(int(next(filter(None, match.groups())), 16),) * 2])
        sign = self._pattern[self._place + 1 : self._place + 2]
        self._place += 2
        if sign in _CLASSES:
            return _CLASSES[sign]
        if sign in _SIGNS:
            sign = _SIGNS[sign]
        elif in_class and sign == "b":
            sign = "\b"
        elif not sign or sign.isalnum():
            _fail(f"\\{sign} is not supported next to look-ahead")
        return ((ord(sign), ord(sign)),)

    def _class(self) -> CharSet:
        is_negated = self._rest("^")
        ranges: list[tuple[int, int]] = []
        if self._pattern.startswith(("]", "[:"), self._place):
            _fail("a class that begins with `]` or `[:` is not supported next to look-ahead")
        while not self._rest("]"):
            if self._place >= len(self._pattern):
                _fail("unclosed character class")
            if self._pattern.startswith(("&&", "[:"), self._place):
                _fail("operators in a class are not supported next to look-ahead")
            first = self._char(in_class=True)
            is_range = re.match(r"-[^\]]", self._pattern[self._place : self._place + 2], re.DOTALL)
            if is_range and _is_one(first):
                self._place += 1
                last = self._char(in_class=True)
                if not _is_one(last) or last[0][0] < first[0][0]:
                    _fail("invalid range in a character class")
                first = ((first[0][0], last[0][0]),)
            ranges.extend(first)
        return without(chars(ranges)) if is_negated else chars(ranges)


def _is_one(charset: CharSet) -> bool:
    return len(charset) == 1 and charset[0][0] == charset[0][1]


_Next = Callable[[bool], int]
"""The language of what follows a part; the argument says whether it is at the text's start."""
_AT_START, _LATER = True, False


class _Building:
    """Builds the language of the texts that an expression matches, part by part from its end."""

    def __init__(self, languages: Languages) -> None:
        self._languages = languages
        self._loops: dict[tuple[_Tree, int], int] = {}

    def whole(self, tree: _Tree) -> int:
        """Return the language of texts that match from end to end."""
        return self._built(tree, lambda _: self._languages.empty, is_start=True)

    def parts(self, tree: _Tree) -> Sequence[int]:
        """Return the languages of texts that contain a match, and of texts that begin with one."""
        graph = self._languages
        here = self._built(tree, lambda _: graph.anything, is_start=True)
        later = self._built(tree, lambda _: graph.anything, is_start=False)
        if later == graph.nothing:
            return [here]
        if here == later:
            return [graph.cat(graph.anything, later), here]
        further = graph.cat(graph.repeat(graph.char_set(ALL_CHARS), 1, None), later)
        return [graph.either((here, further)), here]

    def _built(self, tree: _Tree, after: _Next, *, is_start: bool) -> int:
        """Return the language of the rest of a text, from this part on."""
        graph = self._languages
        match tree.kind:
            case "start":
                return after(_AT_START) if is_start else graph.nothing
            case "end":
                return graph.both((graph.empty, after(is_start)))
            case "ahead":
                seen = self._built(tree.parts[0], lambda _: graph.anything, is_start=is_start)
                if tree.is_negative:
                    seen = graph.complement(seen)
                return graph.both((seen, after(is_start)))
            case "either":
                return graph.either(
                    self._built(each, after, is_start=is_start) for each in tree.parts
                )
            case "sequence" if tree.looks:
                return self._in_order(tree.parts, after, is_start=is_start)
            case "loop":
                return self._loop(tree, after, is_start=is_start)
        plain = self._plain(tree)
        if is_start and graph.is_nullable(plain) and after(_AT_START) != after(_LATER):
            if plain != graph.empty:
                _fail(
                    "an anchor after a part that may be empty is not supported next to look-ahead"
                )
            return after(_AT_START)
        return graph.cat(plain, after(_LATER))

    def _loop(self, tree: _Tree, after: _Next, *, is_start: bool) -> int:
        """Return the language of any number of repetitions of a part, and of what follows it."""
        graph, rest = self._languages, after(_LATER)

        def again(loop: int) -> int:
            return self._built(tree.parts[0], lambda _: loop, is_start=False)

        key = (tree, rest)
        if key not in self._loops:
            self._loops[key] = graph.loop(
                lambda loop: graph.either((rest, again(loop))), is_nullable=graph.is_nullable(rest)
            )
        loop = self._loops[key]
        if not is_start:
            return loop
        first = self._built(tree.parts[0], lambda _: loop, is_start=True)
        return graph.either((after(_AT_START), first))

    def _in_order(self, parts: tuple[_Tree, ...], after: _Next, *, is_start: bool) -> int:
        """Return the language of consecutive parts; plain neighbours are one part."""
        groups = [(*group,) for _, group in groupby(parts, lambda part: part.looks)]
        units = [
            unit
            for group in groups
            for unit in (group if group[0].looks else [_Tree("sequence", group)])
        ]
        for unit in reversed(units):
            after = cache(partial(self._followed, unit, after))
        return after(is_start)

    def _followed(self, part: _Tree, after: _Next, is_start: bool) -> int:  # noqa: FBT001 - cached
        return self._built(part, after, is_start=is_start)

    def _plain(self, tree: _Tree) -> int:
        """Return the language of a part without anchors and look-ahead."""
        graph = self._languages
        if tree.kind == "set":
            return graph.char_set(tree.charset)
        parts = [self._plain(part) for part in tree.parts]
        if tree.kind == "repeat":
            return graph.repeat(parts[0], tree.least, tree.most)
        if tree.kind == "either":
            return graph.either(parts)
        return graph.in_order(parts)
