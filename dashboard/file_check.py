"""Check of a file before its upload, from its first bytes, by the parsers that read it later.

`check_file` says whether a batch can start, and what its requests look like. It reads no store.
"""

from __future__ import annotations

import io
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pydantic_core import to_json

from tidemill.batch.column_spelling import expression_of
from tidemill.batch.file.duplicate_ids import DuplicateFinder
from tidemill.batch.file.expected_tokens import NO_TOKENS, ExpectedTokens, expected_tokens
from tidemill.batch.file.formats import FileFormat, begins_with_request, detect_format, gunzip
from tidemill.batch.file.json_array import elements_as_lines
from tidemill.batch.file.lines import (
    BOM,
    JSON_WHITE_SPACE,
    FormatError,
    Line,
    RawLine,
    read_lines,
)
from tidemill.batch.fleet import WorkerRate
from tidemill.batch.model import OnInvalidLine
from tidemill.batch.table.detection import detect_table
from tidemill.batch.table.errors import RecipeError, TableError
from tidemill.batch.table.parquet_cells import NotReadHere, first_bytes, first_cells
from tidemill.batch.table.parquet_sizes import Footer, read_footer
from tidemill.batch.table.questions import check_free_columns
from tidemill.batch.table.recipe import Recipe, TableFormat, parse_recipe
from tidemill.batch.table.request_template import RequestTemplate
from tidemill.batch.table.text_rows import CsvRows, json_row
from tidemill.batch.validation import Findings, LineChecker, judge
from tidemill.protocol.validation import printable

from .trial import TRIAL_ROWS

_TEXT_BYTES: Final = 2**20
_PACKED_PIECE: Final = 2**12
_MAX_RENDERED: Final = 200
_RENDER_SECONDS: Final = 2.0
"""Limit for the rows of a table; a slow template may need a fifth of a second for each."""

_MAX_RANGE_BYTES: Final = 3 * 2**19
"""Limit for the parts of a Parquet file that a browser sends, because the body has one."""

_MAX_SHOWN: Final = 3
_MAX_CHARS: Final = 1_200
_MAX_ERRORS: Final = 5
_MAX_COLUMNS: Final = 200
_LINES_SUFFIXES: Final = (".jsonl", ".ndjson", ".json")
_GZIP: Final = b"\x1f\x8b"
_KINDS: Final[Mapping[TableFormat, str]] = {
    "parquet": "Parquet table",
    "csv": "CSV table",
    "tsv": "TSV table",
    "jsonl": "table of JSON rows",
    "arrow": "Arrow table",
}
_MORE_NAMES: Final = "Use one of these."
_TEMPLATE: Final = re.compile(r"the template of `(?:messages\[\d+\]\.content|prompt|input)`")
_CUT: Final = "unexpected end of data"  # the csv module, in a quoted cell


@dataclass(frozen=True, slots=True)
class FileStart:
    """A file as a browser sends it: its name, its size and its first bytes, or all of them.

    `tail` is the end of a Parquet file, with its footer, and `parts` are other bytes of it by the
    place of the first one.
    """

    name: str
    num_bytes: int
    head: bytes
    tail: bytes = b""
    parts: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """True if `head` is the whole file."""
        return len(self.head) >= self.num_bytes


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Choices in the form; `recipe` has the keys of a table's recipe, None without a prompt."""

    models: Mapping[str, str] | None = None
    recipe: Mapping[str, Any] | None = None
    on_invalid_line: OnInvalidLine = "fail"
    strict_parameters: bool = False


@dataclass(frozen=True, slots=True)
class ShownColumn:
    """A column of a table, and the expression that prints it in a prompt."""

    name: str
    expression: str


