"""Stacks of a cloud on this machine: synthesised as the CDK's command does, and deployed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.config import DEFAULT_PATH
from localstack import stacks
from localstack.ministack import environment_for, free_port
from localstack.processes import ROOT
from tests.emulators import Emulator


def test_the_cdk_sends_no_telemetry() -> None:
    """cdk.json disables it."""
    assert json.loads((ROOT / "cdk.json").read_text())["context"]["cli-telemetry"] is False


def test_a_configuration_is_found_from_the_folder_where_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CDK's program runs in the repository, but the user's folder may be any other."""
    environments: list[dict[str, str]] = []
    monkeypatch.setattr(stacks, "_run", lambda _, **values: environments.append(values))
    monkeypatch.chdir(tmp_path)
    stacks.synthesise(tmp_path, config=Path("my.toml"), model_name="m")
    [environment] = environments
    context = json.loads(environment["CDK_CONTEXT_JSON"])
    assert (context["config"], context["model_name"]) == (str(tmp_path / "my.toml"), "m")


def test_a_program_that_fails_is_reported_with_its_output() -> None:
    """The error has the command and the end of its output."""
    code = "print('no such key'); raise SystemExit(1)"
    with pytest.raises(stacks.DeploymentFailed, match=r"(?s)-c .* failed:.*no such key"):
        stacks._run([sys.executable, "-S", "-c", code])


def _template(**resources: dict[str, Any]) -> str:
    return json.dumps({"Resources": resources})


def test_a_stack_is_created_then_updated(ministack: Emulator) -> None:
    """An unchanged template is accepted; a failure names its resource."""
    cloudformation = ministack.client("cloudformation")
    queue = {"Type": "AWS::SQS::Queue", "Properties": {"VisibilityTimeout": 7}}

    def apply(template: str) -> list[str]:
        stacks._apply(cloudformation, StackName="applied", TemplateBody=template)
        found = cloudformation.describe_stack_resources(StackName="applied")["StackResources"]
        return sorted(resource["LogicalResourceId"] for resource in found)

    assert apply(_template(One=queue)) == ["One"]
    assert apply(_template(One=queue)) == ["One"]
    assert apply(_template(One=queue, Two=queue)) == ["One", "Two"]
    for kind, where in (("Stack", "not deployed: Three: "), ("Nothing", "be deployed: .*Nothing")):
        properties = {"TemplateURL": "http://127.0.0.1/none"}
        broken = {"Type": f"AWS::CloudFormation::{kind}", "Properties": properties}
        with pytest.raises(stacks.DeploymentFailed, match=rf"the stack applied .*{where}"):
            apply(_template(One=queue, Three=broken))


def test_an_emulator_that_ends_during_a_deployment_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its remaining requests fail, whichever they are; the error has the address."""
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    stack = {"type": "aws:cloudformation:stack", "properties": {"templateFile": "x.template.json"}}
    (tmp_path / "manifest.json").write_text(json.dumps({"artifacts": {"Data": stack}}))
    place = {"bucketName": "assets", "objectKey": "x"}
    file = {"source": {"path": "x.template.json"}, "destinations": {"here": place}}
    (tmp_path / "x.assets.json").write_text(json.dumps({"files": {"x": file}}))
    monkeypatch.setattr(stacks, "synthesise", lambda *_, **__: tmp_path)
    with pytest.raises(stacks.DeploymentFailed, match=rf"emulator failed: .*{url}"):
        stacks.deploy(environment_for(url), tmp_path, config=DEFAULT_PATH, name="x")


@pytest.mark.long  # starts the CDK's command, which takes seconds
def test_the_templates_are_those_of_the_cdks_command(tmp_path: Path) -> None:
    """`cdk synth` adds only metadata, for its own diagrams."""
    ours = stacks.synthesise(tmp_path, config=DEFAULT_PATH)
    command = shutil.which("cdk", path=str(ROOT / "infra/node_modules/.bin"))
    if command is None:
        pytest.skip("the CDK's command is not installed: `make test` installs it")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    words = ["-c", "local=true", "-c", f"config={DEFAULT_PATH}"]
    subprocess.run(
        [command, "synth", "--quiet", "--output", str(tmp_path / "theirs"), *words],
        cwd=ROOT,
        env=os.environ | {"PATH": path, "CDK_VALIDATION": "false"},
        check=True,
    )
    for name in ("Data", "Api"):
        mine, other = (
            json.loads((folder / f"{name}.template.json").read_text())
            for folder in (ours, tmp_path / "theirs")
        )
        for resource in (*mine["Resources"].values(), *other["Resources"].values()):
            resource.pop("Metadata", None)
        assert mine == other
