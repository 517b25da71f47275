"""Installing: what cannot be reached ends in a sentence, any other failure in the tool's words."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOBODY = "http://127.0.0.1:9"
ENVIRONMENT = {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_INDEX_URL": NOBODY,
    "PIP_RETRIES": "1",
    "npm_config_registry": NOBODY,
    "npm_config_fetch_retry_maxtimeout": "1000",
}
# What pip, and a make that the tests run below, would say of themselves.
STRIPPED = ("PIP_", "MAKE", "MFLAGS", "GNUMAKEFLAGS")


def words_on(folder: Path, recipe: str) -> str:
    """Return what a recipe of ours prints that fails."""
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


def test_a_package_index_that_cannot_be_reached_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the cause, and where its mirror is named; below another make too."""
    monkeypatch.setenv("MAKELEVEL", "1")
    monkeypatch.setenv("MAKEFLAGS", "n")
    assert words_on(tmp_path, f"$(call pip_install,{sys.executable},no-such-package)") == (
        "The package index cannot be reached ([Errno 111] Connection refused): PIP_INDEX_URL names "
        "a mirror of it, HTTPS_PROXY a proxy. What pip said is in out/pip.log.\n"
    )


def test_an_npm_registry_that_cannot_be_reached_is_a_sentence(tmp_path: Path) -> None:
    """With the cause, and where its mirror is named."""
    for name in ("package.json", "package-lock.json"):
        shutil.copy(ROOT / "tests/node" / name, tmp_path)
    assert words_on(tmp_path, "$(call npm_ci,.)") == (
        "The npm registry cannot be reached (ECONNREFUSED): npm_config_registry names a mirror of "
        "it, HTTPS_PROXY a proxy. What npm said is in out/npm.log.\n"
    )


def test_any_other_failure_is_told_in_the_tools_words(tmp_path: Path) -> None:
    """Nothing is hidden by looking for one cause."""
    assert "no-such-file.txt" in words_on(
        tmp_path, f"$(call pip_install,{sys.executable},-r no-such-file.txt)"
    )
    assert "package.json" in words_on(tmp_path, "$(call npm_ci,.)")
