"""Programs and commands of README.md, run as they stand there."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.server.served import Place, serving
from tidemill.cli.main import make_parser

ROOT = Path(__file__).parents[2]
ADDRESS = "http://127.0.0.1:8000"


def blocks(heading: str) -> list[tuple[str, str]]:
    """Return the language and the text of each block below a heading, in their order."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    section = page.partition(f"### {heading}\n")[2].partition("\n### ")[0]
    return re.findall(r"^```(\w*)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def commands(heading: str) -> list[str]:
    """Return what is typed below a heading."""
    return [text for language, text in blocks(heading) if not language]


def program(heading: str) -> str:
    """Return the one Python program below a heading."""
    [text] = [text for language, text in blocks(heading) if language == "python"]
    return text


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Return a server that was started by the README's own command, at another port."""
    typed = commands("Serve")[0].partition("#")[0].split()
    assert typed[:2] == ["tidemill", "serve"]
    with serving(*typed[2:], log=tmp_path_factory.mktemp("readme") / "log") as place:
        yield place


def said(place: Place, *command: str, folder: Path) -> str:
    """Return what a command prints."""
    told = subprocess.run(
        [part.replace(ADDRESS, place.url) for part in command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    return told.stdout


def test_a_server_answers_curl(served: Place, tmp_path: Path) -> None:
    """With the chat that is asked for."""
    told = json.loads(said(served, "sh", "-c", commands("Serve")[1], folder=tmp_path))
    assert told["choices"][0]["message"]["content"] == "Paris"


def test_a_server_streams_to_the_sdk(served: Place, tmp_path: Path) -> None:
    """The program prints the answer as it comes."""
    assert said(served, sys.executable, "-c", program("Serve"), folder=tmp_path) == "Paris"


def test_an_answer_is_parsed(served: Place, tmp_path: Path) -> None:
    """The program prints a field of the answer to a question that the small model knows."""
    code = program("Structured output").replace("    name: str\n", "")
    code = code.replace("Extract the name and the city:", "Extract the city as JSON:")
    told = said(served, sys.executable, "-c", code, folder=tmp_path)
    assert told == "Lisbon\n"


def test_a_command_leads_from_a_table_to_answers(tmp_path: Path) -> None:
    """And --resume finds that nothing is missing."""
    heading = "From a table to answers"
    [table] = [text for language, text in blocks(heading) if language == "csv"]
    (tmp_path / "questions.csv").write_text(table)
    command = commands(heading)[0]
    for flags in ([], ["--resume"]):
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(command), *flags],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        with (tmp_path / "questions.output.csv").open() as file:
            answers = [(row["id"], row["text"]) for row in csv.DictReader(file)]
        assert answers == [("1", "Paris"), ("2", "Tokyo")]
    assert "is complete: nothing to run" in done.stderr


def test_five_lines_of_python_print_an_answer() -> None:
    """In a process of their own, which leaves none behind."""
    done = subprocess.run(
        [sys.executable, "-c", program("Call it from Python")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "Hello! How can I help you?\n"


def test_the_example_file_is_run_by_its_own_test() -> None:
    """The README's command is that of tests/examples/test_forms.py, and is taken as it stands."""
    [command] = commands("Structured output")
    parsed = make_parser().parse_args(command.split()[1:])
    assert (ROOT / parsed.input_file).is_file()
    assert Path(parsed.input_file).name in (ROOT / "tests/examples/test_forms.py").read_text()
