"""Datasets of Hugging Face through the commands that take tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.api_rig import Shell
from tidemill.offline.console.errors import BadInput
from tidemill.sdk.tables import _arrow_table

datasets = pytest.importorskip("datasets")

TABLE = pa.table({"id": ["a", "b", "c"], "text": ["Hello!", "Hi", "Bye."], "stars": [1, 2, 3]})
PROMPT = ("--prompt", "{{ text }}", "--id", "id")
NAME = "hf://datasets/org/reviews"


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that holds dataset `org/reviews`, from which ids are read; nothing else is.

    The library takes a folder before the hub.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write_split("train")
    return tmp_path


def write_split(split: str, table: pa.Table = TABLE, name: str = "reviews") -> None:
    """Write a split of a dataset."""
    folder = Path("org", name, "data")
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / f"{split}-00000-of-00001.parquet")


def write_recipe(*lines: str) -> str:
    """Write a recipe by which a scripted engine says hi."""
    reply = "{choices = [{message = {content = 'hi'}, finish_reason = 'stop'}]}"
    given = ("prompt = '{{ text }}'", *lines, f"params.reply = {reply}")
    Path("r.toml").write_text("\n".join(given))
    return "r.toml"


def test_a_dataset_gives_the_table_of_its_rows(run: Any, hub: Path) -> None:
    """In the working folder, as Parquet with its columns, which `datasets` reads again."""
    assert run(NAME, "--recipe", write_recipe()) == 0
    out = hub / "reviews.output.parquet"
    found = pq.read_table(out)
    assert found.select(TABLE.column_names).equals(TABLE)
    assert found.column("output_text").to_pylist() == ["hi"] * 3
    again = datasets.load_dataset("parquet", data_files=str(out), split="train")
    assert again.column_names == found.column_names
    assert run(NAME, "--recipe", "r.toml", "--resume") == 0
    assert run.engine.num_requests == 3


def test_a_split_and_a_part_of_it(shell: Shell) -> None:
    """One of several splits must be selected; the error lists them."""
    write_split("test", TABLE.slice(1))
    result = shell.type("check", NAME, *PROMPT)
    assert (
        result.status,
        "several splits (train, test): select one with --split" in result.err,
    ) == (
        1,
        True,
    )
    for split, ids in (("test", ["b", "c"]), ("train[:1]+test[1:]", ["a", "c"])):
        result = shell.type("check", NAME, *PROMPT, "--split", split)
        shown = [json.loads(text.partition(":\n")[2]) for text in result.out.split("\nrow ")[1:]]
        assert [one["custom_id"] for one in shown] == ids
    result = shell.type("check", f"{NAME}/data/test-*", *PROMPT, "--json")
    assert json.loads(result.out)["lines"] == 2


def test_estimate_and_submit_take_a_dataset(shell: Shell) -> None:
    """`submit --wait` also writes its table."""
    result = shell.type("estimate", NAME, *PROMPT, "--json")
    assert json.loads(result.out)["num_lines"] == 3
    result = shell.type("submit", NAME, *PROMPT, "--wait")
    assert result.status == 0, result.err
    assert pq.read_table("reviews.output.parquet").select(TABLE.column_names).equals(TABLE)


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("org/reviews", ["--split", "nope"], r"Unknown split \"nope\""),
        ("org/reviews", ["--subset", "nope"], "'nope' not found"),
        ("org/none", [], "Couldn't reach 'org/none' on the Hub"),
        ("org/two", [], r"several subsets \(a, b\): select one with --subset"),
        ("org/torn", [], "cannot be read: "),
    ],
)
def test_what_cannot_be_read_is_a_sentence(
    run: Any, name: str, flags: list[str], words: str
) -> None:
    """The error is one sentence, and no line is run."""
    write_split("a", name="two")
    write_split("b", name="two")
    Path("org/two/README.md").write_text(
        "---\nconfigs:\n- config_name: a\n  data_files: data/a-*\n"
        "- config_name: b\n  data_files: data/b-*\n---\n"
    )
    write_split("train", name="torn")
    torn = Path("org/torn/data/train-00000-of-00001.parquet")
    torn.write_bytes(torn.read_bytes()[:-20])
    with pytest.raises(BadInput, match=words):
        run(f"hf://datasets/{name}", *PROMPT, *flags)
    assert run.engine is None


def test_a_dataset_that_has_changed_is_noticed_on_resume(run: Any) -> None:
    """It is refused like a file with other lines; its existing results are kept."""
    write_split("train", TABLE.set_column(1, "text", pa.array(["x", None, "z"])))
    recipe = write_recipe()
    assert run(NAME, "--recipe", recipe, "--on-invalid-line", "skip") == 0
    write_split("train", TABLE)
    flags = ["--recipe", recipe, "--on-invalid-line", "skip", "--resume", "--retry-failed"]
    with pytest.raises(BadInput, match="row 1"):
        run(NAME, *flags)


def test_types_of_the_library_are_what_they_are_stored_as(run: Any, hub: Path) -> None:
    """An array of two dimensions is a list of lists, a class label its number."""
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "grid": datasets.Array2D((2, 2), "int32"),
            "label": datasets.ClassLabel(names=["bad", "good"]),
        }
    )
    rows = {"text": ["x"], "grid": [[[1, 2], [3, 4]]], "label": ["good"]}
    made = datasets.Dataset.from_dict(rows, features)
    Path("org/typed").mkdir()
    made.to_parquet("org/typed/train.parquet")
    assert run("hf://datasets/org/typed", "--recipe", write_recipe()) == 0
    found = pq.read_table(hub / "typed.output.parquet").to_pylist()[0]
    assert (found["grid"], found["label"]) == ([[1, 2], [3, 4]], 1)


def test_a_program_gives_a_dataset() -> None:
    """Rows keep their order, also after a selection; a dict of splits is refused."""
    dataset = datasets.load_dataset("org/reviews", split="train")
    assert _arrow_table(dataset).to_pylist() == TABLE.to_pylist()
    assert _arrow_table(dataset.select([2, 0])).column("id").to_pylist() == ["c", "a"]
    with pytest.raises(Exception, match=r"has splits \(train\)"):
        _arrow_table(datasets.load_dataset("org/reviews"))
