"""Regular languages with intersection and complement, and their plain regular expressions.

A language is a node of an interned graph, given by its number. Its Brzozowski derivatives are the
states of an automaton, and eliminating those states gives a plain expression. States, work and the
expression's length are bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

from .regex_text import (
    ALL_CHARS,
    EMPTY,
    CharSet,
    Text,
    chars,
    either,
    joined,
    repeated,
    shown,
)

MAX_STATES = 200
MAX_WORK = 10_000
MAX_RANGES = 500
MAX_CHARS = 5_000


class TooComplex(ValueError):
    """A language whose automaton or expression is too large."""


def _has(charset: CharSet, char: int) -> bool:
    return any(low <= char <= high for low, high in charset)


class _Node(NamedTuple):
    """A language: its `kind`, its parts, and for `set` its characters, for `repeat` its bounds."""

    kind: str
    parts: tuple[int, ...] = ()
    charset: CharSet = ()
    least: int = 0
    most: int | None = None


class Languages:
    """Graph of languages: equal ones have one number."""

    def __init__(self) -> None:
        self._nodes: list[_Node] = []
        self._numbers: dict[_Node, int] = {}
        self._nullable: list[bool] = []
        self._derivatives: dict[tuple[int, int], int] = {}
        self._loops: dict[int, int] = {}
        self._work = 0
        self.nothing = self._number(_Node("nothing"))
        self.empty = self._number(_Node("empty"))
        self.anything = self.repeat(self.char_set(ALL_CHARS), 0, None)

    def _number(self, node: _Node) -> int:
        number = self._numbers.setdefault(node, len(self._nodes))
        if number == len(self._nodes):
            self._nodes.append(node)
            self._nullable.append(self._holds_empty(node))
        return number

    def _holds_empty(self, node: _Node) -> bool:
        inner = [self._nullable[part] for part in node.parts]
        match node.kind:
            case "cat" | "both":
                return all(inner)
            case "either":
                return any(inner)
            case "not":
                return not inner[0]
            case "repeat" | "loop":
                return node.least == 0 or all(inner)
        return node.kind == "empty"

    def char_set(self, charset: CharSet) -> int:
        """Return the language of single characters."""
        return self._number(_Node("set", charset=charset)) if charset else self.nothing

    def cat(self, first: int, second: int) -> int:
        """Return the language of texts of one followed by texts of the other."""
        if self.nothing in (first, second):
            return self.nothing
        if first == self.empty:
            return second
        if second == self.empty:
            return first
        *before, last = self._sequence(first)
        second = self._number(_Node("cat", (last, second)))
        for part in reversed(before):
            second = self._number(_Node("cat", (part, second)))
        return second

    def _sequence(self, language: int) -> list[int]:
        """Return the languages whose texts follow each other in a language's texts."""
        parts = []
        while (node := self._nodes[language]).kind == "cat":
            parts.append(node.parts[0])
            language = node.parts[1]
        return [*parts, language]

    def either(self, parts: Iterable[int]) -> int:
        """Return the union of languages."""
        terms = self._flat("either", parts) - {self.nothing}
        if self.anything in terms:
            return self.anything
        if not terms:
            return self.nothing
        return terms.pop() if len(terms) == 1 else self._number(_Node("either", (*sorted(terms),)))

    def both(self, parts: Iterable[int]) -> int:
        """Return the intersection of languages."""
        terms = self._flat("both", parts) - {self.anything}
        if self.nothing in terms:
            return self.nothing
        if self.empty in terms:
            return self.empty if all(map(self.is_nullable, terms)) else self.nothing
        if not terms:
            return self.anything
        return terms.pop() if len(terms) == 1 else self._number(_Node("both", (*sorted(terms),)))

    def complement(self, part: int) -> int:
        """Return the language of all other texts."""
        if part == self.nothing:
            return self.anything
        if part == self.anything:
            return self.nothing
        node = self._nodes[part]
        return node.parts[0] if node.kind == "not" else self._number(_Node("not", (part,)))

    def repeat(self, part: int, least: int, most: int | None) -> int:
        """Return the language of `least` to `most` texts in a row; None means any number."""
        if most == 0 or part in (self.empty, self.nothing):
            return self.nothing if part == self.nothing and least else self.empty
        if (least, most) == (1, 1):
            return part
        if self.is_nullable(part):
            least = 0
        return self._number(_Node("repeat", (part,), least=least, most=most))

    def loop(self, build: Callable[[int], int], *, is_nullable: bool) -> int:
        """Return a language that `build` defines in terms of itself.

        Texts have a character before the language comes again. `is_nullable` says whether the empty
        text is in it.
        """
        least = 0 if is_nullable else 1
        number = self._number(_Node("loop", (self.nothing,), least=least, most=len(self._loops)))
        self._loops[number] = self.nothing
        self._loops[number] = build(number)
        return number

    def conjuncts(self, language: int) -> Sequence[int]:
        """Return languages whose intersection is this one."""
        node = self._nodes[language]
        return node.parts if node.kind == "both" else (language,)

    def _flat(self, kind: str, parts: Iterable[int]) -> set[int]:
        operands: set[int] = set()
        for part in parts:
            node = self._nodes[part]
            operands.update(node.parts if node.kind == kind else (part,))
        return operands

    def is_nullable(self, language: int) -> bool:
        """Say whether the empty text is in a language."""
        return self._nullable[language]

    def derivative(self, language: int, char: int) -> int:
        """Return the language of the texts that follow a first character in a language."""
        key = (language, char)
        if key not in self._derivatives:
            self._work += 1
            if self._work > MAX_WORK:
                raise TooComplex("needs too many steps")
            node = self._nodes[language]
            self._derivatives[key] = (
                self.derivative(self._loops[language], char)
                if node.kind == "loop"
                else self._derive(node, char)
            )
        return self._derivatives[key]

    def _derive(self, node: _Node, char: int) -> int:
        match node.kind:
            case "set":
                return self.empty if _has(node.charset, char) else self.nothing
            case "cat":
                first, second = node.parts
                rest = self.cat(self.derivative(first, char), second)
                if not self.is_nullable(first):
                    return rest
                return self.either((rest, self.derivative(second, char)))
            case "repeat":
                most = None if node.most is None else node.most - 1
                again = self.repeat(node.parts[0], max(0, node.least - 1), most)
                return self.cat(self.derivative(node.parts[0], char), again)
            case "either":
                return self.either(self.derivative(part, char) for part in node.parts)
            case "both":
                return self.both(self.derivative(part, char) for part in node.parts)
            case "not":
                return self.complement(self.derivative(node.parts[0], char))
        return self.nothing

    def text(self, language: int) -> str | None:
        """Return an expression that matches a language's texts from end to end; None for none.

        Raises `TooComplex`.
        """
        text = self._plain(language) or _Automaton(self, language).expression()
        if text is not None and len(text.text) > MAX_CHARS:
            raise TooComplex(f"needs an expression of more than {MAX_CHARS:,} characters")
        return None if text is None else text.text

    def pattern(self, language: int) -> str | None:
        """Return an anchored expression that finds exactly a language's texts; None for none.

        Raises `TooComplex`.
        """
        *before, last = self._sequence(language)
        is_open = bool(before) and last == self.anything
        text = self.text(self.in_order(before) if is_open else language)
        return None if text is None else f"^(?:{text})" + ("" if is_open else "$")

    def in_order(self, parts: Sequence[int]) -> int:
        """Return the language of texts that follow each other, one from each part."""
        language = self.empty
        for part in reversed(parts):
            language = self.cat(part, language)
        return language

    def _plain(self, language: int) -> Text | None:
        """Return the expression of a language; None if it has an intersection or a complement."""
        node = self._nodes[language]
        if node.kind == "empty":
            return EMPTY
        if node.kind == "set":
            return Text(shown(node.charset), 2)
        if node.kind not in ("cat", "either", "repeat"):
            return None
        parts = self._sequence(language) if node.kind == "cat" else node.parts
        texts = [text for part in parts if (text := self._plain(part)) is not None]
        if len(texts) < len(parts):
            return None
        if node.kind == "repeat":
            return repeated(texts[0], node.least, node.most)
        return reduce(joined if node.kind == "cat" else either, texts)

    def classes(self, language: int) -> list[CharSet]:
        """Return the sets of characters that a language's texts do not distinguish."""
        charsets = {self._nodes[part].charset for part in self._reachable(language)} - {()}
        if sum(map(len, charsets)) > MAX_RANGES:
            raise TooComplex(f"has more than {MAX_RANGES:,} ranges of characters")
        edges = {low for charset in (*charsets, ALL_CHARS) for low, _ in charset}
        edges |= {high + 1 for charset in (*charsets, ALL_CHARS) for _, high in charset}
        classes: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
        for low, after in pairwise(sorted(edges)):
            if _has(ALL_CHARS, low):
                key = tuple(_has(charset, low) for charset in charsets)
                classes.setdefault(key, []).append((low, after - 1))
        return [chars(ranges) for ranges in classes.values()]

    def _reachable(self, language: int) -> Iterator[int]:
        seen, waiting = {language}, [language]
        while waiting:
            yield (part := waiting.pop())
            parts = {*self._nodes[part].parts, self._loops.get(part, part)}
            waiting.extend(parts - seen)
            seen |= parts


