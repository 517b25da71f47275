"""Tables through `tidemill run`: the same table out, with its results, whatever happens."""

from __future__ import annotations

import json
import re
import signal
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv, feather

from tests.offline.given import rows, wait_for_rows
from tests.offline.scripted import ScriptedEngine
from tidemill.cli.commands.retry import expand_rows
from tidemill.cli.main import main
from tidemill.offline.console.errors import BadInput, Refused
from tidemill.protocol import routes
from tidemill.protocol.routes import Route

REPLY = '{choices = [{message = {content = "hi"}, finish_reason = "stop"}]}'
NAMES = ["id", "text", "stars"]
TABLE = pa.table(
    {"id": ["a", "b", "c"], "text": ["Hello!", 'Hi "you"\n', "Bye."], "stars": [1, 2, 3]}
)


def write_table(path: Path, table: pa.Table = TABLE) -> Path:
    """Write a table in the format that the path's suffix names."""
    match path.suffix:
        case ".parquet":
            pq.write_table(table, path, row_group_size=2)
        case ".csv":
            csv.write_csv(table, path)
        case ".tsv":
            csv.write_csv(table, path, csv.WriteOptions(delimiter="\t"))
        case ".arrow":
            feather.write_feather(table, path)
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return path


def write_recipe(folder: Path, *lines: str) -> Path:
    """Write the recipe of `table.*`, in which a scripted engine says hi."""
    path = folder / "table.recipe.toml"
    path.write_text("\n".join(("prompt = '{{ text }}'", f"params.reply = {REPLY}", *lines)))
    return path


