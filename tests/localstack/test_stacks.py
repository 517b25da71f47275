"""The CDK's commands, as a cloud on this machine starts them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localstack import stacks
from localstack.processes import ROOT


def test_the_cdk_tells_nobody_of_a_cloud_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is started: in the repository by cdk.json, elsewhere by the environment."""
    told = tmp_path / "told"
    script = tmp_path / "cdk"
    script.write_text(f'#!/bin/sh\necho "$CDK_DISABLE_CLI_TELEMETRY" >{told}\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setattr(stacks, "_NODE_BIN", tmp_path)
    with pytest.raises(stacks.DeploymentFailed):
        stacks.synthesise(tmp_path, config=tmp_path / "config.toml")
    assert told.read_text().split() == ["true"]
    assert json.loads((ROOT / "cdk.json").read_text())["context"]["cli-telemetry"] is False


def test_a_configuration_is_found_from_the_folder_where_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CDK runs in the repository, whoever names a file runs anywhere."""
    told = tmp_path / "told"
    script = tmp_path / "cdk"
    script.write_text(f'#!/bin/sh\necho "$@" >{told}\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setattr(stacks, "_NODE_BIN", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(stacks.DeploymentFailed):
        stacks.synthesise(tmp_path, config=Path("my.toml"))
    assert f"config={tmp_path / 'my.toml'}" in told.read_text().split()
