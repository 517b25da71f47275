"""docs/integrations/kubernetes.md: its commands run, and its values are the chart's."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.container.chart.rendering import CHART, EXAMPLES, ROOT, helm_template, tool
from tools.docs_report import blocks_of

PAGE_PATH = ROOT / "docs/integrations/kubernetes.md"
PAGE = PAGE_PATH.read_text(encoding="utf-8")
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
# The launcher's keys are not values of the chart: tests/test_docs.py checks them.
OF_CHART = re.sub(r"^## Launcher\n.*?(?=^## )", "", PAGE, flags=re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^helm install .*$", PAGE, re.MULTILINE)


def documented() -> Iterator[str]:
    """Yield the values of the tables; `.b` behind `a.x` is `a.b`, and `a.…` all of `a`."""
    for row in re.findall(r"^\| (`.*?) \|", OF_CHART, re.MULTILINE):
        before = ""
        for name in re.findall(r"`([^`]+)`", row):
            path = before.rpartition(".")[0] + name if name.startswith(".") else name
            before = path
            yield path.removesuffix(".…")


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the paths of values that hold no named ones."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def dry_run(command: str, folder: Path) -> str:
    """Run a helm command in a folder as a client's dry run, and return its output."""
    done = subprocess.run(
        ["bash", "-c", f"{command} --dry-run=client"],
        cwd=folder,
        env={**os.environ, "PATH": f"{tool('helm')}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_page_runs(command: str, tmp_path: Path) -> None:
    """It runs in a checkout, next to the file with the stack's outputs; nothing is sent."""
    for name in ("container", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "environment.json").symlink_to(EXAMPLES / "environment.json")
    assert "NOTES:" in dry_run(command, tmp_path)


def test_the_page_has_a_command_for_each_example() -> None:
    """Each example is tried by a command."""
    assert sorted(re.findall(r"docs/examples/kubernetes/(\w+)\.yaml", "".join(COMMANDS))) == sorted(
        path.stem for path in EXAMPLES.glob("*.yaml")
    )


def test_the_values_that_the_page_shows_are_taken() -> None:
    """Laid over the example with workers."""
    [values] = [block for block in blocks_of(PAGE_PATH) if "models:" in block.text]
    status, words = helm_template("launcher", yaml.safe_load(values.text))
    assert status == 0, words


def test_the_file_of_the_guide_is_installed_by_its_command(tmp_path: Path) -> None:
    """It needs no other values than the outputs of the guide's stack."""
    page = ROOT / "docs/guides/kubernetes.md"
    [values] = [block for block in blocks_of(page) if block.title == "models.yaml"]
    (tmp_path / values.title).write_text(values.text, encoding="utf-8")
    environment = json.loads((EXAMPLES / "environment.json").read_bytes())
    environment["TIDEMILL_WORK_QUEUES"] = json.dumps({"Qwen/Qwen3-8B": "https://queue"})
    (tmp_path / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    (tmp_path / "container").symlink_to(ROOT / "container")
    [command] = [
        line
        for block in blocks_of(page)
        for line in block.text.splitlines()
        if f"--values {values.title}" in line
    ]
    dry_run(command, tmp_path)


def test_every_value_is_explained_and_every_explained_one_exists() -> None:
    """Values of a model are named by their paths below it."""
    named = set(documented())
    assert {"name", "serve.strategy", "workers.keda.shardsPerEngine"} <= named
    of_models = set(leaves(DEFAULTS["modelDefaults"])) | {"name"}
    others = set(leaves({key: DEFAULTS[key] for key in DEFAULTS if "model" not in key}))

    def covers(path: str, value: str) -> bool:
        return value == path or value.startswith(f"{path}.")

    every = of_models | others
    assert sorted(path for path in named if not any(covers(path, it) for it in every)) == []
    assert sorted(it for it in every if not any(covers(path, it) for path in named)) == []
