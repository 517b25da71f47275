"""`tidemill results`: rows in files, printed, or as they come."""

from __future__ import annotations

import pytest

from tests.cli.api_rig import Shell, line, submitted
from tests.cli.fake_api import row_of


def test_results_of_a_batch_that_runs_are_not_there_yet(shell: Shell) -> None:
    """It says how to wait, and how to see rows before the end."""
    said = shell.type("results", submitted(shell))
    assert said.status == 1
    assert "`tidemill resume" in said.err
    assert "--follow" in said.err


def test_results_can_be_printed(shell: Shell) -> None:
    """The good rows alone; the others are told of."""
    batch_id = submitted(shell, "a", "b", fail=True)
    shell.type("resume", batch_id)
    said = shell.type("results", batch_id, "-o", "-")
    assert said.status == 3
    assert said.out.encode() == row_of(line("a"))
    assert "1 row failed: -e FILE fetches them" in said.err


def test_rows_are_printed_as_they_come(shell: Shell) -> None:
    """Each once, also those that were finished behind a gap."""
    batch_id = submitted(shell, *"abcdefg")
    said = shell.type("results", batch_id, "--follow")
    assert said.status == 0
    assert [value["line"] for value in said.values] == [1, 3, 5, 7, 2, 4, 6]
    assert {value["custom_id"] for value in said.values} == set("abcdefg")


def test_why_rows_failed_is_told_once_for_each_kind(shell: Shell) -> None:
    """In files with the name of theirs, and below rows that are printed as they come."""
    batch_id = submitted(shell, "a", "b", fail="`n` must be 1")
    shell.type("resume", batch_id)
    said = shell.type("results", batch_id, "-o", "out", "-e", "errors", "--force")
    assert said.status == 3
    assert "1 row failed, in errors:\n  1 × `n` must be 1\n" in said.err
    said = shell.type("results", batch_id, "--follow")
    assert "1 row failed:\n  1 × `n` must be 1 (line 2)\n" in said.err


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
def test_a_table_is_fetched_beside_its_rows(shell: Shell, url: str, name: str) -> None:
    """In its own format; for programs it is said where."""
    batch_id = with_table(shell, url)
    said = shell.type("results", batch_id, "--json")
    assert said.status == 3
    names = {kind: f"{batch_id}.{kind}.jsonl" for kind in ("output", "errors")}
    assert said.values[-1]["saved"] == names | {"table": f"{batch_id}.{name}"}
    assert (shell.folder / f"{batch_id}.{name}").read_bytes() == TABLE
    assert (shell.folder / names["output"]).read_bytes() == row_of(line("a"))


def test_a_table_is_fetched_alone_by_its_name(shell: Shell) -> None:
    """Rows stay where they are, but for failed ones that are asked for."""
    batch_id = with_table(shell)
    said = shell.type("results", batch_id, "-o", "reviews.output.parquet")
    assert said.status == 3
    assert (shell.folder / "reviews.output.parquet").read_bytes() == TABLE
    assert not [*shell.folder.glob("batch_*")]
    shell.type("results", batch_id, "-o", "again.pq", "-e", "failed")
    assert (shell.folder / "again.pq").read_bytes() == TABLE
    assert (shell.folder / "failed").exists()


def test_rows_that_are_named_come_without_their_table(shell: Shell) -> None:
    """Where it is, is told."""
    batch_id = with_table(shell)
    said = shell.type("results", batch_id, "-o", "-")
    assert said.out.encode() == row_of(line("a"))
    assert "its table is s3://b/output/reviews.parquet" in said.err
    shell.type("results", batch_id, "-o", "rows.jsonl")
    assert not [*shell.folder.glob("*.parquet")]


def test_a_table_that_is_there_is_not_written_over(shell: Shell) -> None:
    """Nothing is fetched then."""
    batch_id = with_table(shell)
    (shell.folder / f"{batch_id}.output.parquet").write_bytes(b"mine")
    said = shell.type("results", batch_id)
    assert said.status == 2
    assert f"{batch_id}.output.parquet is there already" in said.err
    assert not (shell.folder / f"{batch_id}.output.jsonl").exists()
    shell.type("results", batch_id, "--force")
    assert (shell.folder / f"{batch_id}.output.parquet").read_bytes() == TABLE


def test_rows_are_not_called_a_table(shell: Shell) -> None:
    """Neither where there is none, nor in another format."""
    batch_id = with_table(shell)
    said = shell.type("results", batch_id, "-o", "x.csv")
    assert said.err == f"tidemill: the table of {batch_id} is no csv: name a .parquet file for -o\n"
    shell.api.batches[batch_id]["tidemill"] |= {"table_file_id": None, "table_url": None}
    said = shell.type("results", batch_id, "-o", "x.parquet")
    assert (said.status, [*shell.folder.glob("x.*")]) == (2, [])
    assert f"{batch_id} has no table, only rows" in said.err
