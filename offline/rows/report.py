"""Report of a comparison: lines of text, or one JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tidemill.batch.file.answers import NumberDifference, TextDifference

from ..console.tables import columns
from ..console.terminal import amount, without_control_chars
from .comparison import Comparison, DifferingRow, Side

_MAX_ID_CHARS = 80
_MAX_ERROR_CHARS = 120
_CHARS_BEFORE, _CHARS_BEHIND = 20, 60
_MAX_SHOWN_KINDS = 10
_MAX_SHOWN_CHANGES = 5


def lines_of(found: Comparison) -> Iterator[str]:
    """Yield the report as lines of text."""
    yield from columns([*_table(found)])
    yield ""
    yield f"{amount(found.num_both, 'row')} in both; {_agreement(found)}"
    if numbers := _numbers(found):
        yield numbers
    if changes := _changes(found):
        shown = (f"{_label(a)} → {_label(b)} {count:,}" for (a, b), count in changes)
        yield f"most frequent changes from a to b: {', '.join(shown)}"
    if found.num_longer or found.num_shorter:
        yield f"b is longer in {found.num_longer:,}, shorter in {found.num_shorter:,}"
    if found.num_failed_in_a or found.num_failed_in_b or found.num_failed_in_both:
        yield (
            f"failed only in a: {found.num_failed_in_a:,}, only in b: {found.num_failed_in_b:,}, "
            f"in both: {found.num_failed_in_both:,}"
        )
    for letter, side in (("a", found.a), ("b", found.b)):
        if side.num_only:
            yield f"only in {letter}: {_named(side.only_ids, side.num_only)}"
        for kind in side.errors.most_frequent(_MAX_SHOWN_KINDS):
            message = _cut(kind.message.rstrip("."), _MAX_ERROR_CHARS)
            yield f"error in {letter}: {message}: {_named(kind.first, kind.count)}"
    num_all = found.num_differing + found.num_failed_in_a + found.num_failed_in_b
    if found.first:
        yield ""
        yield f"differing rows, {len(found.first):,} of {num_all:,}:"
    for row in found.first:
        yield from _differing(row)


def _table(found: Comparison) -> Iterator[tuple[str, str, str]]:
    a, b = found.a, found.b
    yield "", "a", "b"
    yield "file", a.name, b.name
    for name, one, other in (
        ("rows", a.num_rows, b.num_rows),
        ("only here", a.num_only, b.num_only),
        ("ok", a.num_ok, b.num_ok),
        ("failed", a.num_rows - a.num_ok, b.num_rows - b.num_ok),
    ):
        yield name, f"{one:,}", f"{other:,}"
    if a.tokens.lengths or b.tokens.lengths:
        mean = _change(a.tokens.mean, b.tokens.mean)
        yield "mean tokens", _tokens(a.tokens.mean), f"{_tokens(b.tokens.mean)}{mean}"
        median = _change(a.tokens.median, b.tokens.median)
        yield "median tokens", _tokens(a.tokens.median), f"{_tokens(b.tokens.median)}{median}"
    for reason in sorted(a.finish_reasons.keys() | b.finish_reasons.keys()):
        counts = (f"{side.finish_reasons[reason]:,}" for side in (a, b))
        yield f"finish {_cut(reason, _MAX_ID_CHARS)}", *counts  # type: ignore[misc]


def _agreement(found: Comparison) -> str:
    if not found.num_answered:
        return "none of them has an answer in both"
    share = found.num_identical / found.num_answered
    # 99.99 % must not be shown as 100 %.
    shown = f"{share:.1%}" if share in {0, 1} or 0.001 <= share < 0.9995 else f"{share:.4%}"
    return (
        f"of {found.num_answered:,} with an answer in both, {found.num_identical:,} are identical "
        f"({shown})"
    )


def _numbers(found: Comparison) -> str | None:
    if found.max_abs_difference is None:
        return None
    words = f"numbers differ by up to {found.max_abs_difference:.3g}"
    if found.least_cosine is None:
        return words
    return f"{words}; the smallest cosine of two vectors is {found.least_cosine:.6f}"


def _changes(found: Comparison) -> list[tuple[tuple[str, str], int]]:
    """Return the repeated changes of short answers, most frequent first."""
    return [each for each in found.changes.most_common(_MAX_SHOWN_CHANGES) if each[1] > 1]


def _label(text: str) -> str:
    is_json = text.startswith(("{", "["))
    return _cut(text if is_json else json.dumps(text, ensure_ascii=False), _MAX_ID_CHARS)


def _tokens(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _change(a: float | None, b: float | None) -> str:
    return f" ({b / a - 1:+.1%})" if a and b is not None else ""


def _named(ids: Sequence[str | None], count: int) -> str:
    """Return the total number, with the first IDs."""
    named = ", ".join(map(_id, ids))
    if not ids:
        return amount(count, "row")
    return f"{count:,} ({named}{', …' if count > len(ids) else ''})"


def _id(custom_id: str | None) -> str:
    return "a row without custom_id" if custom_id is None else _cut(custom_id, _MAX_ID_CHARS)


def _cut(text: str, most: int) -> str:
    cut = text if len(text) <= most else f"{text[: most - 1]}…"
    return without_control_chars(cut)


def _differing(row: DifferingRow) -> Iterator[str]:
    where = f"row {row.row_a:,}" if row.row_a == row.row_b else f"rows {row.row_a:,}, {row.row_b:,}"
    head = f"{_id(row.custom_id)} ({where})"
    match row.difference:
        case TextDifference(choice, position):
            of = f" of choice {choice:,}" if choice else ""
            yield f"{head}, from character {position + 1:,}{of} on"
            for letter, excerpt in zip("ab", _excerpts(row.difference), strict=True):
                quoted = json.dumps(excerpt, ensure_ascii=False)
                yield f"  {letter}  {without_control_chars(quoted)}"
        case NumberDifference(None, _):
            yield f"{head}, different numbers of vectors or dimensions"
        case NumberDifference(max_abs, cosine):
            words = "" if cosine is None else f", cosine {cosine:.6f}"
            yield f"{head}, by up to {max_abs:.3g}{words}"
        case _:
            yield f"{head}, failed only in {'a' if row.error_b is None else 'b'}"
            yield f"     {_cut(row.error_a or row.error_b or '', _MAX_ERROR_CHARS)}"


def _excerpts(difference: TextDifference) -> tuple[str, str]:
    """Return excerpts around the first differing character on each side."""
    start = max(0, difference.position - _CHARS_BEFORE)
    end = difference.position + _CHARS_BEHIND

    def excerpt(text: str) -> str:
        return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"

    return excerpt(difference.a), excerpt(difference.b)


def json_of(found: Comparison) -> str:
    """Return the report as one JSON object, with unprintable characters escaped."""
    text = json.dumps(_fields(found), ensure_ascii=False, indent=2)
    return "".join(
        char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text
    )


def _fields(found: Comparison) -> dict[str, Any]:
    share = found.num_identical / found.num_answered if found.num_answered else None
    return {
        "object": "rows.diff",
        "a": _side_fields(found.a),
        "b": _side_fields(found.b),
        "both": found.num_both,
        "answered_in_both": found.num_answered,
        "identical": found.num_identical,
        "differing": found.num_differing,
        "agreement": share,
        "max_abs_difference": found.max_abs_difference,
        "least_cosine": found.least_cosine,
        "changes": [{"a": a, "b": b, "count": count} for (a, b), count in _changes(found)],
        "b_is_longer": found.num_longer,
        "b_is_shorter": found.num_shorter,
        "failed_in_both": found.num_failed_in_both,
        "failed_in_a_alone": found.num_failed_in_a,
        "failed_in_b_alone": found.num_failed_in_b,
        "first": [_row_fields(row) for row in found.first],
    }


def _side_fields(side: Side) -> dict[str, Any]:
    return {
        "file": side.name,
        "rows": side.num_rows,
        "only_here": side.num_only,
        "only_here_ids": side.only_ids,
        "ok": side.num_ok,
        "failed": side.num_rows - side.num_ok,
        "mean_completion_tokens": side.tokens.mean,
        "median_completion_tokens": side.tokens.median,
        "finish_reasons": dict(sorted(side.finish_reasons.items())),
        "errors": [
            {
                "message": kind.message,
                "count": kind.count,
                "custom_ids": kind.first,
            }
            for kind in side.errors.most_frequent(_MAX_SHOWN_KINDS)
        ],
    }


def _row_fields(row: DifferingRow) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "custom_id": row.custom_id,
        "row_a": row.row_a,
        "row_b": row.row_b,
    }
    if isinstance(row.difference, TextDifference):
        a, b = _excerpts(row.difference)
        position = {"choice": row.difference.choice, "character": row.difference.position}
        return fields | position | {"a": a, "b": b}
    if isinstance(row.difference, NumberDifference):
        numbers = row.difference
        return fields | {"max_abs_difference": numbers.max_abs, "cosine": numbers.cosine}
    return fields | {"error_a": row.error_a, "error_b": row.error_b}
