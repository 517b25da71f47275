"""The CDK's commands, as a cloud on this machine starts them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localstack import stacks
from localstack.processes import ROOT


def test_the_cdk_sends_no_telemetry_from_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the repository cdk.json disables it, elsewhere the environment does."""
    output = tmp_path / "output"
    script = tmp_path / "cdk"
    script.write_text(f'#!/bin/sh\necho "$CDK_DISABLE_CLI_TELEMETRY" >{output}\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setattr(stacks, "_NODE_BIN", tmp_path)
    with pytest.raises(stacks.DeploymentFailed):
        stacks.synthesise(tmp_path, config=tmp_path / "config.toml")
    assert output.read_text().split() == ["true"]
    assert json.loads((ROOT / "cdk.json").read_text())["context"]["cli-telemetry"] is False


def test_a_configuration_is_found_from_the_folder_where_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CDK runs in the repository, but the user's folder may be any other."""
    output = tmp_path / "output"
    script = tmp_path / "cdk"
    script.write_text(f'#!/bin/sh\necho "$@" >{output}\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setattr(stacks, "_NODE_BIN", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(stacks.DeploymentFailed):
        stacks.synthesise(tmp_path, config=Path("my.toml"))
    assert f"config={tmp_path / 'my.toml'}" in output.read_text().split()