class _Automaton:
    """The minimal automaton of a language, without states that cannot reach an end."""

    def __init__(self, languages: Languages, language: int) -> None:
        self._classes = languages.classes(language)
        states: dict[int, int] = {language: 0}
        steps: list[list[int]] = []
        for state in _growing(states):
            targets = [languages.derivative(state, charset[0][0]) for charset in self._classes]
            steps.append([states.setdefault(target, len(states)) for target in targets])
            if len(states) > MAX_STATES:
                raise TooComplex(f"needs more than {MAX_STATES} states")
        self._ends = [languages.is_nullable(state) for state in states]
        self._steps = steps

    def expression(self) -> Text | None:
        """Return the expression of all texts; None if there are none."""
        blocks = self._blocks()
        alive = self._alive(blocks)
        if blocks[0] not in alive:
            return None
        edges: dict[tuple[int, int], Text] = {}
        ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for state, block in enumerate(blocks):
            if block not in alive or blocks.index(block) != state:
                continue
            for charset, target in zip(self._classes, self._steps[state], strict=True):
                if blocks[target] in alive:
                    ranges.setdefault((block, blocks[target]), []).extend(charset)
            if self._ends[state]:
                edges[block, _END] = EMPTY
        edges |= {pair: Text(shown(chars(found)), 2) for pair, found in ranges.items()}
        edges[_START, blocks[0]] = EMPTY
        return _eliminated(edges, alive)

    def _blocks(self) -> list[int]:
        """Return the block of each state: states of one block have the same texts."""
        blocks = list(map(int, self._ends))
        while True:
            keys = [
                (block, *(blocks[target] for target in targets))
                for block, targets in zip(blocks, self._steps, strict=True)
            ]
            numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
            found = [numbers[key] for key in keys]
            if len(numbers) == len(set(blocks)):
                return found
            blocks = found

    def _alive(self, blocks: Sequence[int]) -> set[int]:
        """Return the blocks from which a text can end."""
        alive = {block for block, ends in zip(blocks, self._ends, strict=True) if ends}
        grows = True
        while grows:
            new = {
                block
                for block, targets in zip(blocks, self._steps, strict=True)
                if any(blocks[target] in alive for target in targets)
            }
            grows = not new <= alive
            alive |= new
        return alive


