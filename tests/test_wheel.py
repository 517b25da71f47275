"""Wheel and sdist: their contents, and that the wheel works next to modules of the same names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from itertools import islice
from pathlib import Path
from venv import create as make_venv

import pytest

ROOT = Path(__file__).parent.parent
NUM_LINES = 3
# Names of our folders, and of files that users' own scripts may have.
HOSTILE = (
    *("engine/__init__.py", "handler/__init__.py", "net/__init__.py"),
    *("batch.py", "cli.py", "demo.py", "protocol.py", "server.py"),
)


DATA = (
    "py.typed",
    "demo/model/model.safetensors",
    "demo/speech/model.safetensors",
    "engine/model/config/transformers_fields.json",
    "dashboard/static/app.js",
    "dashboard/templates/page.html",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    return folder


def build(source: Path, folder: Path, *options: str) -> None:
    """Build a folder's package, without a registry."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", folder, *options]
    subprocess.run(command, cwd=source, check=True, capture_output=True)


@pytest.fixture(scope="module")
def venv(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment with only the wheel, without its dependencies."""
    folder = tmp_path_factory.mktemp("venv")
    make_venv(folder, with_pip=False, symlinks=True)
    install = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install"]
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    [wheel] = built.glob("*.whl")
    subprocess.run([*install, *options, wheel], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def installed(venv: Path) -> Path:
    """Return the folder of packages of that environment."""
    [folder] = venv.glob("lib/python*/site-packages")
    return folder


def source_files() -> set[str]:
    """Return the files of the packages in this checkout, by their installed names."""
    top = ROOT / "tidemill"
    links = [path for path in top.iterdir() if path.is_symlink()]
    files = [path for path in top.iterdir() if path.is_file()]
    files += [link / path.relative_to(link.resolve()) for link in links for path in under(link)]
    return {str(path.relative_to(ROOT)) for path in files}


def under(link: Path) -> list[Path]:
    """Return the files in the folder that a link points to."""
    return [
        path
        for path in link.resolve().rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]


def test_wheel_and_sdist_contain_every_file(built: Path, tmp_path: Path) -> None:
    """They have the modules, py.typed, weights and templates; the sdist builds the same wheel."""
    [wheel], [sdist] = built.glob("*.whl"), built.glob("*.tar.gz")
    names = names_in(wheel)
    files = source_files()
    assert {f"tidemill/{name}" for name in DATA} <= files
    assert {name for name in names if name.startswith("tidemill/")} == files
    assert "tidemill-0.1.0.dist-info/licenses/LICENSE" in names
    with tarfile.open(sdist) as tar:
        tar.extractall(tmp_path, filter="data")
    build(tmp_path / "tidemill-0.1.0", tmp_path / "dist", "--target", "wheel")
    assert names_in(tmp_path / "dist" / wheel.name) == names


def names_in(wheel: Path) -> set[str]:
    """Return the names of the files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_command_and_the_package_need_nothing_to_start(venv: Path, tmp_path: Path) -> None:
    """They work without dependencies: a broken environment can print its version."""
    program = "import tidemill; print(tidemill.__file__)"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    outputs = [
        subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True
        ).stdout
        for command in (
            [venv / "bin/tidemill", "--version"],
            [venv / "bin/python", "-c", program],
        )
    ]
    assert outputs[0] == "tidemill 0.1.0\n"
    assert outputs[1].startswith(str(venv))


def test_it_installs_one_package(installed: Path) -> None:
    """It adds only its own metadata."""
    names = {path.name for path in installed.iterdir()}
    assert names == {"tidemill", "tidemill-0.1.0.dist-info"}
    assert not [path for path in (installed / "tidemill").rglob("*") if path.is_symlink()]


def test_it_runs_next_to_modules_of_the_same_names(installed: Path, tmp_path: Path) -> None:
    """The working folder is first on the path, as with any `python -m`."""
    for name in HOSTILE:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise RuntimeError('not tidemill')", encoding="utf-8")
    with (ROOT / "examples/demo.jsonl").open(encoding="utf-8") as lines:
        (tmp_path / "in.jsonl").write_text("".join(islice(lines, NUM_LINES)), encoding="utf-8")
    environment = {**os.environ, "TIDEMILL_CACHE": "off"}
    del environment["TIDEMILL_DEMO_MODEL"]
    # -S: the checkout, which is installed too, is not on the path; its dependencies are.
    done = subprocess.run(
        [sys.executable, "-S", "-m", "tidemill", "run", "in.jsonl", "-o", "out.jsonl"],
        cwd=tmp_path,
        env={
            **environment,
            "PYTHONPATH": f"{installed}{os.pathsep}{sysconfig.get_path('purelib')}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "SmolLM2-135M-Instruct cannot be downloaded (TIDEMILL_CACHE=off" in done.stderr
    assert f"loading {installed}/tidemill/demo/model" in done.stderr
    rows = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(row)["response"]["status_code"] for row in rows] == [200] * NUM_LINES
