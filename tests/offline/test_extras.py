"""The extras of the package: all are known, and errors say how to install a missing one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from tidemill.offline import extras
from tidemill.offline.console.errors import CliError
from tidemill.offline.extras import MODULES, require_extras

ROOT = Path(__file__).parents[2]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

OPTIONAL = ("pdf", "datasets", "delta", "iceberg", "daft", "spark", "ray")
"""Extras that nothing else needs, and that an environment of tests may lack."""


def missing(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Let these modules be none that is installed."""
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)


def words(*names: str) -> str:
    """Return the error in an environment without these extras."""
    with pytest.raises(CliError) as refused:
        require_extras("a run", *names)
    return str(refused.value)


@pytest.mark.parametrize("extra", MODULES)
def test_every_package_of_an_extra_is_looked_for(extra: str) -> None:
    """A new one in pyproject.toml comes with its module."""
    for module in MODULES[extra]:
        if extra in OPTIONAL:
            pytest.importorskip(module)
    distributions = metadata.packages_distributions()
    packages = [re.match(r"[\w.-]+", line) for line in PACKAGES[extra]]
    listed = {match[0] for match in packages if match is not None}
    names = [name for module in MODULES[extra] for name in distributions[module]]
    assert {name.lower().replace("_", "-") for name in names} == listed


def test_the_error_contains_the_command_that_installs_an_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It installs from this checkout into the current environment."""
    missing(monkeypatch, "boto3")
    assert words("cloud") == (
        f"a run needs boto3, which is not installed: {sys.executable} -m pip install -c "
        f"{ROOT}/constraints.txt -e '{ROOT}[cloud]'"
    )
    missing(monkeypatch, *MODULES["engine"])
    assert "needs torch, transformers, tokenizers and 13 more, which are not" in words("engine")
    missing(monkeypatch, "pip")
    assert f"installed: uv pip install --python {sys.executable} -c " in words("engine")


@pytest.mark.parametrize(
    ("recorded", "source"),
    [
        ({"url": "https://host/tidemill-0.1.0.whl"}, "https://host/tidemill-0.1.0.whl"),
        (
            {"url": "https://host/t.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "git+https://host/t.git@abc",
        ),
        ({"url": "file:///gone"}, None),
        ({}, None),
    ],
)
def test_elsewhere_the_command_names_where_the_package_came_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recorded: dict[str, object], source: str | None
) -> None:
    """No index has the package: where nothing else is known it takes a checkout."""
    missing(monkeypatch, "boto3")
    monkeypatch.setattr(extras, "_CHECKOUT", tmp_path)
    monkeypatch.setattr(metadata.PathDistribution, "read_text", lambda *_: json.dumps(recorded))
    monkeypatch.setattr(metadata, "distribution", lambda _: metadata.PathDistribution(tmp_path))
    expected = f"'tidemill[cloud] @ {source}'" if source else "in a checkout of Tidemill, "
    assert expected in words("cloud")


@pytest.mark.parametrize(
    ("typed", "module"),
    [
        (["run", "no-such-file"], "torch"),
        (["run", "no-such-file", "--model", "s3://b/m"], "boto3"),
        (["serve"], "uvicorn"),
        (["worker"], "torch"),
    ],
)
def test_a_missing_extra_is_reported_before_anything_is_read(typed: list[str], module: str) -> None:
    """No model library is imported for it either."""
    code = f"""
import sys
sys.modules[{module!r}] = None
from tidemill.cli.main import main
status = main({typed})
print(status, {{"numpy", "pydantic", "transformers"}} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "1 set()\n"
    assert f"needs {module}, which is not installed: " in done.stderr
    assert len(done.stderr.splitlines()) == 1