def _growing(states: dict[int, int]) -> Iterator[int]:
    """Yield the keys of a dict that grows."""
    done = 0
    while done < len(states):
        for state in list(states)[done:]:
            done += 1
            yield state


_START, _END = -1, -2


def _eliminated(edges: Mapping[tuple[int, int], Text], states: set[int]) -> Text:
    """Return the expression of all paths from the start to the end, state by state."""
    into: dict[int, dict[int, Text]] = {state: {} for state in (*states, _START, _END)}
    out: dict[int, dict[int, Text]] = {state: {} for state in (*states, _START, _END)}
    for (one, other), text in edges.items():
        into[other][one] = out[one][other] = text
    left = set(states)
    while left:
        state = min(left, key=lambda one: (_cost(into[one], out[one], one), one))
        left.discard(state)
        loop = out[state].pop(state, None)
        into[state].pop(state, None)
        for one, before in into[state].items():
            del out[one][state]
            path = before if loop is None else joined(before, repeated(loop, 0, None))
            for other, after in out[state].items():
                way, known = joined(path, after), out[one].get(other)
                text = way if known is None else either(known, way)
                out[one][other] = into[other][one] = text
        for other in out[state]:
            del into[other][state]
        del into[state], out[state]
        if sum(len(text.text) for ways in out.values() for text in ways.values()) > 4 * MAX_CHARS:
            raise TooComplex(f"needs an expression of more than {MAX_CHARS:,} characters")
    return out[_START][_END]


def _cost(into: Mapping[int, Text], out: Mapping[int, Text], state: int) -> int:
    """Return the approximate length of text that eliminating a state adds."""
    before = [len(text.text) for one, text in into.items() if one != state]
    after = [len(text.text) for other, text in out.items() if other != state]
    loop = len(out[state].text) if state in out else 0
    more = len(before) * len(after) - 1
    return sum(before) * (len(after) - 1) + sum(after) * (len(before) - 1) + loop * more
