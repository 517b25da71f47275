"""Distribution over the finite values of a field, from the choices of an answer's tokens.

Each token that could have been chosen leads to some of the values. The mass of one that leads to a
single value is that value's; that of several is read further, token by token, on its own path. The
text before a value is given: tokens that add nothing else are neither choices nor alternatives.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Self

import numpy as np

from ..scheduling.token_choices import TokenChoice
from ..text.tokenizer import Tokenizer

LEAST_MASS = 1e-4
"""Least probability of a path that is read further; the rounding of bf16 is above it."""

AFTER_JSON = b",]} \t\r\n"
"""Bytes that may follow a value of JSON."""

_SPACE = b" \t\r\n"

Values = frozenset[int]
"""Places of values in a list of them."""
Path = tuple[int, ...]
"""Tokens after a prompt."""


@dataclass(slots=True)
class PathReadings:
    """Choices of tokens on other paths than an answer's, by the tokens before them.

    `wanted` are the masses of paths that no reading is known of.
    """

    known: Mapping[Path, TokenChoice] = field(default_factory=dict)
    wanted: dict[Path, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """An answer's tokens, and all their bytes: `data`.

    `offsets [N + 1]` are where the tokens begin in `data`, and its end; the text begins at `start`,
    after any reasoning.
    """

    token_ids: Path
    choices: Sequence[TokenChoice]
    data: bytes
    offsets: Sequence[int]
    start: int
    tokenizer: Tokenizer
    readings: PathReadings

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        choices: Sequence[TokenChoice],
        tokenizer: Tokenizer,
        readings: PathReadings,
    ) -> Self:
        """Return the tokens of an answer, all of whose bytes are the text."""
        pieces = [_piece(tokenizer, token_id) for token_id in token_ids]
        data, offsets = b"".join(pieces), [*accumulate(map(len, pieces), initial=0)]
        return cls(tuple(token_ids), choices, data, offsets, 0, tokenizer, readings)

    def last(self, text: bytes, end: int | None = None) -> Self | None:
        """Return the tokens with the last such text before `end`; None if there is none."""
        start = self.data.rfind(text, 0, end)
        if start < 0 or len(self.choices) != len(self.token_ids):
            return None
        return replace(self, start=start)

    def span(self, begin: int, end: int, *, is_open: bool) -> range:
        """Return the tokens of `data[begin:end]`; if it `is_open`, also the token after it."""
        first, stop = bisect_right(self.offsets, begin) - 1, bisect_left(self.offsets, end)
        is_followed = is_open and self.offsets[stop] == end
        return range(first, min(stop + is_followed, len(self.token_ids)))


@dataclass(slots=True)
class Distribution:
    """Probabilities of values: `chosen` is the answer's, `undecided` are masses of several values.

    It `is_forced` if no token had an alternative that leads to another value.
    """

    probabilities: list[float]
    chosen: int = -1
    is_forced: bool = True
    undecided: dict[Values, float] = field(default_factory=dict)


def distribution_of(
    tokens: AnswerTokens,
    texts: Sequence[bytes],
    begin: int,
    end: int,
    *,
    after: bytes = b"",
    may_indent: bool = False,
) -> Distribution | None:
    """Return the distribution over values with these `texts` for the one at `data[begin:end]`.

    One of the bytes `after` follows a value, and whitespace before one that `may_indent` is not
    part of it. None if it is unknown: the answer is none of them, or a token had too many
    alternatives.
    """
    found = Distribution([0.0] * len(texts))
    paths = _OtherPaths(tokens, texts, found.probabilities, after)
    left, scale = frozenset(range(len(texts))), 1.0
    for place in tokens.span(begin, end, is_open=True):
        offset, token_id = tokens.offsets[place], tokens.token_ids[place]
        fork = _Fork(
            tokens.tokenizer,
            texts,
            tokens.data[begin:offset],
            tokens.data[offset:begin],
            after,
            may_indent=may_indent,
        )
        own, choice = fork.values_after(token_id, left), tokens.choices[place]
        if not own:
            return None
        if choice.logprob is not None and fork.begins_with(token_id):
            if not len(choice.ids):
                return None
            ways = fork.ways(choice, left)
            total = sum(way.mass for way in ways)
            for way in ways:
                mass = scale * way.mass / total
                if way.token_id == token_id:
                    kept = mass
                else:
                    paths.add((*tokens.token_ids[:place], way.token_id), way, mass)
            found.is_forced &= all(way.values == own for way in ways)
            scale = kept
        left = own
        if len(left) == 1:
            break
    chosen = next((i for i in left if texts[i] == tokens.data[begin:end]), None)
    if chosen is None:
        return None
    found.chosen = chosen
    found.probabilities[chosen] += scale
    found.undecided = {one: mass for one, mass in paths.undecided.items() if mass >= LEAST_MASS}
    return found


@dataclass(frozen=True, slots=True)
class _Way:
    """A token that may come: its mass, the values that it leads to, and their text so far."""

    token_id: int
    mass: float
    values: Values
    so_far: bytes


class _OtherPaths:
    """Adds the masses of paths that the answer did not take to the `probabilities` of values."""

    def __init__(
        self,
        tokens: AnswerTokens,
        texts: Sequence[bytes],
        probabilities: list[float],
        after: bytes,
    ) -> None:
        self._tokens = tokens
        self._texts = texts
        self._probabilities = probabilities
        self._after = after
        self.undecided: dict[Values, float] = defaultdict(float)

    def add(self, path: Path, way: _Way, mass: float) -> None:
        """Add the mass of a path that ends with a way, and of all that follow it."""
        if len(way.values) == 1:
            self._probabilities[min(way.values)] += mass
            return
        readings = self._tokens.readings
        choice = readings.known.get(path)
        if choice is None or not len(choice.ids):
            self.undecided[way.values] += mass
            if choice is None and mass >= LEAST_MASS:
                readings.wanted[path] = max(mass, readings.wanted.get(path, 0.0))
            return
        fork = _Fork(self._tokens.tokenizer, self._texts, way.so_far, b"", self._after)
        for onward in fork.ways(choice, way.values):
            self.add((*path, onward.token_id), onward, mass * onward.mass)


class _Fork:
    """A place in a value or just before it: the values that each next token leads to."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: Sequence[bytes],
        so_far: bytes,
        lead: bytes,
        after: bytes,
        *,
        may_indent: bool = False,
    ) -> None:
        """Stand after `so_far` of a value, or before the text `lead` that precedes it.

        If it `may_indent`, whitespace in front of the value is not part of it.
        """
        self._tokenizer = tokenizer
        self._texts = texts
        self._so_far = so_far
        self._lead = lead.translate(None, _SPACE)  # whitespace may differ there
        self._after = after
        self._may_indent = may_indent

    def ways(self, choice: TokenChoice, left: Values) -> list[_Way]:
        """Return the tokens of a choice that lead to any of the values left."""
        masses = np.exp(choice.logprobs.astype(np.float64)).tolist()
        ways = []
        for token_id, mass in zip(choice.ids.tolist(), masses, strict=True):
            if self.begins_with(token_id) and (values := self.values_after(token_id, left)):
                ways.append(_Way(token_id, mass, values, self._text_after(token_id) or b""))
        return ways

    def begins_with(self, token_id: int) -> bool:
        """Return whether the value has begun after a token, or has ended before it."""
        return bool(self._so_far or self._text_after(token_id))

    def values_after(self, token_id: int, left: Values) -> Values:
        """Return the values of those left that a token may lead to."""
        if self._tokenizer.is_special(token_id):  # the end
            return frozenset(i for i in left if self._texts[i] == self._so_far)
        text = self._text_after(token_id)
        if text is None:
            return left
        return frozenset(i for i in left if self._may_begin(text, self._texts[i]))

    def _text_after(self, token_id: int) -> bytes | None:
        """Return the value's text with a token; None before its beginning."""
        piece = _piece(self._tokenizer, token_id)
        if self._so_far:
            return self._so_far + piece
        for byte in self._lead:
            piece = piece.lstrip(_SPACE)
            if not piece.startswith(bytes([byte])):
                return None
            piece = piece[1:]
        return piece.lstrip(_SPACE) if self._may_indent else piece

    def _may_begin(self, text: bytes, value: bytes) -> bool:
        """Return whether an output that begins with a text may have this value."""
        if len(text) <= len(value):
            return value.startswith(text)
        return text.startswith(value) and text[len(value)] in self._after


def _piece(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return the bytes of a token; a special token has none."""
    return b"" if tokenizer.is_special(token_id) else tokenizer.piece(token_id)