def test_failed_rows_of_a_token_classifier_have_its_column(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine knows its columns, even if no row shows them, and a resume does not need it."""
    found: list[list[str]] = []
    info = ScriptedEngine.info
    source, out = write_table(tmp_path / "table.csv"), tmp_path / "out.csv"
    recipe = "url = '/v1/classify'\nprompt = '{{ text }}'\nkeep = []\nparams.status = 400\n"
    (tmp_path / "table.recipe.toml").write_text(recipe)
    for _ in range(2):
        assert run("-i", source, "-o", out, "--force") == 3
        found.append(csv.read_csv(out).column_names)
        monkeypatch.setattr(
            ScriptedEngine, "info", lambda each: replace(info(each), labels_spans=True)
        )
    out.unlink()
    assert run("-i", source, "-o", out, "--resume") == 3  # every row is there: no engine is loaded
    found.append(csv.read_csv(out).column_names)
    expected = [["label", "score", "probs"], ["spans"], ["spans"]]
    assert found == [[*names, "usage", "error"] for names in expected]


SUFFIXES = ("parquet", "csv", "tsv", "arrow", "jsonl")


def test_a_table_gives_the_same_rows_in_every_format(tmp_path: Path) -> None:
    """They equal those of a request file, with a real model."""
    requests = [
        {"custom_id": each["id"], "url": "/v1/chat/completions"}
        | {"body": {"messages": [{"role": "user", "content": each["text"]}]}}
        for each in TABLE.to_pylist()
    ]
    source = tmp_path / "requests.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in requests))
    flags = ["--temperature", "0", "--max-tokens", "6"]
    assert main(["run", str(source), *flags]) == 0
    bodies = [row["response"]["body"] for row in rows(tmp_path / "requests.output.jsonl")]
    expected = [
        (each["id"], body["choices"][0]["message"]["content"], body["usage"]["completion_tokens"])
        for each, body in zip(TABLE.to_pylist(), bodies, strict=True)
    ]
    (tmp_path / "folder").mkdir()
    write_table(tmp_path / "folder/2.parquet", TABLE.slice(2))
    write_table(tmp_path / "folder/1.parquet", TABLE.slice(0, 2))
    for name in (*(f"t.{suffix}" for suffix in SUFFIXES), "folder"):
        source = tmp_path / name
        if source.suffix:
            write_table(source)
        out = tmp_path / f"{name}.out.parquet"
        given = ["--prompt", "{{ text }}", "--id", "id", "--keep", "id"]
        assert main(["run", str(source), "-o", str(out), *given, *flags]) == 0
        found = [
            (each["id"], each["text"], each["usage"]["completion_tokens"])
            for each in pq.read_table(out).to_pylist()
        ]
        assert found == expected, name


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_same_table_comes_out(run: Any, tmp_path: Path, suffix: str) -> None:
    """The recipe next to it is used; columns and types are kept; no other file is left."""
    source = write_table(tmp_path / f"table.{suffix}")
    recipe = write_recipe(tmp_path)
    assert run(source) == 0
    out = tmp_path / f"table.output.{suffix}"
    assert {*tmp_path.iterdir()} == {source, recipe, out}
    if suffix == "parquet":
        found = pq.read_table(out)
        assert found.select(NAMES).equals(TABLE)
        assert found.column("output_text").to_pylist() == ["hi"] * 3
    elif suffix == "arrow":
        assert feather.read_table(out).select(NAMES).equals(TABLE)
    elif suffix == "jsonl":
        assert [{name: row[name] for name in NAMES} for row in rows(out)] == TABLE.to_pylist()
    else:
        header = out.read_text().split("\n", 1)[0]
        assert header.replace("\t", ",") == "id,text,stars,output_text,finish_reason,usage,error"


def test_flags_go_before_the_recipe(run: Any, tmp_path: Path) -> None:
    """The output's name goes before both, unless a flag sets the format."""
    source = write_table(tmp_path / "table.parquet")
    write_recipe(tmp_path, "keep = ['id']", "output = 'arrow'")
    assert run(source, "--keep", "stars") == 0
    assert feather.read_table(tmp_path / "table.output.arrow").column_names[0] == "stars"
    assert run(source, "-o", tmp_path / "x.csv") == 0
    assert (tmp_path / "x.csv").read_text().startswith("id,text,finish_reason")
    assert run(source, "-o", tmp_path / "y.csv", "--output-format", "jsonl") == 0
    assert rows(tmp_path / "y.csv")[0]["id"] == "a"


def test_confidence_is_a_flag_of_tables(run: Any, tmp_path: Path) -> None:
    """It adds columns; a table of free answers is rejected before the model loads."""
    source = write_table(tmp_path / "table.parquet")
    write_recipe(tmp_path, "params.guided_choice = ['hi', 'ho']")
    assert run(source, "--confidence") == 0
    names = pq.read_table(tmp_path / "table.output.parquet").column_names
    assert names[-2:] == ["text_confidence", "text_probabilities"]
    write_recipe(tmp_path)
    with pytest.raises(BadInput, match="`confidence` requires a constrained output"):
        run(source, "--confidence", "--force")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("x.xlsx", "the name of an Excel workbook, which cannot be written: use .csv, .tsv"),
        ("x.json", "the name of one JSON document"),
        ("x.csv.gz", "outputs are not compressed: use x.csv"),
        (".", "is a directory"),
        ("/", "is a directory"),
    ],
)
def test_an_output_that_cannot_be_a_table_is_refused_by_its_name(
    run: Any, tmp_path: Path, name: str, error: str
) -> None:
    """The suffix of a name is the format of its bytes, or a flag says another."""
    source = write_table(tmp_path / "table.parquet")
    write_recipe(tmp_path)
    with pytest.raises(Refused, match=re.escape(error)):
        run(source, "-o", name)


