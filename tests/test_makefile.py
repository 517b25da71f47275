"""Installing: an unreachable registry gives one sentence, any other failure the tool's output."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
UNREACHABLE = "http://127.0.0.1:9"
ENVIRONMENT = {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_INDEX_URL": UNREACHABLE,
    "PIP_RETRIES": "1",
    "npm_config_registry": UNREACHABLE,
    "npm_config_fetch_retry_maxtimeout": "1000",
}
# Prefixes of variables of pip, and of a make that runs the tests.
STRIPPED = ("PIP_", "MAKE", "MFLAGS", "GNUMAKEFLAGS")


def words_on(folder: Path, recipe: str) -> str:
    """Return the output of a failing recipe."""
    taken = {name: value for name, value in os.environ.items() if not name.startswith(STRIPPED)}
    done = subprocess.run(
        ["make", "-f", str(ROOT / "Makefile"), "--eval", f"try: ; @{recipe}", "try"],
        cwd=folder,
        env={**taken, **ENVIRONMENT, "npm_config_cache": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    return done.stderr.partition("make:")[0]


def test_an_unreachable_package_index_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the cause and the variable for a mirror, also under another make."""
    monkeypatch.setenv("MAKELEVEL", "1")
    monkeypatch.setenv("MAKEFLAGS", "n")
    assert words_on(tmp_path, f"$(call pip_install,{sys.executable},no-such-package)") == (
        "The package index cannot be reached ([Errno 111] Connection refused): set PIP_INDEX_URL "
        "to a mirror, or HTTPS_PROXY to a proxy. The output of pip is in out/pip.log.\n"
    )


def test_an_unreachable_npm_registry_is_a_sentence(tmp_path: Path) -> None:
    """It has the cause and the variable for a mirror."""
    for name in ("package.json", "package-lock.json"):
        shutil.copy(ROOT / "tests/node" / name, tmp_path)
    assert words_on(tmp_path, "$(call npm_ci,.)") == (
        "The npm registry cannot be reached (ECONNREFUSED): set npm_config_registry to a mirror, "
        "or HTTPS_PROXY to a proxy. The output of npm is in out/npm.log.\n"
    )


def test_any_other_failure_shows_the_tools_output(tmp_path: Path) -> None:
    """The search for one cause hides nothing."""
    assert "no-such-file.txt" in words_on(
        tmp_path, f"$(call pip_install,{sys.executable},-r no-such-file.txt)"
    )
    assert "package.json" in words_on(tmp_path, "$(call npm_ci,.)")
