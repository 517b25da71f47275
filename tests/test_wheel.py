"""The wheel: what it installs, and that it runs in a folder with modules of the same names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from itertools import islice
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NUM_LINES = 3
# Names of our folders, and of files that a user's own scripts may have.
HOSTILE = (
    *("engine/__init__.py", "handler/__init__.py", "net/__init__.py"),
    *("batch.py", "cli.py", "demo.py", "protocol.py", "server.py"),
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that the wheel alone is installed into."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory"]
    subprocess.run([*build, folder], cwd=ROOT, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    target = folder / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    options = ["--no-compile", "--disable-pip-version-check", "--target", target]
    subprocess.run([*install, *options, wheel], check=True, capture_output=True)
    return target


def test_it_installs_one_package(installed: Path) -> None:
    """Beside its own metadata and the folder of the command."""
    names = {path.name for path in installed.iterdir()}
    assert names == {"tidemill", "tidemill-0.1.0.dist-info", "bin"}
    assert not [path for path in (installed / "tidemill").rglob("*") if path.is_symlink()]


def test_it_runs_beside_modules_of_the_same_names(installed: Path, tmp_path: Path) -> None:
    """The working folder comes first on the path, as with any `python -m`."""
    for name in HOSTILE:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise RuntimeError('not tidemill')", encoding="utf-8")
    with (ROOT / "examples/demo.jsonl").open(encoding="utf-8") as lines:
        (tmp_path / "in.jsonl").write_text("".join(islice(lines, NUM_LINES)), encoding="utf-8")
    # -S: the checkout, which is installed too, is not on the path; its dependencies are.
    done = subprocess.run(
        [sys.executable, "-S", "-m", "tidemill", "run", "in.jsonl", "-o", "out.jsonl"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{installed}{os.pathsep}{sysconfig.get_path('purelib')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"loading {installed}/tidemill/demo/model" in done.stderr
    rows = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(row)["response"]["status_code"] for row in rows] == [200] * NUM_LINES
