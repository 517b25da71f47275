"""Delta and Iceberg tables through the commands that take tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.api_rig import Shell
from tidemill.offline.console.errors import BadInput
from tidemill.offline.files.lake_tables import newest_metadata

PROMPT = ("--prompt", "{{ text }}", "--id", "id")
TABLE = pa.table({"id": ["a", "b", "c"], "text": ["Hello", "Hi", "Bye"], "day": ["x y", "z", "z"]})


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_recipe() -> str:
    """Write a recipe by which a scripted engine says hi."""
    reply = "{choices = [{message = {content = 'hi'}, finish_reason = 'stop'}]}"
    Path("r.toml").write_text(f"prompt = '{{{{ text }}}}'\nparams.reply = {reply}")
    return "r.toml"


def write_delta(table: pa.Table = TABLE, **how: Any) -> str:
    """Write a Delta table, or rows of it."""
    deltalake = pytest.importorskip("deltalake")
    deltalake.write_deltalake("reviews", table, partition_by=["day"], **how)
    return "reviews"


def ids(result: Any) -> list[str]:
    """Return the ids of the requests that `check` shows."""
    shown = [json.loads(text.partition(":\n")[2]) for text in result.out.split("\nrow ")[1:]]
    return [one["custom_id"] for one in shown]


def test_a_delta_table_gives_the_table_of_its_rows(run: Any) -> None:
    """It has partition columns and columns added later, in a file next to the folder."""
    source = write_delta()
    later = pa.table({"id": ["d"], "text": ["x"], "day": ["x y"], "stars": [5]})
    write_delta(later, mode="append", schema_mode="merge")
    assert run(source, "--recipe", write_recipe()) == 0
    found = pq.read_table("reviews.output.parquet")
    assert found.column("output_text").to_pylist() == ["hi"] * 4
    rows = sorted(found.select([*TABLE.column_names, "stars"]).to_pylist(), key=lambda r: r["id"])
    assert rows == [row | {"stars": None} for row in TABLE.to_pylist()] + later.to_pylist()


def test_rows_that_are_appended_come_last(shell: Shell) -> None:
    """Earlier rows keep their places, and deleted ones are gone."""
    deltalake = pytest.importorskip("deltalake")
    write_delta(TABLE.slice(1))
    write_delta(TABLE.slice(0, 1), mode="append")
    for _ in range(2):
        assert ids(shell.type("check", "reviews", *PROMPT)) == ["b", "c", "a"]
    deltalake.DeltaTable("reviews").delete("id = 'b'")
    assert sorted(ids(shell.type("check", "reviews", *PROMPT))) == ["a", "c"]
    result = shell.type("submit", "reviews", *PROMPT, "--wait")
    assert (result.status, "reading version 2 of reviews" in result.err) == (0, True), result.err
    assert pq.read_table("reviews.output.parquet").num_rows == 2


def test_a_delta_table_that_has_changed_is_noticed_on_resume(run: Any) -> None:
    """It is refused like a file with other lines; failed rows may have been corrected."""
    source = write_delta(TABLE.set_column(1, "text", pa.array(["x", None, "z"])))
    flags = ["--recipe", write_recipe(), "--on-invalid-line", "skip"]
    assert run(source, *flags) == 0
    write_delta(mode="overwrite")
    with pytest.raises(BadInput, match=r"row [12] of"):  # partitions come in any order
        run(source, *flags, "--resume", "--retry-failed")


def test_a_damaged_delta_table_is_a_sentence(run: Any) -> None:
    """Its log is none, a file of it is gone."""
    source = write_delta()
    next(Path("reviews").rglob("*.parquet")).unlink()
    with pytest.raises(BadInput, match=r"reviews cannot be run\. The Delta table is damaged"):
        run(source, *PROMPT)
    next(Path("reviews/_delta_log").glob("*.json")).write_text("{")
    with pytest.raises(BadInput, match="reviews cannot be read as a Delta table"):
        run(source, *PROMPT)


def test_an_iceberg_table_gives_the_table_of_its_rows(run: Any, shell: Shell) -> None:
    """They are from its newest snapshot, without deleted rows."""
    pytest.importorskip("pyiceberg")
    pytest.importorskip("sqlalchemy")
    from pyiceberg.catalog.sql import SqlCatalog

    where = Path.cwd().as_uri()
    catalog = SqlCatalog("test", uri="sqlite:///:memory:", warehouse=where)
    catalog.create_namespace("org")
    table = catalog.create_table("org.reviews", TABLE.schema, location=f"{where}/reviews")
    table.append(TABLE.slice(0, 2))
    table.append(TABLE.slice(2))
    expected = ids(shell.type("check", "reviews", *PROMPT))
    assert sorted(expected) == ["a", "b", "c"]
    assert ids(shell.type("check", "reviews", *PROMPT)) == expected
    table.delete("id = 'b'")
    assert run("reviews", "--recipe", write_recipe()) == 0
    found = pq.read_table("reviews.output.parquet").to_pylist()
    kept = [{name: row[name] for name in TABLE.column_names} for row in found]
    assert sorted(kept, key=lambda row: row["id"]) == [TABLE.to_pylist()[0], TABLE.to_pylist()[2]]
    catalog.close()


@pytest.mark.parametrize(
    ("file", "module", "words"),
    [
        ("t/_delta_log/0.json", "deltalake", "reading Delta tables needs deltalake"),
        ("t/metadata/v1.metadata.json", "pyiceberg", "reading Iceberg tables needs pyiceberg"),
    ],
)
def test_a_missing_extra_of_lake_tables_is_reported(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, file: str, module: str, words: str
) -> None:
    """The error comes before anything is read."""
    Path(file).parent.mkdir(parents=True)
    Path(file).write_text("{}")
    monkeypatch.setitem(sys.modules, module, None)
    result = shell.type("check", "t", *PROMPT)
    assert (result.status, words in result.err) == (1, True), result.err


def test_the_newest_metadata_is_read() -> None:
    """By its number, or as the hint of a table without a catalog says."""
    folder = Path("t/metadata")
    folder.mkdir(parents=True)
    for name in ("00009-b", "00010-a"):
        (folder / f"{name}.metadata.json").touch()
    assert newest_metadata(Path("t")).name == "00010-a.metadata.json"
    for name in ("v9", "v10", "v11"):
        (folder / f"{name}.metadata.json").touch()
    (folder / "version-hint.text").write_text("10\n")
    assert newest_metadata(Path("t")).name == "v10.metadata.json"