def test_a_row_that_fails_says_why_and_can_run_again(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells stay, its number is that of a row; rows of a run with failed ones are kept."""
    cells = pa.table({"id": ["a", "b"], "text": ["x", None]})
    source = write_table(tmp_path / "table.parquet", cells)
    write_recipe(tmp_path)
    with pytest.raises(BadInput, match="row 2: column `text` is null"):
        run(source)
    assert run(source, "--on-invalid-line", "skip") == 0
    assert "column `text` is null" in (shown := capsys.readouterr().err)
    assert "(row 2)" in shown
    assert "line" not in shown
    out = tmp_path / "table.output.parquet"
    good, bad = pq.read_table(out).to_pylist()
    assert (good["output_text"], good["error"]) == ("hi", None)
    assert (bad["id"], bad["output_text"]) == ("b", None)
    assert bad["error"].startswith("Row 2: column `text` is null")
    with pytest.raises(Refused, match="already exists"):
        run(source, "--on-invalid-line", "skip")
    flags = ["--on-invalid-line", "skip", "--resume", "--retry-failed"]
    assert run(source, *flags) == 0
    assert pq.read_table(out).to_pylist() == [good, bad]
    assert (tmp_path / "table.output.parquet.rows.jsonl").exists()


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_failed_rows_are_retried_by_the_name_of_the_table(
    run: Any, tmp_path: Path, suffix: str
) -> None:
    """The card has the flags; a corrected cell or template is enough, and good rows stay."""
    run.has_card = True
    cells = pa.table({"id": ["a", "b", "c"], "text": ["x", None, None], "stars": [1, 2, 3]})
    source = write_table(tmp_path / f"table.{suffix}", cells)
    write_recipe(tmp_path)
    out = tmp_path / f"table.output.{suffix}"
    given = ["--on-invalid-line", "skip", "--id", "id", "--max-tokens", 5, "--force"]
    assert run(*given, "--prompt", "Hi {{ text }}", source) == 0
    write_table(source, cells.set_column(1, "text", pa.array(["x", "corrected", None])))
    for rows_of in (out, f"{out}.rows.jsonl"):
        words = expand_rows(["retry", str(rows_of)])
        assert words[:5] == ["run", "-i", str(source), "-o", str(out)]
        assert "--force" not in words
    assert run(*words[1:]) == 0
    assert run.engine.num_requests == 1
    changed = ("--prompt", "Hi {{ text or '' }}")
    other = expand_rows(["retry", str(out), "--prompt", "Hello {{ text or '' }}"])
    with pytest.raises(BadInput, match=r"have another recipe \(--prompt\)"):
        run(*other[1:])
    assert run(*expand_rows(["retry", str(out), *changed])[1:]) == 0
    assert run.engine.num_requests == 1
    assert out.read_text().count("hi") == 3
    assert not Path(f"{out}.rows.jsonl").exists()
    assert run(*expand_rows(["retry", str(out)])[1:]) == 0
    with pytest.raises(Refused, match=r"To retry its failed rows: `tidemill retry .*output"):
        expand_rows(["retry", str(source)])


def test_a_table_whose_rows_are_removed_is_not_called_complete(run: Any, tmp_path: Path) -> None:
    """A retry of its failed rows says that they cannot be run again, with a card or without."""
    source = write_table(tmp_path / "table.csv", pa.table({"id": ["a", "b"], "text": ["x", None]}))
    write_recipe(tmp_path)
    assert run(source, "--on-invalid-line", "skip") == 0
    out = tmp_path / "table.output.csv"
    Path(f"{out}.rows.jsonl").unlink()
    with pytest.raises(
        Refused, match=r"table\.output\.csv has 1 failed row, but the file of its rows"
    ):
        run(*expand_rows(["retry", str(out)])[1:])
    assert main(["retry", str(out), "-o", str(tmp_path / "failed.jsonl")]) == 2
    out.rename(f"{out}.rows.jsonl")
    with pytest.raises(
        Refused, match="was stopped: finish the table with the same command and --resume"
    ):
        expand_rows(["retry", str(out)])


def test_a_complete_table_is_not_run_again(run: Any, tmp_path: Path, capsys: Any) -> None:
    """With --resume a note is printed; with --force the table is written again."""
    source = write_table(tmp_path / "table.parquet")
    write_recipe(tmp_path)
    assert run(source) == 0
    assert run(source, "--resume") == 0
    assert "is complete: nothing to run" in capsys.readouterr().err
    assert run(source, "--force") == 0
    assert run.engine.num_requests == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_killed_goes_on(
    spawn: Callable[..., Any], run: Any, tmp_path: Path, number: int
) -> None:
    """Only what is missing runs, and the table is that of an unbroken run."""
    source = write_table(
        tmp_path / "table.parquet", pa.table({"text": [str(n) for n in range(40)]})
    )
    write_recipe(tmp_path, "params.wait = 0.2")
    out = tmp_path / "table.output.parquet"
    process = spawn("-i", source, "-o", out, "--max-inflight", "4")
    wait_for_rows(tmp_path / "table.output.parquet.rows.jsonl", 8)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=120)
    if number == signal.SIGTERM:
        assert "Finished rows are saved: to run the rest and write the table" in stderr
    assert not out.exists()
    run.speed = 1_000
    assert run(source, "-o", out, "--resume") == 0
    assert run.engine.num_requests <= 32
    assert run(source, "-o", tmp_path / "whole.parquet") == 0
    assert pq.read_table(out).equals(pq.read_table(tmp_path / "whole.parquet"))


def test_shards_of_a_table_are_joined(run: Any, tmp_path: Path) -> None:
    """Their rows are put together, and make the table of one run."""
    source = write_table(tmp_path / "table.parquet")
    write_recipe(tmp_path)
    for number in (1, 2):
        assert run(source, "--shard", f"{number}/2") == 0
    out = tmp_path / "table.output.parquet"
    assert not out.exists()
    assert main(["join", f"{out}.rows.jsonl"]) == 0
    assert run(source, "--resume") == 0
    assert pq.read_table(out).select(NAMES).equals(TABLE)


def test_empty_tables_have_results_of_no_row(run: Any, tmp_path: Path) -> None:
    """No model is loaded for them."""
    source = write_table(tmp_path / "table.parquet", TABLE.slice(0, 0))
    write_recipe(tmp_path)
    assert run(source) == 0
    assert pq.read_table(tmp_path / "table.output.parquet").num_rows == 0
    assert run.engine is None


def test_a_table_that_changes_during_the_run_is_not_written(
    spawn: Callable[..., Any], tmp_path: Path
) -> None:
    """Its kept columns would not match the rows that were run."""
    source = write_table(tmp_path / "table.parquet")
    write_recipe(tmp_path, "params.wait = 1")
    process = spawn("-i", source, "-o", tmp_path / "out.parquet")
    assert process.stderr is not None
    while "model loaded" not in process.stderr.readline():
        pass
    write_table(source, TABLE.slice(0, 2))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "has changed" in err
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize(
    ("flags", "lines", "words"),
    [
        (["--id", "id"], None, "--id requires a recipe: pass --prompt"),
        (["--permutations", "2"], None, "Requests in a file have `debias` in their body instead"),
        (
            ["--labels", "a,,b"],
            None,
            "`labels` has an empty text in its choices: remove or name it",
        ),
        (["--recipe", "none.toml"], None, "the recipe none.toml cannot be read"),
        (["--prompt", "{{ x }}", "-e", "e.jsonl"], None, "-e is not supported for tables"),
        ([], ["colour = 1"], "`colour` is not a recipe key"),
        (["-o", "-"], [], "a table requires an output file: pass -o"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(
    run: Any, tmp_path: Path, flags: list[str], lines: list[str] | None, words: str
) -> None:
    """The error comes before anything is read."""
    source = write_table(tmp_path / "table.parquet")
    if lines is not None:
        write_recipe(tmp_path, *lines)
    with pytest.raises(Refused) as caught:
        run(source, *flags)
    assert words in str(caught.value)


def test_a_url_without_result_columns_is_refused_before_the_model_loads(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new endpoint has none; otherwise the answers would be dropped."""
    new = Route("/v1/wordcount", "a text model", exact=frozenset({"/v1/wordcount"}))
    monkeypatch.setattr(routes, "ROUTES", (*routes.ROUTES, new))
    source = write_table(tmp_path / "table.csv")
    recipe = tmp_path / "words.toml"
    recipe.write_text("url = '/v1/wordcount'\ninput = '{{ text }}'\n")
    with pytest.raises(BadInput) as caught:
        run(source, "--recipe", recipe)
    assert str(caught.value) == (
        f"{source} cannot be run with its recipe: /v1/wordcount does not support tables: send its "
        "requests in a JSONL file"
    )
    assert run.engine is None


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("t.parquet", b"PAR1", "t.parquet cannot be run. The Parquet table is damaged"),
        ("t.csv", b"text\n\xff\n", "t.csv cannot be run. Line 2 of the CSV is not UTF-8"),
        ("t.csv", b"body\nx\n", "names `text`, which is not a column of the table"),
        ("t.csv", b"text,error,output_error\nx,y,z\n", "results need a column `error`"),
        ("folder", b"", "the folder {} contains no table"),
    ],
)
def test_a_bad_table_is_reported(
    run: Any, tmp_path: Path, name: str, data: bytes, words: str
) -> None:
    """The error is one sentence, and nothing is run."""
    source = tmp_path / name
    if source.suffix:
        source.write_bytes(data)
    else:
        source.mkdir()
    with pytest.raises(BadInput) as caught:
        run(source, "--prompt", "{{ text }}", "-o", tmp_path / "out.csv")
    assert words.format(source) in str(caught.value)
    assert [*tmp_path.iterdir()] == [source]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_table_without_a_column_in_the_prompt_has_all_its_rows(
    run: Any, tmp_path: Path, suffix: str
) -> None:
    """Columns may be kept or not."""
    source = write_table(tmp_path / f"table.{suffix}")
    write_recipe(tmp_path)
    out = tmp_path / "out.parquet"
    assert run(source, "--prompt", "Hi", "--keep", "", "-o", out) == 0
    found = pq.read_table(out)
    assert (found.num_rows, found.column_names[0]) == (3, "text")


