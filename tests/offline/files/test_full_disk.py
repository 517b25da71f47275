"""Temporary and new files on a full disk: the folder is named, and finished rows end a run with 0.

Closing a buffered file tries to write its buffer again, and fails again.
"""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.offline.given import line, rows
from tidemill.offline.console.errors import BadInput, OutputLost
from tidemill.offline.files import source as temporary_files
from tidemill.offline.files.new_file import open_new_file
from tidemill.offline.plan import line_index

Fill = Callable[[ModuleType], None]


@pytest.fixture
def fill(monkeypatch: pytest.MonkeyPatch) -> Fill:
    """Return a function that makes the temporary files of a module those of a full disk."""
    full = SimpleNamespace(
        TemporaryFile=lambda **_: Path("/dev/full").open("r+b"),  # noqa: SIM115 - closed by the code
        gettempdir=tempfile.gettempdir,
    )
    return lambda module: monkeypatch.setattr(module, "tempfile", full)


def test_a_file_that_cannot_be_unpacked_is_run(run: Any, tmp_path: Path, fill: Fill) -> None:
    """Its lines run in file order."""
    source, out = tmp_path / "in.jsonl.gz", tmp_path / "out"
    source.write_bytes(gzip.compress(f"{line('a')}\n{line('b')}\n".encode()))
    fill(temporary_files)
    assert run("-i", source, "-o", out) == 0
    assert len(rows(out)) == 2


def test_requests_of_a_table_that_cannot_be_stored_are_reported(
    run: Any, tmp_path: Path, fill: Fill
) -> None:
    """The error names the folder and the flag that changes it."""
    source = tmp_path / "in.csv"
    source.write_text("text\nhi\n")
    fill(temporary_files)
    with pytest.raises(BadInput, match=r"cannot be written to .*: pass --output-tmp-dir"):
        run(source, "--prompt", "{{ text }}")


def test_prompts_that_cannot_be_indexed_are_reported(
    run: Any, write_input: Callable[..., Path], tmp_path: Path, fill: Fill
) -> None:
    """The error names the folder before the model is loaded."""
    messages = [{"role": "user", "content": "x" * 15_000}]
    source = write_input(*(line(str(number), messages=messages) for number in range(20)))
    fill(line_index)
    with pytest.raises(BadInput, match=r"cannot be indexed in .*: pass --output-tmp-dir"):
        run("-i", source, "-o", tmp_path / "out")
    assert run.engine is None


def test_a_new_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an output of a command, such as `convert`."""
    full = Path("/dev/full").open("r+b")  # noqa: SIM115 - closed by the tested code
    monkeypatch.setattr(Path, "open", lambda *_: full)
    with (
        pytest.raises(OutputLost, match=r"rows cannot be written \(No space left on device\)"),
        open_new_file(str(tmp_path / "rows")) as file,
    ):
        file.write(b"row\n")
