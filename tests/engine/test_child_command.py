"""Our child processes import the same modules as this one, whatever the working folder contains."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import tidemill
from tidemill.engine.child_command import module_command

ROOT = Path(__file__).parents[2]
PROGRAM = "import json, sys, tidemill; print(json.__file__, tidemill.__file__, *sys.argv[1:])"


def test_a_module_of_the_working_folder_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither `json.py` nor another `tidemill` is imported; arguments go to the module."""
    for name in ("json.py", "tidemill.py"):
        (tmp_path / name).write_text("raise RuntimeError('of the working folder')")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/printing.py").write_text(PROGRAM)
    # The process has this path, but the package is not on it.
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    output = subprocess.run(
        module_command("printing", "--flag", "value"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert not output[0].startswith(str(tmp_path))
    assert output[1:] == [str(ROOT / "tidemill/__init__.py"), "--flag", "value"]
    assert tidemill.__file__ == output[1]
