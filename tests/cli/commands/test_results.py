"""`tidemill results`: rows in files, printed, or as they come."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from typing import Any

import pytest
from pyarrow import parquet

from tests.cli.api_rig import Shell, line, submitted
from tests.cli.fake_api import row_of
from tidemill.cli.api.client import Client
from tidemill.cli.api.objects import RowPage
from tidemill.cli.batches import row_table


def test_results_of_a_batch_that_runs_are_not_there_yet(shell: Shell) -> None:
    """The error contains how to wait, and how to print rows before the end."""
    result = shell.type("results", submitted(shell))
    assert result.status == 1
    assert "`tidemill resume" in result.err
    assert "--follow" in result.err


def test_results_can_be_printed(shell: Shell) -> None:
    """Only successful rows are printed; failed ones are mentioned."""
    batch_id = submitted(shell, "a", "b", fail=True)
    shell.type("resume", batch_id)
    result = shell.type("results", batch_id, "-o", "-")
    assert result.status == 3
    assert result.out.encode() == row_of(line("a"))
    assert "1 row failed: fetch them with -e FILE" in result.err


def test_rows_are_printed_as_they_come(shell: Shell) -> None:
    """Each row is printed once, also if it finished behind a gap."""
    batch_id = submitted(shell, *"abcdefg")
    result = shell.type("results", batch_id, "--follow")
    assert result.status == 0
    assert [value["line"] for value in result.values] == [1, 3, 5, 7, 2, 4, 6]
    assert {value["custom_id"] for value in result.values} == set("abcdefg")


def test_reasons_of_failures_are_logged_once_per_kind(shell: Shell) -> None:
    """The reasons are logged with the error file's name, and after printed rows."""
    batch_id = submitted(shell, "a", "b", fail="`n` must be 1")
    shell.type("resume", batch_id)
    result = shell.type("results", batch_id, "-o", "out", "-e", "errors", "--force")
    assert result.status == 3
    assert "1 row failed, in errors:\n  1 × `n` must be 1\n" in result.err
    result = shell.type("results", batch_id, "--follow")
    assert "1 row failed:\n  1 × `n` must be 1 (line 2)\n" in result.err


TABLE = b"PAR1 a table PAR1"


def with_table(shell: Shell, url: str = "s3://b/output/reviews.parquet") -> str:
    """Return the id of an ended batch, one of whose two rows has failed, with a table of them."""
    batch_id = submitted(shell, "a", "b", fail=True)
    shell.type("resume", batch_id, "-o", "elsewhere", "-e", "else")
    shell.api.files["file-table"] = TABLE
    shell.api.batches[batch_id]["tidemill"] |= {"table_file_id": "file-table", "table_url": url}
    return batch_id


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("s3://b/output/reviews.parquet", "output.parquet"),
        ("s3://b/output/reviews.csv.gz.table.csv", "output.csv"),
        ("s3://b/output/reviews.table.ndjson", "output.ndjson"),
    ],
)
def test_a_table_is_fetched_with_its_rows(shell: Shell, url: str, name: str) -> None:
    """The table has its own format; JSON contains its path."""
    batch_id = with_table(shell, url)
    result = shell.type("results", batch_id, "--json")
    assert result.status == 3
    names = {kind: f"{batch_id}.{kind}.jsonl" for kind in ("output", "errors")}
    assert result.values[-1]["saved"] == names | {"table": f"{batch_id}.{name}"}
    assert (shell.folder / f"{batch_id}.{name}").read_bytes() == TABLE
    assert (shell.folder / names["output"]).read_bytes() == row_of(line("a"))


@pytest.mark.parametrize("command", ["results", "resume"])
def test_a_table_is_fetched_alone_by_its_name(shell: Shell, command: str) -> None:
    """Rows are not fetched, except failed ones with -e."""
    batch_id = with_table(shell)
    result = shell.type(command, batch_id, "-o", "reviews.output.parquet")
    assert result.status == 3
    assert (shell.folder / "reviews.output.parquet").read_bytes() == TABLE
    assert not [*shell.folder.glob("batch_*")]
    shell.type(command, batch_id, "-o", "again.pq", "-e", "failed")
    assert (shell.folder / "again.pq").read_bytes() == TABLE
    assert (shell.folder / "failed").exists()


def test_a_batch_is_waited_for_and_written_as_a_table(shell: Shell) -> None:
    """A name that is taken is refused before the wait."""
    batch_id = submitted(shell, "a", "b")
    (shell.folder / "x.csv").touch()
    assert shell.type("resume", batch_id, "-o", "x.csv").status == 2
    assert shell.api.batches[batch_id]["status"] == "in_progress"
    assert shell.type("resume", batch_id, "-o", "x.csv", "--force").status == 0
    assert "custom_id" in (shell.folder / "x.csv").read_text(encoding="utf-8-sig")


