"""What cdk-nag and cfn-lint say of the stacks, and that they are asked at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from aws_cdk import App, Stack
from aws_cdk import aws_s3 as s3
from aws_cdk.assertions import Template
from cfnlint import api as cfn_lint

from infra import app as infra_app
from infra.bundle import Bundle
from infra.nag_exceptions import ACKNOWLEDGED, Acknowledgement, Checks, add_checks

EVERYTHING_ELSE = {
    "alarm_email": "ops@example.com",
    "compute": "asg",
    "spot": True,
    "auth": "iam",
    "network": "isolated",
    "isolated": {"internet": True},
    "models": [
        {"name": "big", "gpu": "h100", "gpus_per_worker": 8, "weights": "s3://weights/big"},
        {"name": "small", "gpu": "t4"},
    ],
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "managed, Spot": {"spot": True},
    "groups": {"compute": "asg"},
    "isolated": {"network": "isolated"},
    "everything else": EVERYTHING_ELSE,
    "jobs, Spot": {"compute": "sagemaker", "spot": True},
    "jobs, isolated": {"compute": "sagemaker", "network": "isolated"},
}
# "Dependency already enforced": CDK has each function wait for all of its role, which does no harm.
LEFT_UNHEEDED = {"W3005"}


@pytest.fixture(scope="session")
def checked(make_app: Callable[[dict[str, Any]], App]) -> dict[str, Checks]:
    """Return the checks that each configuration went through, and passed."""
    done = {}
    for name, overrides in CONFIGURATIONS.items():
        app = make_app(overrides)
        done[name] = add_checks(app)
        app.synth()
    return done


def synth_with_open_bucket(tmp_path: Path, *acknowledged: Acknowledgement) -> None:
    """Synthesise a bucket that may be read without TLS, and that logs no access, under checks."""
    app = App(outdir=str(tmp_path))
    s3.Bucket(Stack(app, "Planted"), "Bucket")
    add_checks(app, acknowledged)
    app.synth()


def findings(folder: Path) -> set[tuple[str, str]]:
    """Return each rule that was broken and where."""
    report = json.loads((folder / "validation-report.json").read_text(encoding="utf-8"))
    return {
        (violation["ruleName"], place["constructPath"])
        for plugin in report["pluginReports"]
        for violation in plugin["violations"]
        for place in violation["violatingConstructs"]
    }


def test_every_configuration_passes(checked: dict[str, Checks]) -> None:
    """Each kind of deployment is synthesised under the checks, which have met what is known."""
    assert all(checks.used for checks in checked.values())


def test_no_acknowledgement_is_idle(checked: dict[str, Checks]) -> None:
    """Every line of the table is needed by some configuration."""
    used = set().union(*(checks.used for checks in checked.values()))
    assert [line for line in ACKNOWLEDGED if line not in used] == []


def test_every_acknowledgement_gives_a_reason() -> None:
    """A reason is a sentence, not a word."""
    assert [
        line for line in ACKNOWLEDGED if len(line.reason.split()) < 6 or line.reason[-1] != "."
    ] == []


def test_a_fault_fails_synth(tmp_path: Path) -> None:
    """A bucket that takes requests without TLS is found."""
    with pytest.raises(RuntimeError, match="ValidationFailed"):
        synth_with_open_bucket(tmp_path)
    assert findings(tmp_path) == {
        ("AwsSolutions-S1", "Planted/Bucket/Resource"),
        ("AwsSolutions-S10", "Planted/Bucket/Resource"),
    }


def test_an_acknowledgement_covers_its_rule_only(tmp_path: Path) -> None:
    """A line for one rule leaves the findings of others at the same place."""
    with pytest.raises(RuntimeError, match="ValidationFailed"):
        synth_with_open_bucket(
            tmp_path, Acknowledgement("AwsSolutions-S1", "Planted/*", "Nobody reads such logs.")
        )
    assert findings(tmp_path) == {("AwsSolutions-S10", "Planted/Bucket/Resource")}


def test_the_app_is_checked(
    monkeypatch: pytest.MonkeyPatch, stub_bundle: Callable[[], Bundle], tmp_path: Path
) -> None:
    """What `cdk` calls fails for a fault in any stack."""
    add_stacks = infra_app.add_stacks

    def add_stacks_and_fault(app: App, *arguments: Any) -> None:
        add_stacks(app, *arguments)
        s3.Bucket(Stack(app, "Planted"), "Bucket")

    monkeypatch.setattr(infra_app, "add_stacks", add_stacks_and_fault)
    monkeypatch.setattr(infra_app, "make_bundle", lambda _: stub_bundle())
    monkeypatch.setattr(infra_app, "App", lambda: App(outdir=str(tmp_path)))
    with pytest.raises(RuntimeError, match="ValidationFailed"):
        infra_app.main()
    assert {path for _, path in findings(tmp_path)} == {"Planted/Bucket/Resource"}


@pytest.mark.parametrize(
    ("found", "path", "is_covered"),
    [
        ("AwsSolutions-IAM5[Resource::<Bucket.Arn>/work/*]", "Api/Role/Policy/Resource", True),
        ("AwsSolutions-IAM5[Resource::<Bucket.Arn>/*]", "Api/Role/Policy/Resource", False),
        ("AwsSolutions-IAM5[Resource::*]", "Api/Role/Policy/Resource", False),
        ("AwsSolutions-IAM5[Action::s3:*]", "Api/Role/Policy/Resource", False),
        ("AwsSolutions-IAM5", "Api/Role/Policy/Resource", False),
        ("AwsSolutions-IAM4[Resource::<Bucket.Arn>/work/*]", "Api/Role/Policy/Resource", False),
        ("AwsSolutions-IAM5[Resource::<Bucket.Arn>/work/*]", "Data/Role/Policy/Resource", False),
        ("AwsSolutions-IAM5[Resource::<Bucket.Arn>/work/*]", "Api/Role/Policy", True),
        ("AwsSolutions-IAM5[Resource::<Bucket.Arn>/work/*]", "Api/Role/Policy/Other", False),
    ],
)
def test_an_acknowledgement_covers_what_it_names(
    found: str, path: str, *, is_covered: bool
) -> None:
    """One prefix of the bucket, for one role."""
    line = Acknowledgement(
        "AwsSolutions-IAM5", "Api/*/Policy", "For a test.", finding="Resource::*Bucket*/work/[*]"
    )
    assert line.covers(found, path) is is_covered


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_cfn_lint_has_nothing_to_say(
    synth: Callable[[dict[str, Any]], dict[str, Template]], name: str
) -> None:
    """Every template is one that CloudFormation will take."""
    said = {
        stack: sentences
        for stack, template in synth(CONFIGURATIONS[name]).items()
        if (sentences := linted(json.dumps(template.to_json())))
    }
    assert said == {}


@cache
def linted(template: str) -> tuple[str, ...]:
    """Return what cfn-lint says of a template; most configurations share some."""
    return tuple(
        f"{match.rule.id} {match.message} {match.path}"
        for match in cfn_lint.lint(template, regions=["us-east-1"])
        if match.rule.id not in LEFT_UNHEEDED
    )


def test_cfn_lint_finds_a_fault() -> None:
    """A template with a queue of an impossible kind is not clean."""
    queue = {"Type": "AWS::SQS::Queue", "Properties": {"VisibilityTimeout": "soon"}}
    matches = cfn_lint.lint(json.dumps({"Resources": {"Queue": queue}}), regions=["us-east-1"])
    assert [match.rule.id for match in matches] == ["E3012"]
