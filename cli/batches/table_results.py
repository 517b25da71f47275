"""Table results: rows of a fetched batch put in the order of its requests, and made a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Final

from pydantic_core import from_json

from tidemill.batch.file.lines import LineError, RawLine, parse_line
from tidemill.batch.file.rows import print_malformed, print_not_run

from ..console.terminal import log
from ..files.input_file import InputFile
from ..files.table_options import TableOptions
from ..files.table_output import write_table

ROWS_SUFFIX: Final = ".rows.jsonl"
ERRORS_SUFFIX: Final = ".errors.jsonl"
_NOT_RUN = "This row was not run: its batch ended before."


def make_table(options: TableOptions, requests: InputFile) -> None:
    """Make the table of an ended batch of its fetched rows, and remove these."""
    fetched = [path for name in fetched_files(options.output) if (path := Path(name)).exists()]
    if not fetched:
        return  # no row was ever made
    rows = options.output.with_name(f"{options.output.name}.joined.jsonl")
    try:
        with rows.open("wb") as file:
            file.writelines(in_order(requests.lines(), fetched))
        assert requests.table is not None
        write_table(requests.table, rows, options.output, options.output_format)
    finally:
        rows.unlink(missing_ok=True)
    for path in fetched:
        path.unlink()
    log(f"the table is in {options.output}")


def fetched_files(output: Path) -> tuple[str, str]:
    """Return where good and other rows of a table lie until it is made."""
    return f"{output}{ROWS_SUFFIX}", f"{output}{ERRORS_SUFFIX}"


def in_order(lines: Iterable[RawLine], files: Iterable[Path]) -> Iterator[bytes]:
    """Yield the row of each line; what was not run gets one that says so."""
    with ExitStack() as stack:
        readers = [_RowReader(stack.enter_context(path.open("rb"))) for path in files]
        for raw in lines:
            try:
                custom_id: str | None = parse_line(raw).custom_id
                missing = print_not_run(
                    raw.digest, custom_id, code="batch_not_run", message=_NOT_RUN
                )
            except LineError as exc:
                custom_id, missing = exc.custom_id, print_malformed(raw.digest, exc)
            found = next((one for one in readers if one.is_of(custom_id)), None)
            yield missing if found is None else found.pop()


class _RowReader:
    """Reads rows with one row of look-ahead."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._data = b""
        self._custom_id: Any = None
        self.pop()

    def is_of(self, custom_id: str | None) -> bool:
        """Say whether the next row is that of a line."""
        return bool(self._data) and self._custom_id == custom_id

    def pop(self) -> bytes:
        """Return the next row and advance."""
        data, self._data = self._data, self._file.readline()
        # A server may be another's, and its rows have other heads than ours.
        self._custom_id = from_json(self._data).get("custom_id") if self._data else None
        return data
