"""Drops into a local cloud: check a file or table, drop it, and write its rows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tidemill.batch.file.rows import SEPARATOR_ESCAPES
from tidemill.offline.console.errors import BadInput
from tidemill.offline.console.terminal import amount, log
from tidemill.offline.files.paths import path_next_to
from tidemill.offline.files.table_options import check_rows_names, table_options

from ..transfer.download import check_target
from .batch_flags import check_file
from .opened_input import open_batch_input
from .submission import check_source

if TYPE_CHECKING:
    from localstack.local import LocalCloud


@dataclass(frozen=True, slots=True)
class LocalDrop:
    """A file to drop, or a table and its recipe, with the path for its rows.

    `name` is the drop's name, `body` the content of the object.
    """

    file: str
    output: Path
    name: str
    body: bytes
    recipe: str | None

    @classmethod
    def read(
        cls, arguments: argparse.Namespace, file: str, output_file: str | None, name: str
    ) -> Self:
        """Read a file and run a deployment's checks on it; raises CliError."""
        check_file(file)
        table = table_options(arguments, file, output_file)
        if table is None:
            output = Path(output_file or path_next_to(file, "output"))
            check_rows_names(str(output), input_file=file)
        else:
            output, name = table.output, name + _suffix_of(file)
        check_target(str(output), force=arguments.force)
        with open_batch_input(file, table, None) as (source, requests):
            check_source(source, None, {}, as_json=False)
            rows = None if requests is None else requests.table
            dropped = source if rows is None else rows.sources[0]
            dropped.file.seek(0)
            body = dropped.file.read()
        return cls(file, output, name, body, None if table is None else table.print_recipe())

    def fetch(self, cloud: LocalCloud, batch: Mapping[str, Any]) -> None:
        """Write the rows of the ended batch; raises BadInput with its errors if it failed."""
        if batch["status"] != "completed":
            raise BadInput(
                "\n".join([f"the batch of {self.file} is {batch['status']}", *_errors(batch)])
            )
        if self.recipe is None:
            results = _print_rows(cloud.rows(self.name, self.body))
        else:
            results = cloud.table(batch) or b""
        self.output.write_bytes(results)
        log(f"{amount(batch['request_counts']['total'], 'row')} in {self.output}")


def _print_rows(rows: Sequence[Mapping[str, Any]]) -> bytes:
    texts = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows)
    return "".join(f"{text.translate(SEPARATOR_ESCAPES)}\n" for text in texts).encode()


def _suffix_of(file: str) -> str:
    """Return the suffix of a table's name, such as `.csv.gz`."""
    plain = file.removesuffix(".gz")
    return Path(plain).suffix + file[len(plain) :]


def _errors(batch: Mapping[str, Any]) -> list[str]:
    found = (batch["errors"] or {"data": []})["data"]
    return [
        f"line {error['line']}: {error['message']}" if error["line"] else error["message"]
        for error in found
    ]