def test_rows_that_are_named_come_without_their_table(shell: Shell) -> None:
    """The message contains the table's URL."""
    batch_id = with_table(shell)
    result = shell.type("results", batch_id, "-o", "-")
    assert result.out.encode() == row_of(line("a"))
    assert "its table is at s3://b/output/reviews.parquet" in result.err
    shell.type("results", batch_id, "-o", "rows.jsonl")
    assert not [*shell.folder.glob("*.parquet")]


def test_a_table_that_is_there_is_not_written_over(shell: Shell) -> None:
    """Nothing is fetched in that case."""
    batch_id = with_table(shell)
    (shell.folder / f"{batch_id}.output.parquet").write_bytes(b"mine")
    result = shell.type("results", batch_id)
    assert result.status == 2
    assert f"{batch_id}.output.parquet already exists" in result.err
    assert not (shell.folder / f"{batch_id}.output.jsonl").exists()
    shell.type("results", batch_id, "--force")
    assert (shell.folder / f"{batch_id}.output.parquet").read_bytes() == TABLE


def test_rows_are_not_called_a_table(shell: Shell) -> None:
    """A table's name is refused if there is no table, or one in another format."""
    batch_id = with_table(shell)
    result = shell.type("results", batch_id, "-o", "x.csv")
    assert result.err == (
        f"tidemill: the table of {batch_id} is a .parquet file, not .csv: "
        "pass -o a .parquet file name\n"
    )
    shell.api.batches[batch_id]["tidemill"] |= {"table_file_id": None, "table_url": None}
    result = shell.type("results", batch_id, "-o", "x.arrow")
    assert (result.status, [*shell.folder.glob("x.*")]) == (2, [])
    assert f"{batch_id} has no table, only rows" in result.err


def test_a_table_that_was_never_written_is_mentioned(shell: Shell) -> None:
    """Rows of a table that was cancelled do not have its columns."""
    batch_id = submitted(shell, "a")
    shell.type("resume", batch_id)
    words = "it has no table: its rows do not contain the columns of the input"
    for is_table in (True, False):
        batch = shell.api.batches[batch_id]
        batch["status"] = "cancelled"
        batch["tidemill"] |= {"is_table": is_table}
        for name in ("x.parquet", "x.csv", "x.jsonl"):
            result = shell.type("results", batch_id, "-o", name, "--force")
            assert (result.status, words in result.err) == (6, is_table)


def test_rows_of_requests_are_written_as_a_table(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row is in it, with its answer or its error; the file is not overwritten."""
    monkeypatch.setattr(row_table, "_GROUP_ROWS", 2)
    custom_ids = [*"abcd", "-e"]  # not changed, as for a spreadsheet
    batch_id = submitted(shell, *custom_ids, fail="busy")
    shell.type("resume", batch_id)
    for name in ("x.csv", "x.parquet"):
        result = shell.type("results", batch_id, "-o", name, "--json")
        assert result.status == 3
        assert result.values[-1]["saved"] == {"table": name}
        assert f"5 rows in {name}" in result.err
        assert shell.type("results", batch_id, "-o", name).status == 2
    table = parquet.read_table(shell.folder / "x.parquet")
    text = (shell.folder / "x.csv").read_text(encoding="utf-8-sig")
    rows = [*csv.DictReader(io.StringIO(text, newline=""))]
    assert table["custom_id"].to_pylist() == [row["custom_id"] for row in rows] == custom_ids
    assert table["error"].to_pylist()[-1] == rows[-1]["error"] == "busy"
    refused = shell.type("results", batch_id, "-o", "y.csv", "-e", "errors")
    assert (refused.status, "remove -e" in refused.err) == (2, True)


def test_a_table_that_lacks_answers_is_reported(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API does not return rows above 4 MB, and may list fewer rows than the batch counts."""
    batch_id = submitted(shell, *"abcde")
    shell.type("resume", batch_id)
    rows_of = Client.rows

    def without_one(*args: Any, **options: Any) -> RowPage:
        page = rows_of(*args, **options)
        error = {"code": "row_too_large", "message": "The row is too large."}
        large = {"custom_id": None, "error": error}
        rows = [{**row, **large} if row["line"] == 3 else row for row in page.rows]
        return replace(page, rows=rows)

    monkeypatch.setattr(Client, "rows", without_one)
    result = shell.type("results", batch_id, "-o", "x.csv")
    assert result.status == 1
    assert "x.csv lacks 1 row above 4 MB (line 3): fetch all rows with `tidemill res" in result.err
    assert (shell.folder / "x.csv").exists()
    monkeypatch.setattr(Client, "rows", rows_of)
    shell.api.batches[batch_id]["request_counts"]["completed"] += 1
    result = shell.type("results", batch_id, "-o", "x.parquet")
    assert (result.status, "x.parquet has 5 of 6 rows" in result.err) == (1, True)