def test_ids_that_repeat_are_refused(run: Any, tmp_path: Path) -> None:
    """The error names their rows."""
    source = write_table(tmp_path / "table.parquet")
    write_recipe(tmp_path)
    table = pa.table({"text": ["x", "y", "x"]})
    source = write_table(tmp_path / "table.csv", table)
    with pytest.raises(BadInput, match=r"1 row of .* repeat an ID: 3 \(as row 1\)"):
        run(source, "--id", "text")


def test_tables_in_a_folder_have_the_same_columns(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the difference; hidden files are ignored."""
    folder = tmp_path / "folder"
    folder.mkdir()
    write_table(folder / "a.parquet")
    monkeypatch.chdir(folder)
    assert run(".", "--prompt", "{{ text }}") == 0
    assert (tmp_path / "folder.output.parquet").exists()
    write_table(folder / "_b.parquet", TABLE.select(["id"]))
    flags = ["--prompt", "{{ text }}", "-o", tmp_path / "out.parquet", "--force"]
    assert run(folder, *flags) == 0
    write_table(folder / "b.parquet", TABLE.select(["id"]))
    with pytest.raises(BadInput, match="only one of them has `text`, `stars`"):
        run(folder, *flags)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("x {stars} {other}", "write {{ stars }} instead of {stars} (columns: id, text, stars)"),
        ('{"a": "b"}', "insert a column with {{ text }} (columns: id, text, stars)"),
        ("x {{ stars }}", ""),
        ('{{ row["stars"] }}', ""),
    ],
)
def test_a_prompt_that_reads_no_column_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prompt: str, words: str
) -> None:
    """A column in single braces is text; the column of ids is not one of the prompt."""
    source = write_table(tmp_path / "table.csv")
    assert main(["check", str(source), "--prompt", prompt, "--id", "id"]) == 0
    stderr = capsys.readouterr().err
    assert ("the same request" in stderr) is bool(words)
    assert words in stderr


def test_a_warning_of_a_check_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without one, no problems were found."""
    source = write_table(tmp_path / "table.csv")
    for prompt, words in (("{text}", "no other problems found"), ("{{ text }}", "no problems")):
        assert main(["check", str(source), "--prompt", prompt]) == 0
        assert words in (shown := capsys.readouterr().out)
        assert "at most" not in shown


def test_truncated_rows_of_a_table_are_retried(run: Any, tmp_path: Path) -> None:
    """The file of rows stays until every answer is complete."""
    run.has_card = True
    source = write_table(tmp_path / "table.csv")
    recipe = write_recipe(tmp_path)
    whole = recipe.read_text()
    recipe.write_text(whole.replace("stop", "length"))
    assert run(source, "--max-tokens", 5, "--max-seconds", 100) == 0
    out = tmp_path / "table.output.csv"
    rows_file = Path(f"{out}.rows.jsonl")
    assert rows_file.exists()
    with pytest.raises(Refused, match="already exists: rerun its failed rows with `tidemill retry"):
        run(source)
    with pytest.raises(Refused, match="does not support --force"):
        expand_rows(["retry", str(out), "--force"])
    flags = ["--retry-truncated", "--max-tokens", "9"]
    again = expand_rows(["retry", str(out), *flags])
    assert "--max-seconds" not in again
    assert run(*again[1:]) == 0
    assert run.engine.num_requests == 3
    rows_file.unlink()
    with pytest.raises(Refused, match="has 3 failed or truncated rows, but the file"):
        run(*again[1:])


def test_a_prompt_cannot_replace_that_of_a_recipe_file(run: Any, tmp_path: Path) -> None:
    """The error names the file to edit."""
    run.has_card = True
    cells = pa.table({"id": ["a", "b"], "text": ["x", None]})
    source = write_table(tmp_path / "table.csv", cells)
    recipe = write_recipe(tmp_path)
    assert run(source, "--on-invalid-line", "skip") == 0
    out = tmp_path / "table.output.csv"
    words = expand_rows(["retry", str(out), "--prompt", "Hi {{ text or '' }}"])
    with pytest.raises(BadInput) as caught:
        run(*words[1:])
    assert f"edit {recipe} and run `tidemill retry {out}`" in str(caught.value)
    recipe.write_text(
        recipe.read_text()
        .replace("{{ text }}", "{{ text or '' }}", 1)
        .replace("'{{", '"{{', 1)
        .replace("}}'", '}}"', 1)
    )
    assert run(*expand_rows(["retry", str(out)])[1:]) == 0
    assert run.engine.num_requests == 1


def test_a_table_without_a_recipe_says_how(run: Any, tmp_path: Path) -> None:
    """The error explains how to add one, as for other files without requests."""
    for suffix in ("parquet", "csv", "arrow"):
        source = write_table(tmp_path / f"table.{suffix}")
        with pytest.raises(BadInput, match="tidemill run --prompt TEMPLATE") as refused:
            run(source, "-o", tmp_path / "out")
        assert "recipe next to it (NAME.recipe.toml)" in str(refused.value)
        assert "bucket" not in str(refused.value)
        assert "valid line" not in str(refused.value)
        assert ("--prompt '{{ text }}'" in str(refused.value)) is (suffix == "csv")
        assert run(source, "-o", tmp_path / f"{suffix}.parquet", "--prompt", "{{ text }}") == 0
    write_recipe(tmp_path)
    assert run(source) == 0


@pytest.mark.parametrize(
    ("prompt", "words", "status"),
    [
        ("{{ row['Review text'] }}", "row 2: column `Review text` is null: ", 1),
        ("{Review text}", "{{ row[", 0),
        ("Label this.", "insert a column with {{ row[", 0),
    ],
)
def test_advice_for_a_column_whose_name_has_a_space_can_be_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prompt: str, words: str, status: int
) -> None:
    """The expression in the message is valid Jinja, and the message does not come back."""
    table = pa.table({"Review text": ["good", None if status else "bad"]})
    source = str(write_table(tmp_path / "table.parquet", table))
    assert main(["check", source, "--prompt", prompt]) == status
    stderr = capsys.readouterr().err
    assert words in stderr
    [advice] = set(re.findall(r"\{\{ .*? \}\}", stderr))
    assert main(["check", source, "--prompt", advice]) == 0
    assert "Review text" not in capsys.readouterr().err


