"""A file as a browser sends it, the choices in the form, and the result of their check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tidemill.batch.allowed_media import AllowedMedia
from tidemill.batch.column_spelling import expression_of
from tidemill.batch.file.expected_tokens import ExpectedTokens
from tidemill.batch.fleet import WorkerRate
from tidemill.batch.model import OnInvalidLine
from tidemill.batch.table.recipe import TableFormat
from tidemill.protocol.validation import printable

from .trial import TRIAL_ROWS

_MAX_COLUMNS: Final = 200
_READ_BYTES: Final = 4096
TABLE_KINDS: Final[Mapping[TableFormat, str]] = {
    "parquet": "Parquet table",
    "csv": "CSV table",
    "tsv": "TSV table",
    "jsonl": "table of JSON rows",
    "arrow": "Arrow table",
}


class BytesMissing(Exception):
    """Bytes of a file that another check needs."""

    def __init__(self, begin: int, end: int) -> None:
        super().__init__(f"bytes {begin} to {end}")
        self.range = (begin, end)


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

    def read(self, begin: int, end: int) -> bytes:
        """Return bytes of the file; raises BytesMissing if the browser has not sent them.

        Those behind them are probably needed next.
        """
        end = min(end, self.num_bytes)
        for place, data in ((0, self.head), *self.parts.items()):
            if place <= begin and end <= place + len(data):
                return data[begin - place : end - place]
        raise BytesMissing(begin, max(end, min(begin + _READ_BYTES, self.num_bytes)))


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Choices in the form; `recipe` has the keys of a table's recipe, None without a prompt.

    Where tables do not run, only their kind is returned. `media` are those of `LineChecker`.
    """

    models: Mapping[str, str] | None = None
    recipe: Mapping[str, Any] | None = None
    on_invalid_line: OnInvalidLine = "fail"
    strict_parameters: bool = False
    runs_tables: bool = True
    media: AllowedMedia | None = None


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
    cost_per_hour = rate.cost_per_hour(gpu_hour_price)
    cost = None if cost_per_hour is None else seconds / 3600 * cost_per_hour
    return Estimate(check.expected, seconds, cost)


def times(tokens: ExpectedTokens, factor: float) -> ExpectedTokens:
    """Return tokens multiplied by a factor."""
    return ExpectedTokens(round(tokens.input * factor), round(tokens.output * factor))


def table_check(check: FileCheck, names: Sequence[str]) -> FileCheck:
    """Return the check of a table with its columns."""
    shown = names[:_MAX_COLUMNS]
    columns = [ShownColumn(printable(name, 100), expression_of(name)) for name in shown]
    return replace(check, is_table=True, columns=columns, num_columns=len(names))
