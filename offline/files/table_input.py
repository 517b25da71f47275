"""Table input: a table, or a folder of tables, to be rendered as the lines of an input file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pyarrow as pa

from tidemill.batch.file.lines import FormatError
from tidemill.batch.table.errors import TableError
from tidemill.batch.table.reader import Table, open_table, read_rows
from tidemill.batch.table.recipe import Recipe
from tidemill.batch.table.result_columns import kept_columns

from ..console.errors import BadInput
from .lake_tables import open_lake_table
from .source import Source, open_source
from .table_options import FORMATS_BY_SUFFIX, table_files

_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class TableInput:
    """Tables with the same columns, read one after the other; `name` is the input's name."""

    name: str
    recipe: Recipe
    sources: tuple[Source, ...]
    tables: tuple[Table, ...]
    schema: pa.Schema

    @classmethod
    def open(
        cls,
        name: str,
        recipe: Recipe,
        *,
        tmp_dir: Path | None,
        delays: tuple[float, ...],
        stack: ExitStack,
    ) -> Self:
        """Open a file, a stream, a URL or a folder; raises BadInput for anything but a table."""
        if (lake_table := open_lake_table(Path(name))) is not None:
            return cls.of_tables(name, recipe, [lake_table])
        found = (
            _open_file(stack.enter_context(open_source(path, tmp_dir=tmp_dir, delays=delays)))
            for path in _files_of(name)
        )
        return cls.of_tables(name, recipe, found)

    @classmethod
    def of_tables(cls, name: str, recipe: Recipe, found: Iterable[tuple[Source, Table]]) -> Self:
        """Return an input of opened tables; raises BadInput if their columns differ."""
        sources: list[Source] = []
        tables: list[Table] = []
        for source, table in found:
            sources.append(source)
            tables.append(table)
            if table.schema.remove_metadata() != tables[0].schema.remove_metadata():
                raise BadInput(
                    f"{source.name} cannot be run with {sources[0].name}: "
                    f"{_difference(tables[0].schema, table.schema)}"
                )
        return cls(name, recipe, tuple(sources), tuple(tables), tables[0].schema)

    @property
    def kept(self) -> pa.Schema:
        """Return the schema of the columns that are copied to the output."""
        return kept_columns(self.recipe, self.schema)

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Read columns of all rows, one if none is requested; raises BadInput if damaged."""
        for source, table in zip(self.sources, self.tables, strict=True):
            try:
                yield from read_rows(table, columns)
            except (TableError, FormatError) as exc:
                raise BadInput(f"{source.name} cannot be run. {exc}") from exc


def _open_file(source: Source) -> tuple[Source, Table]:
    try:
        return source, open_table(source.file)
    except (TableError, FormatError) as exc:
        raise BadInput(f"{source.name} cannot be run. {exc}") from exc


def _files_of(name: str) -> list[str]:
    """Return the files of an input: those in a folder by name, except hidden ones."""
    folder = Path(name)
    if not folder.is_dir():
        return [name]
    found = [*table_files(folder)]
    if not found:
        raise BadInput(
            f"the folder {name} contains no table: no file name ends in "
            f"{', '.join(FORMATS_BY_SUFFIX)}"
        )
    return [os.fspath(path) for path in found]


def _difference(first: pa.Schema, other: pa.Schema) -> str:
    if first.names != other.names:
        odd = [
            name
            for name in (*first.names, *other.names)
            if (name in first.names) != (name in other.names)
        ]
        named = ", ".join(f"`{name}`" for name in odd[:_MAX_NAMED])
        return f"only one of them has {named}" if odd else "their columns are in another order"
    pairs = [(field, other.field(field.name).type) for field in first]
    field, kind = next((field, kind) for field, kind in pairs if field.type != kind)
    return f"column `{field.name}` is {field.type} in one and {kind} in the other"