def test_a_workbook_is_saved_as_csv(run: Any, tmp_path: Path) -> None:
    """The error does not suggest a JSONL file inside it, although it is a zip archive."""
    source = tmp_path / "reviews.xlsx"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
        archive.writestr("xl/workbook.xml", "<workbook/>")
    for flags in ([], ["--prompt", "{{ text }}"]):
        with pytest.raises(BadInput, match="Excel workbook: save it as CSV UTF-8") as refused:
            run(source, *flags)
        assert "JSONL file" not in str(refused.value)
    assert run(write_table(tmp_path / "reviews.csv"), "--prompt", "{{ text }}") == 0


def test_a_folder_without_write_access_is_named(run: Any, tmp_path: Path) -> None:
    """The error is not that another run is writing; /proc is read-only, even for root."""
    source = write_table(tmp_path / "table.csv")
    for out in ("/proc/out.csv", "/proc/out.parquet"):
        with pytest.raises(Refused, match="/proc does not allow new files"):
            run(source, "-o", out, "--prompt", "{{ text }}")
    assert run(source, "-o", tmp_path / "out.csv", "--prompt", "{{ text }}") == 0


def test_a_column_that_the_output_cannot_hold_is_refused_at_once(run: Any, tmp_path: Path) -> None:
    """No model is loaded, and each way out that the sentence names works."""
    gaps = pa.array([pa.MonthDayNano([1, 2, 3])] * 3)
    source = write_table(tmp_path / "table.arrow", TABLE.append_column("gap", gaps))
    write_recipe(tmp_path)
    out = tmp_path / "out.parquet"
    with pytest.raises(BadInput, match="column `gap` is month_day_nano_interval, which Parquet"):
        run(source, "-o", out)
    assert run.engine is None
    assert run(source, "-o", out, "--keep", "id,text") == 0
    assert run(source) == 0
    assert (
        feather.read_table(tmp_path / "table.output.arrow").column("gap").to_pylist()
        == [pa.MonthDayNano([1, 2, 3])] * 3
    )
    for suffix in ("csv", "tsv", "jsonl"):
        assert run(source, "-o", tmp_path / f"out.{suffix}") == 0
        assert "P1M2DT0.000000003S" in (tmp_path / f"out.{suffix}").read_text()


