"""View: rows of an output for reading, each next to its request if that is known."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tidemill.batch.file.answers import answer_of, first_numbers
from tidemill.batch.file.formats import open_lines
from tidemill.batch.file.lines import FormatError, LineError, parse_line, read_lines
from tidemill.batch.file.request_text import request_text

from ..console.terminal import coloured, without_control_chars
from ..files.request_lines import detect_source, unreadable
from ..files.row_file import RowFile, StoredRow
from ..files.source import Source

_MIN_COLUMNS_OF_TWO = 80
_MAX_ID_CHARS = 80
MAX_NUMBERS = 4


@dataclass(frozen=True, slots=True)
class ViewedRow:
    """A row as it is shown: `words` follow its number and ID, `reasons` are its finish reasons.

    `request` is None while it is unknown.
    """

    number: int
    custom_id: str | None
    words: str
    text: str
    is_failed: bool
    reasons: tuple[str, ...] = ()
    request: str | None = None


class AnswerText(NamedTuple):
    """Text of an answer, the words for its headline, and its finish reasons."""

    words: str
    text: str
    reasons: tuple[str, ...] = ()


def viewed_lines(rows: RowFile) -> Iterator[ViewedRow]:
    """Yield the rows of JSONL; raises BadInput for a line that is not a row."""
    for place, row in rows.rows():
        words, text, reasons = answer_text(row)
        yield ViewedRow(place.number, row.custom_id, words, text, row.body is None, reasons)


def matching_rows(
    rows: Iterable[ViewedRow], *, only_errors: bool, pattern: str | None
) -> Iterator[ViewedRow]:
    """Yield the rows with the pattern in their custom ID, answer or error, ignoring case."""
    folded = None if pattern is None else pattern.casefold()
    for row in rows:
        if only_errors and not row.is_failed:
            continue
        texts = (row.custom_id or "", row.text)
        if folded is None or any(folded in each.casefold() for each in texts):
            yield row


def with_requests(rows: list[ViewedRow], source: Source) -> list[ViewedRow]:
    """Return the rows with the first request of their custom ID; raises BadInput."""
    wanted = {row.custom_id for row in rows if row.custom_id is not None}
    found: dict[str | None, str] = {}
    try:
        for raw in read_lines(open_lines(detect_source(source), source.file)):
            if not wanted:
                break
            try:
                line = parse_line(raw)
            except LineError:
                continue
            if line.custom_id in wanted:
                wanted.remove(line.custom_id)
                found[line.custom_id] = request_text(line.body)
    except FormatError as exc:
        raise unreadable(source, exc) from exc
    return [replace(row, request=found.get(row.custom_id)) for row in rows]


def render_row(row: ViewedRow, max_chars: int | None) -> str:
    """Return the lines of a row for the terminal, side by side if it is wide enough."""
    # Imported late: the rest of the command does not need it.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = shutil.get_terminal_size().columns
    name = "without custom_id" if row.custom_id is None else row.custom_id[:_MAX_ID_CHARS]
    head = without_control_chars(f"row {row.number:,}  {name}  {row.words}")
    shown = (cut_text(text, max_chars) for text in (row.request, row.text) if text)
    texts = [Text(_clean(text)) for text in shown]
    if row.request and width < _MIN_COLUMNS_OF_TWO:
        texts.insert(1, Text("-" * (width // 4)))
    table = Table.grid(padding=(0, 2), expand=True)
    if row.request and width >= _MIN_COLUMNS_OF_TWO:
        table.add_column(ratio=1, overflow="fold")
        table.add_column(ratio=1, overflow="fold")
        table.add_row(*texts)
    else:
        table.add_column(overflow="fold")
        for text in texts:
            table.add_row(text)
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, highlight=False)
    console.print(table)
    lines = (line.rstrip() for line in out.getvalue().splitlines())
    return "\n".join([coloured(head, "red" if row.is_failed else "blue"), *lines, ""])


def answer_text(row: StoredRow) -> AnswerText:
    """Return the text of an answer or error."""
    if row.body is None:
        return AnswerText("error", row.error or "")
    answer = answer_of(row.body)
    reasons = tuple(dict.fromkeys(answer.finish_reasons))
    words = [*reasons]
    if answer.num_tokens is not None:
        words.append(f"{answer.num_tokens:,} tokens")
    texts = [*answer.texts] or [first_numbers(vector, MAX_NUMBERS) for vector in answer.vectors]
    if len(answer.texts) > 1:
        texts = [f"[{place}] {text}" for place, text in enumerate(texts)]
    return AnswerText(", ".join(words), "\n".join(texts), reasons)


def cut_text(text: str, max_chars: int | None) -> str:
    """Return the first characters of a text, with the number of omitted ones."""
    if max_chars is None or len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}… ({len(text) - max_chars:,} more characters)"


def _clean(text: str) -> str:
    """Return a text whose lines have no control characters."""
    lines = text.expandtabs(4).replace("\r\n", "\n").split("\n")
    return "\n".join(map(without_control_chars, lines))