@dataclass(frozen=True, slots=True)
class FileCheck:
    """Result of a check.

    `errors` prevent the batch, `notes` do not. `num_rows` and `expected` are None if unknown, and
    extrapolated from `num_read` rows unless the number `is_exact`. A table without a recipe
    `needs_recipe`. A batch of the first rows alone is possible if it `can_try`. `ranges` are the
    first and last places of the bytes with which another check could show the requests.
    """

    kind: str = "file"
    cut: str = ""
    unit: str = "row"
    errors: Sequence[str] = ()
    num_errors: int = 0
    notes: Sequence[str] = ()
    num_rows: int | None = None
    is_exact: bool = False
    num_read: int = 0
    is_table: bool = False
    needs_recipe: bool = False
    columns: Sequence[ShownColumn] = ()
    num_columns: int = 0
    models: Sequence[str] = ()
    endpoints: Sequence[str] = ()
    model: str | None = None
    endpoint: str = ""
    requests: Sequence[Sequence[tuple[str, str]]] = ()
    expected: ExpectedTokens | None = None
    ranges: Sequence[tuple[int, int]] = ()

    @property
    def can_start(self) -> bool:
        """True if nothing is known that would make the batch fail."""
        return not self.errors and not self.needs_recipe

    @property
    def can_try(self) -> bool:
        """True if the browser can cut the first rows off, and there are more."""
        has_more = self.num_rows is None or self.num_rows > TRIAL_ROWS
        return self.can_start and bool(self.cut) and has_more


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated tokens, and the seconds of one worker and their cost if they are known."""

    tokens: ExpectedTokens
    seconds: float | None = None
    cost: float | None = None


def estimate(check: FileCheck, rate: WorkerRate, gpu_hour_price: float | None) -> Estimate | None:
    """Return the estimate for a checked file, by the measured rate of its model's workers."""
    if check.expected is None:
        return None
    if not rate.expected_work_per_second:
        return Estimate(check.expected)
    seconds = check.expected.work / rate.expected_work_per_second
    cost = None
    if gpu_hour_price is not None and rate.num_gpus:
        cost = seconds / 3600 * rate.num_gpus * gpu_hour_price
    return Estimate(check.expected, seconds, cost)


def check_file(start: FileStart, options: CheckOptions) -> FileCheck:
    """Return what intake would say about a file, as far as its first bytes show."""
    try:
        form = None if begins_with_request(start.head) else detect_table(start.head)
        if form in {"parquet", "arrow"}:
            return _check_binary(start, form, options)
        text = _Text.of(start)
        if form is None or (form != "jsonl" and _is_named_or_has_requests(start, text.data)):
            return _check_requests(detect_format(start.head), text, options)
        return _check_text_table(form, text, options)
    except (FormatError, TableError) as exc:
        return FileCheck(errors=(printable(str(exc)),), num_errors=1)


def _is_named_or_has_requests(start: FileStart, text: bytes) -> bool:
    """Say whether a text that is not JSON at its start was meant to be requests."""
    is_named = start.name.lower().removesuffix(".gz").endswith(_LINES_SUFFIXES)
    return is_named or any(map(begins_with_request, text.split(b"\n", 100)[:100]))


@dataclass(frozen=True, slots=True)
class _Text:
    """Decompressed text at the start of a file; `num_bytes` is the estimated size of all of it."""

    data: bytes
    num_bytes: float
    is_whole: bool
    is_gzip: bool

    @classmethod
    def of(cls, start: FileStart) -> _Text:
        """Return the text of a file; raises FormatError for damaged gzip data."""
        if not start.head.startswith(_GZIP):
            return cls(start.head, start.num_bytes, start.is_whole, is_gzip=False)
        num_packed = 0

        def packed() -> Iterator[bytes]:
            nonlocal num_packed
            for place in range(0, len(start.head), _PACKED_PIECE):
                piece = start.head[place : place + _PACKED_PIECE]
                num_packed += len(piece)
                yield piece

        data = b""
        for piece in gunzip(packed(), is_whole=start.is_whole):
            data += piece
            if len(data) >= _TEXT_BYTES:
                break
        is_whole = start.is_whole and len(data) < _TEXT_BYTES
        ratio = len(data) / max(1, num_packed)
        return cls(data, len(data) if is_whole else start.num_bytes * ratio, is_whole, is_gzip=True)

    def lines(self, *, is_array: bool) -> bytes:
        """Return the complete lines, or elements as lines; raises FormatError."""
        data = self.data
        if is_array:
            elements = elements_as_lines((data,))
            data = b"".join(elements) if self.is_whole else next(elements)
        return data if self.is_whole else data[: data.rfind(b"\n") + 1]

    def num_rows(self, num_read: int, num_read_bytes: int) -> int | None:
        """Return the number of rows in all, by those read and their bytes."""
        if self.is_whole:
            return num_read
        return round(num_read * self.num_bytes / num_read_bytes) if num_read else None