def test_nested_times_are_written_in_every_format(run: Any, tmp_path: Path) -> None:
    """Nanoseconds inside of lists and structs have a text, in prompts too."""
    kind = pa.struct([("at", pa.timestamp("ns")), ("took", pa.duration("ms"))])
    times = pa.array([{"at": 1, "took": 1500}] * 3, kind)
    source = write_table(tmp_path / "table.parquet", TABLE.append_column("when", times))
    write_recipe(tmp_path)
    shown = "1970-01-01 00:00:00.000000001"
    for suffix in SUFFIXES:
        out = tmp_path / f"out.{suffix}"
        assert run(source, "-o", out, "--prompt", "{{ when.at }} {{ when.took }}") == 0
        if suffix in {"csv", "tsv", "jsonl"}:
            assert shown in out.read_text()
            assert "PT1.5S" in out.read_text()
    assert pq.read_table(tmp_path / "out.parquet").column("when").type == kind


def test_a_blank_line_of_a_one_column_csv_has_its_row(run: Any, tmp_path: Path) -> None:
    """The output has as many rows as the input has lines."""
    source = tmp_path / "table.csv"
    source.write_text("text\na\n\nb\n")
    write_recipe(tmp_path)
    assert run(source, "--prompt", "{{ text or 'none' }}", "-o", tmp_path / "out.jsonl") == 0
    assert [row["text"] for row in rows(tmp_path / "out.jsonl")] == ["a", None, "b"]


def test_rows_without_room_on_the_disk_are_refused_by_their_count(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small Parquet file may have billions of rows, which its footer shows."""
    from tidemill.offline.files import table_requests

    num_rows = 30_000
    column = pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, pa.int8()), pa.array(["hi"]))
    source = write_table(tmp_path / "table.parquet", pa.table({"text": column}))
    written: list[int] = []
    usage = table_requests.shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(table_requests.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(table_requests, "log", lambda _: written.append(1))
    write_recipe(tmp_path)
    with pytest.raises(BadInput, match=r"30,000 rows, take about .* 1.* MB free: pass --out"):
        run(source)
