"""The table of cdk-nag's findings; other findings fail synth."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from infra.bundle import Bundle

if TYPE_CHECKING:
    from aws_cdk import App

    from infra.nag_exceptions import Acknowledgement


def synth_with_open_bucket(tmp_path: Path, *acknowledged: Acknowledgement) -> None:
    """Synthesise a bucket that may be read without TLS, and that logs no access, under checks."""
    from aws_cdk import App, Stack
    from aws_cdk import aws_s3 as s3

    from infra.nag_exceptions import add_checks

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


def test_every_acknowledgement_gives_a_reason() -> None:
    """A reason is a sentence, not a word."""
    from infra.nag_exceptions import ACKNOWLEDGED

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
    from infra.nag_exceptions import Acknowledgement

    with pytest.raises(RuntimeError, match="ValidationFailed"):
        synth_with_open_bucket(
            tmp_path, Acknowledgement("AwsSolutions-S1", "Planted/*", "Such logs are not read.")
        )
    assert findings(tmp_path) == {("AwsSolutions-S10", "Planted/Bucket/Resource")}


def test_the_app_is_checked(
    monkeypatch: pytest.MonkeyPatch, stub_bundle: Callable[[], Bundle], tmp_path: Path
) -> None:
    """The app that `cdk` calls fails for a finding in any stack."""
    from aws_cdk import App, Stack
    from aws_cdk import aws_s3 as s3

    from infra import app as infra_app

    add_stacks = infra_app.add_stacks

    def add_stacks_and_fault(app: App, *arguments: Any) -> None:
        add_stacks(app, *arguments)
        s3.Bucket(Stack(app, "Planted"), "Bucket")

    monkeypatch.setattr(infra_app, "add_stacks", add_stacks_and_fault)
    monkeypatch.setattr(infra_app, "make_bundle", lambda *_, **__: stub_bundle())
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
    from infra.nag_exceptions import Acknowledgement

    line = Acknowledgement(
        "AwsSolutions-IAM5", "Api/*/Policy", "For a test.", finding="Resource::*Bucket*/work/[*]"
    )
    assert line.covers(found, path) is is_covered