def _check_requests(form: FileFormat, text: _Text, options: CheckOptions) -> FileCheck:
    lines = text.lines(is_array=form.is_array)
    raw = read_lines(io.BytesIO(lines))
    check = FileCheck(
        kind=f"{'JSON array' if form.is_array else 'JSONL'} of requests",
        cut="array" if form.is_array else "lines",
        unit=form.unit,
    )
    checked = _check_lines(check, raw, options, mistake=form.suspicion, is_whole=text.is_whole)
    if not checked.num_read and not text.is_whole:
        words = f"The first {form.unit} is too long to be checked here; the upload checks it."
        return replace(checked, notes=(words,), errors=(), num_errors=0, cut="", expected=None)
    return _extrapolated(checked, text, checked.num_read, len(lines))


def _extrapolated(check: FileCheck, text: _Text, num_read: int, num_read_bytes: int) -> FileCheck:
    num_rows = text.num_rows(num_read, num_read_bytes)
    expected = check.expected
    if expected is not None and num_rows is not None:
        expected = _times(expected, num_rows / max(1, check.num_read))
    return replace(check, num_rows=num_rows, is_exact=text.is_whole, expected=expected)


def _times(tokens: ExpectedTokens, factor: float) -> ExpectedTokens:
    return ExpectedTokens(round(tokens.input * factor), round(tokens.output * factor))


def _check_lines(
    check: FileCheck,
    lines: Iterable[RawLine],
    options: CheckOptions,
    *,
    mistake: str | None = None,
    is_whole: bool,
) -> FileCheck:
    """Return the check of the lines of requests, or of a table's rendered rows."""
    findings = Findings()
    shown: list[Line] = []
    models: dict[str, None] = {}
    endpoints: dict[str, None] = {}
    with DuplicateFinder() as finder:
        checker = LineChecker(
            findings,
            models=options.models,
            endpoint=None,
            add_id=finder.add,
            more_names=_MORE_NAMES,
        )
        for raw in lines:
            line = checker.check(raw)
            if line is None:
                continue
            if len(shown) < _MAX_SHOWN:
                shown.append(line)
            models[str(line.body.get("model") or findings.model or "")] = None
            endpoints[line.url] = None
        duplicates = finder.find()
    verdict = judge(
        findings,
        duplicates,
        mistake=mistake,
        on_invalid_line=options.on_invalid_line,
        strict_parameters=options.strict_parameters,
        unit=check.unit,
    )
    is_skipping = options.on_invalid_line == "skip"
    errors = verdict.errors
    if is_skipping and findings.model is None and findings.num_rows and not is_whole:
        errors = ()  # later lines may be valid
    notes = (
        []
        if options.strict_parameters
        else [f"Ignored: {each.sentence(check.unit)}" for each in findings.unknown.most_frequent(3)]
    )
    if is_skipping and findings.num_errors and not errors:
        notes.insert(
            0,
            f"{findings.num_errors:,} of the first {findings.num_rows:,} {check.unit}s are invalid "
            f"and get an error row. The first is {_sentence(findings.errors[0], check.unit)}",
        )
    return replace(
        check,
        errors=[_sentence(error, check.unit) for error in errors[:_MAX_ERRORS]],
        num_errors=verdict.num_errors if errors else 0,
        notes=[*check.notes, *map(printable, notes)],
        num_read=findings.num_rows,
        models=[printable(name, 100) for name in [*models][:_MAX_ERRORS] if name],
        endpoints=[*endpoints][:_MAX_ERRORS],
        model=findings.model,
        endpoint=findings.endpoint or "",
        requests=[_shown(line.body) for line in shown],
        expected=findings.expected if findings.num_rows else NO_TOKENS,
    )


def _sentence(error: Any, unit: str) -> str:
    place = "" if error.line is None else f"{unit.capitalize()} {error.line:,}: "
    return printable(f"{place}{_TEMPLATE.sub('the prompt', error.message)}", 600)


