"""Programs and commands of README.md, run unchanged."""

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
    """Return the language and the text of each code block under a heading, in order."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    section = page.partition(f"### {heading}\n")[2].partition("\n### ")[0]
    return re.findall(r"^```(\w*)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def commands(heading: str) -> list[str]:
    """Return the commands under a heading."""
    return [text for language, text in blocks(heading) if not language]


def program(heading: str) -> str:
    """Return the only Python program under a heading."""
    [text] = [text for language, text in blocks(heading) if language == "python"]
    return text


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Return a server started by the README's own command, at another port."""
    typed = commands("Serve")[0].partition("#")[0].split()
    assert typed[:2] == ["tidemill", "serve"]
    with serving(*typed[2:], log=tmp_path_factory.mktemp("readme") / "log") as place:
        yield place


def output_of(place: Place, *command: str, folder: Path) -> str:
    """Return the output of a command."""
    result = subprocess.run(
        [part.replace(ADDRESS, place.url) for part in command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_curl_command_works(served: Place, tmp_path: Path) -> None:
    """It gets the chat's reply."""
    reply = json.loads(output_of(served, "sh", "-c", commands("Serve")[1], folder=tmp_path))
    assert reply["choices"][0]["message"]["content"] == "Paris"


def test_the_sdk_program_streams(served: Place, tmp_path: Path) -> None:
    """The program prints the reply as it arrives."""
    assert output_of(served, sys.executable, "-c", program("Serve"), folder=tmp_path) == "Paris"


def test_the_program_for_structured_output_works(served: Place, tmp_path: Path) -> None:
    """It prints a field of the answer to a question that the small model knows."""
    code = program("Structured output").replace("    name: str\n", "")
    code = code.replace("Extract the name and the city:", "Extract the city as JSON:")
    output = output_of(served, sys.executable, "-c", code, folder=tmp_path)
    assert output == "Lisbon\n"


def test_a_command_runs_a_table(tmp_path: Path) -> None:
    """`--resume` then finds nothing missing."""
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


def test_the_python_program_prints_an_answer() -> None:
    """They run in a separate process, which leaves no child behind."""
    done = subprocess.run(
        [sys.executable, "-c", program("Call it from Python")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "Hello! How can I help you?\n"


def test_the_example_file_has_its_own_test() -> None:
    """The README's command is the one in tests/examples/test_forms.py, unchanged."""
    [command] = commands("Structured output")
    parsed = make_parser().parse_args(command.split()[1:])
    assert (ROOT / parsed.input_file).is_file()
    assert Path(parsed.input_file).name in (ROOT / "tests/examples/test_forms.py").read_text()
