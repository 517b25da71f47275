"""Datasets of Hugging Face as a command line names them."""

from __future__ import annotations

import sys

import pytest

from tests.cli.api_rig import Shell
from tidemill.offline.arguments.dataset_id import DatasetId
from tidemill.offline.console.errors import Refused

PROMPT = ("--prompt", "{{ text }}")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hf://datasets/openai/gsm8k", DatasetId("openai/gsm8k")),
        ("hf://datasets/squad/", DatasetId("squad")),
        ("hf://datasets/a/b@v1.0", DatasetId("a/b", "v1.0")),
        ("hf://datasets/a/b/data/train-*.parquet", DatasetId("a/b", None, "data/train-*.parquet")),
        (
            "hf://datasets/a/b@refs/convert/parquet/x/0.parquet",
            DatasetId("a/b", "refs/convert/parquet", "x/0.parquet"),
        ),
        (
            "hf://datasets/a/b@refs%2Fconvert%2Fparquet/x/*",
            DatasetId("a/b", "refs/convert/parquet", "x/*"),
        ),
    ],
)
def test_a_url_names_a_dataset(name: str, expected: DatasetId) -> None:
    """With a revision and files in it, as for DuckDB and fsspec."""
    assert DatasetId.parse(name) == expected


@pytest.mark.parametrize("name", ["hf://datasets/", "hf://datasets/a b", "hf://a/b", "hf://"])
def test_other_urls_of_the_hub_are_refused(name: str) -> None:
    """The error shows the form of a dataset's URL."""
    with pytest.raises(Refused, match="is not a dataset: use hf://datasets/ORG/NAME"):
        DatasetId.parse(name)


@pytest.mark.parametrize("command", ["run", "check", "estimate", "submit"])
@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["hf://datasets/a/b"], "is a table, which requires a recipe: pass --prompt"),
        (["hf://a/b", *PROMPT], "is not a dataset"),
        (["x.csv", *PROMPT, "--split", "train"], "--split requires a dataset"),
        (["x.csv", *PROMPT, "--subset", "main"], "--subset requires a dataset"),
    ],
)
def test_mistakes_are_refused(shell: Shell, command: str, typed: list[str], words: str) -> None:
    """Each command that accepts tables refuses them before it reads anything."""
    result = shell.type(command, *typed)
    assert (result.status, words in result.err) == (2, True), result.err


def test_a_dataset_is_not_dropped(shell: Shell) -> None:
    """It has no file for the bucket, so `submit` is suggested."""
    result = shell.type("drop", "hf://datasets/a/b", *PROMPT)
    assert (result.status, "`tidemill submit hf://datasets/a/b`" in result.err) == (2, True), (
        result.err
    )


def test_a_missing_extra_is_reported(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error contains the command that installs it."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    result = shell.type("check", "hf://datasets/a/b", *PROMPT)
    assert result.status == 1
    assert "a Hugging Face dataset needs datasets, which is not installed" in result.err
    assert "[tables,datasets]" in result.err