def _shown(body: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the messages of a request, or its other fields, as pairs of a name and a text."""
    messages = body.get("messages")
    pairs: list[tuple[Any, Any]] = []
    if isinstance(messages, list) and all(isinstance(each, dict) for each in messages):
        pairs = [(each.get("role"), each.get("content")) for each in messages]
    else:
        pairs = [*body.items()]
    found = [(printable(str(name), 60), _text(value)) for name, value in pairs[:8]]
    return found or [("messages", "[]")]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return printable(value, _MAX_CHARS)
    try:
        return printable(to_json(value).decode(), _MAX_CHARS)
    except ValueError:  # a lone surrogate
        return printable(repr(value), _MAX_CHARS)


def _check_text_table(form: TableFormat, text: _Text, options: CheckOptions) -> FileCheck:
    """Return the check of a CSV, TSV, or JSON table."""
    cells: list[Sequence[Any]]
    data = text.data.removeprefix(BOM).lstrip(JSON_WHITE_SPACE)
    if form == "jsonl":
        is_array = data.startswith(b"[")
        data = text.lines(is_array=is_array)
        unit = "Element" if is_array else "Line"
        rows = [
            json_row(raw, f"{unit} {raw.number:,} of the table")
            for raw in read_lines(io.BytesIO(data))
        ]
        names = [*dict.fromkeys(name for row in rows for name in row)]
        cells = [[row.get(name) for row in rows] for name in names]
        num_rows, cut = len(rows), "array" if is_array else "lines"
    else:
        data = text.lines(is_array=False)
        read = CsvRows(io.BytesIO(data), _rewound, data)
        names, found, num_read_bytes = read.names, [], 0
        try:
            for row in read.rows():
                found.append(row)
                num_read_bytes += read.num_bytes
        except TableError as exc:
            if text.is_whole or _CUT not in str(exc):
                raise
        cells = [[row[place] or None for row in found] for place in range(len(names))]
        num_rows, cut, form = len(found), "csv", read.format
        data = data[:num_read_bytes]
    if names and (repeated := _repeated(names)) is not None:
        raise TableError(f"The table has more than one column named `{repeated}`: rename them.")
    check = _table(FileCheck(kind=_KINDS[form], cut=cut), names)
    if not num_rows:
        if text.is_whole:
            raise TableError("The table has no rows.")
        words = "The first row is too long to be checked here; the upload checks it."
        return replace(check, notes=(words,), needs_recipe=options.recipe is None, cut="")
    if options.recipe is None:
        check = replace(check, needs_recipe=True)
    else:
        columns = dict(zip(names, cells, strict=True))
        check = _check_recipe(check, options, columns, num_rows, is_whole=text.is_whole)
    return _extrapolated(check, text, num_rows, max(1, len(data)))


def _rewound(file: Any) -> Any:
    file.seek(0)
    return file


def _repeated(names: Sequence[str]) -> str | None:
    name, count = Counter(names).most_common(1)[0]
    return printable(name, 100) if count > 1 else None


def _table(check: FileCheck, names: Sequence[str]) -> FileCheck:
    columns = [ShownColumn(printable(name, 100), expression_of(name)) for name in names]
    return replace(check, is_table=True, columns=columns[:_MAX_COLUMNS], num_columns=len(columns))


def _check_recipe(
    check: FileCheck,
    options: CheckOptions,
    cells: Mapping[str, Sequence[Any]],
    num_rows: int,
    *,
    is_whole: bool,
) -> FileCheck:
    """Return the check of a table's rows, rendered by its recipe."""
    try:
        recipe, template = _compiled(options, [*cells])
    except RecipeError as exc:
        return replace(check, errors=(_of_recipe(exc),), num_errors=1)
    num_rendered = min(num_rows, _MAX_RENDERED)
    read = {name: cells[name][:num_rendered] for name in template.columns}
    rendered = _in_time(template.lines(read, num_rendered, 1))
    raw = [RawLine(number, line.rstrip(b"\n")) for number, line in enumerate(rendered, 1)]
    is_all = is_whole and len(raw) == num_rows
    checked = _check_lines(check, raw, options, is_whole=is_all)
    return replace(checked, endpoint=recipe.url, endpoints=(recipe.url,))


def _compiled(options: CheckOptions, names: Sequence[str]) -> tuple[Recipe, RequestTemplate]:
    """Return the recipe in the form and its template for a table; raises RecipeError."""
    recipe = parse_recipe(options.recipe or {}, may_escalate=True)
    template = RequestTemplate(recipe, names)
    check_free_columns(recipe.questions, names if recipe.keep is None else recipe.keep)
    return recipe, template


def _in_time(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines until they have taken too long, at least one."""
    until = time.monotonic() + _RENDER_SECONDS
    for line in lines:
        yield line
        if time.monotonic() > until:
            return


def _of_recipe(error: RecipeError) -> str:
    """Return the error of a recipe as a sentence about the form."""
    text = printable(_TEMPLATE.sub("the prompt", str(error)), 600)
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('?') else '.'}"


def _check_binary(start: FileStart, form: TableFormat, options: CheckOptions) -> FileCheck:
    """Return the check of a Parquet or Arrow table, whose cells are not read here."""
    notes = (
        ["The rows of Arrow tables are read only after the upload, so no prompts are shown."]
        if form == "arrow"
        else []
    )
    check, footer, names = FileCheck(kind=_KINDS[form]), None, None
    if form == "parquet":
        tail = start.tail or start.head
        if not tail.endswith(b"PAR1"):
            raise TableError("The Parquet table is truncated: it does not end with `PAR1`.")
        footer = read_footer(io.BytesIO(tail))
        if footer is not None:
            names = footer.columns()
            check = replace(check, num_rows=footer.num_rows, is_exact=True)
            if not footer.num_rows:
                raise TableError("The table has no rows.")
    check = _table(check, names or ())
    if names is None:
        notes.append("Its columns are not known before the upload: check their spelling.")
    check = replace(check, notes=notes, needs_recipe=options.recipe is None)
    if options.recipe is None:
        return check
    return _check_blind(check, options, names, footer, start.parts)


def _check_blind(
    check: FileCheck,
    options: CheckOptions,
    names: Sequence[str] | None,
    footer: Footer | None,
    parts: Mapping[int, bytes],
) -> FileCheck:
    """Return the check of a recipe by a request with its parameters, and by the first rows.

    The first rows are those of a Parquet table whose first bytes of the columns are in `parts`.
    """
    columns: Sequence[str] = ()
    lines: Sequence[bytes] = ()
    try:
        if names is None:
            recipe = parse_recipe(options.recipe or {}, may_escalate=True)
        else:
            recipe, template = _compiled(options, names)
            columns = template.columns
            if footer is not None:
                check, lines = _first_lines(check, template, footer, parts)
    except RecipeError as exc:
        return replace(check, errors=(_of_recipe(exc),), num_errors=1)
    body = {**recipe.fields, **recipe.body_params}
    line = to_json({"custom_id": "1", "url": recipe.url, "body": body})
    raw = [RawLine(number, each.rstrip(b"\n")) for number, each in enumerate(lines or [line], 1)]
    checked = _check_lines(check, raw, options, is_whole=True)
    expected = None
    if footer is not None:
        cells = sum(
            chunk.unpacked for group in footer.chunks for chunk in group if chunk.path[0] in columns
        )
        each = expected_tokens(body, len(line) + cells // max(1, footer.num_rows))
        expected = _times(each, footer.num_rows)
    requests = checked.requests if lines else ()
    counts: dict[str, Any] = {"num_rows": check.num_rows, "num_read": len(lines)}
    return replace(checked, requests=requests, expected=expected, **counts)


def _first_lines(
    check: FileCheck, template: RequestTemplate, footer: Footer, parts: Mapping[int, bytes]
) -> tuple[FileCheck, Sequence[bytes]]:
    """Return the requests of the first rows, or a check that says what is missing for them."""
    try:
        ranges = [first_bytes(footer, column) for column in template.columns]
        if sum(end - start for start, end in ranges) > _MAX_RANGE_BYTES:
            return _without_lines(check, "the columns of the prompt are too large"), ()
        if any(start not in parts for start, _ in ranges):
            return replace(check, ranges=ranges), ()
        cells, until = {}, time.monotonic() + _RENDER_SECONDS
        for column, (start, _) in zip(template.columns, ranges, strict=True):
            if time.monotonic() > until:
                return _without_lines(check, "the columns of the prompt take too long"), ()
            cells[column] = first_cells(footer, column, parts[start])
    except NotReadHere as exc:
        return _without_lines(check, str(exc)), ()
    num_rows = min([_MAX_SHOWN, footer.num_rows, *map(len, cells.values())])
    read = {name: values[:num_rows] for name, values in cells.items()}
    return check, [*_in_time(template.lines(read, num_rows, 1))]


def _without_lines(check: FileCheck, reason: str) -> FileCheck:
    note = f"No prompts are shown before the upload: {printable(reason, 300)}."
    return replace(check, notes=[*check.notes, note])
