"""Comparison of two outputs row by row, by custom ID; rows with equal IDs in their order.

Memory is needed for the index of the second file and the printed differences, not for answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tidemill.batch.file.answers import (
    Answer,
    NumberDifference,
    TextDifference,
    answer_of,
    difference_between,
    normalized,
)
from tidemill.batch.file.error_kinds import ErrorCounter

from ..files.row_file import RowFile, RowPlace, StoredRow
from ..files.row_index import RowIndex

_MAX_KINDS = 100
_MAX_CHARS = 300
_MAX_LABEL_CHARS = 80
_MAX_CHANGES = 1_000


@dataclass(slots=True)
class TokenCounts:
    """Generated tokens of answers, counted by length."""

    lengths: Counter[int] = field(default_factory=Counter)

    @property
    def mean(self) -> float | None:
        """Return the mean length of all answers; None without any."""
        count = self.lengths.total()
        return sum(length * n for length, n in self.lengths.items()) / count if count else None

    @property
    def median(self) -> float | None:
        """Return the median length of all answers; None without any."""
        count = self.lengths.total()
        if not count:
            return None
        return (self._at((count - 1) // 2) + self._at(count // 2)) / 2

    def _at(self, place: int) -> int:
        """Return the length at a place in ascending order."""
        for length in sorted(self.lengths):
            place -= self.lengths[length]
            if place < 0:
                return length
        raise IndexError(place)


@dataclass(slots=True)
class Side:
    """One of the two files; `only_ids` are the first custom IDs that the other lacks."""

    name: str
    errors: ErrorCounter[str | None]
    num_rows: int = 0
    num_ok: int = 0
    num_only: int = 0
    only_ids: list[str | None] = field(default_factory=list)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    tokens: TokenCounts = field(default_factory=TokenCounts)

    def count(self, row: StoredRow) -> Answer | None:
        """Count a row, and return its answer unless it is an error."""
        self.num_rows += 1
        if row.body is None:
            self.errors.add((row.error or "")[:_MAX_CHARS], row.custom_id)
            return None
        self.num_ok += 1
        answer = answer_of(row.body)
        self.finish_reasons.update(answer.finish_reasons)
        if answer.num_tokens is not None:
            self.tokens.lengths[answer.num_tokens] += 1
        return answer

    def count_only(self, row: StoredRow, max_ids: int) -> None:
        """Count a row that is missing in the other file."""
        self.num_only += 1
        if len(self.only_ids) < max_ids:
            self.only_ids.append(row.custom_id)


@dataclass(frozen=True, slots=True)
class DifferingRow:
    """Two rows with the same ID: their numbers, difference, and any error messages."""

    custom_id: str | None
    row_a: int
    row_b: int
    difference: TextDifference | NumberDifference | None
    error_a: str | None = None
    error_b: str | None = None


@dataclass(slots=True)
class Comparison:
    """Counts of both files and of rows in both, and the first rows that differ.

    `changes` counts pairs of short answers, such as labels.
    """

    a: Side
    b: Side
    num_both: int = 0
    num_answered: int = 0
    num_identical: int = 0
    num_failed_in_both: int = 0
    num_failed_in_a: int = 0
    num_failed_in_b: int = 0
    num_longer: int = 0
    num_shorter: int = 0
    max_abs_difference: float | None = None
    least_cosine: float | None = None
    first: list[DifferingRow] = field(default_factory=list)
    changes: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def num_differing(self) -> int:
        """Return the number of rows with different answers in the files."""
        return self.num_answered - self.num_identical

    @property
    def is_same(self) -> bool:
        """Return whether both files have the same IDs, with equal answers or errors in both."""
        failed = self.num_failed_in_a + self.num_failed_in_b
        return not (self.a.num_only or self.b.num_only or self.num_differing or failed)


def compare(
    a: RowFile, b: RowFile, num_shown: int, show: Callable[[int], object] = lambda _: None
) -> Comparison:
    """Compare two outputs; `show` gets the number of bytes read.

    Raises BadInput for a line that is not a row.
    """
    sides = [Side(file.name, ErrorCounter(_MAX_KINDS, num_shown)) for file in (a, b)]
    found = Comparison(a=sides[0], b=sides[1])
    index = RowIndex()
    for place, row in b.rows():
        index.add(row, place)
        found.b.count(row)
        show(place.num_bytes)
    for place, row in a.rows():
        answer = found.a.count(row)
        show(place.num_bytes)
        place_b = index.pop(row)
        if place_b is None:
            found.a.count_only(row, num_shown)
            continue
        row_b = b.read(place_b)
        _count_pair(found, (row, place, answer), (row_b, place_b), num_shown)
    for place in index.left():
        if found.b.num_only < num_shown:
            found.b.count_only(b.read(place), num_shown)
        else:
            found.b.num_only += 1
    return found


def _count_pair(
    found: Comparison,
    a: tuple[StoredRow, RowPlace, Answer | None],
    b: tuple[StoredRow, RowPlace],
    num_shown: int,
) -> None:
    (row_a, place_a, answer_a), (row_b, place_b) = a, b
    answer_b = None if row_b.body is None else answer_of(row_b.body)
    found.num_both += 1
    difference = None
    if answer_a is not None and answer_b is not None:
        found.num_answered += 1
        _count_lengths(found, answer_a, answer_b)
        difference = difference_between(answer_a, answer_b)
        if difference is None:
            found.num_identical += 1
            return
        if isinstance(difference, NumberDifference):
            _count_numbers(found, difference)
        else:
            _count_change(found, answer_a.texts, answer_b.texts)
    elif answer_a is answer_b:
        found.num_failed_in_both += 1
        return
    elif answer_a is None:
        found.num_failed_in_a += 1
    else:
        found.num_failed_in_b += 1
    if len(found.first) < num_shown:
        numbers, errors = (place_a.number, place_b.number), (row_a.error, row_b.error)
        cut = (None if error is None else error[:_MAX_CHARS] for error in errors)
        found.first.append(DifferingRow(row_a.custom_id, *numbers, difference, *cut))


def _count_lengths(found: Comparison, a: Answer, b: Answer) -> None:
    if a.num_tokens is not None and b.num_tokens is not None:
        found.num_longer += b.num_tokens > a.num_tokens
        found.num_shorter += b.num_tokens < a.num_tokens


def _count_change(found: Comparison, a: tuple[str, ...], b: tuple[str, ...]) -> None:
    """Count different short answers, such as labels; beyond a limit, skip new pairs."""
    for one, other in zip(a, b, strict=False) if len(a) == len(b) else ():
        change = normalized(one).strip(), normalized(other).strip()
        if change[0] == change[1] or max(len(one), len(other)) > _MAX_LABEL_CHARS:
            continue
        if change in found.changes or len(found.changes) < _MAX_CHANGES:
            found.changes[change] += 1


def _count_numbers(found: Comparison, difference: NumberDifference) -> None:
    if difference.max_abs is not None:
        found.max_abs_difference = max(found.max_abs_difference or 0.0, difference.max_abs)
    if difference.cosine is not None:
        least = found.least_cosine
        found.least_cosine = difference.cosine if least is None else min(least, difference.cosine)
