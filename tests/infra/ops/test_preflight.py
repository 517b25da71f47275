"""Preflight checks: obstacles to a deployment are reported before anything takes minutes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from infra.config import make_config
from infra.ops import linked_roles, retained, smoke
from infra.ops.preflight import __main__ as preflight
from infra.ops.preflight import account as preflight_account
from infra.ops.preflight.account import NotReady
from infra.ops.preflight.builder import check_builder
from infra.ops.preflight.weights import check_weights
from tests.emulators import Emulator

ROOT = Path(__file__).parents[3]


@pytest.fixture
def account(ministack: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this process an account, as after the export of docs/guides/deploy-to-aws.md."""
    for name, value in ministack.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)


def script(folder: Path, name: str, *lines: str) -> dict[str, str]:
    """Write a command; return an environment whose PATH has nothing else."""
    path = folder / name
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return {"PATH": str(folder)}


def test_an_empty_environment_lacks_everything(tmp_path: Path) -> None:
    """Each problem is one sentence at once, and the libraries of the stacks are not loaded."""
    code = (
        "import sys; from infra.ops.preflight.__main__ import main; status = main(['--deploy']);"
        "print('aws_cdk' in sys.modules); sys.exit(status)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "", "HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (1, "False\n")
    region, credentials, builder = result.stderr.splitlines()
    assert region.startswith("No AWS region is set: export AWS_REGION")
    assert credentials.startswith("AWS rejects your credentials: Unable to locate credentials.")
    assert "`aws sts get-caller-identity`" in credentials
    assert "`docker` is not installed: install Docker" in builder
    assert "CDK_DOCKER" in builder


@pytest.mark.usefixtures("account")
def test_where_a_deployment_goes_to_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The wrong account or region is seen before anything is in it."""
    assert preflight.main([]) == 0
    assert capsys.readouterr().out.startswith("AWS account 000000000000, us-east-1, as arn:aws:")


def test_a_wrong_configuration_is_reported_before_the_account_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is the configuration's own, at once and without credentials."""
    services: list[str] = []
    for module in (preflight, preflight_account):
        monkeypatch.setattr(module, "aws_client", lambda service, **_: services.append(service))
    path = tmp_path / "config.toml"
    path.write_text("name = 1\n")
    assert preflight.main(["--config", str(path), "--deploy"]) == 1
    first, *others = capsys.readouterr().err.splitlines()
    assert first == f"{path}: name must be a string in quotes."
    assert all(str(path) in line for line in others)
    assert services == []


@pytest.mark.usefixtures("account")
@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("AWS_PROFILE", "unknown", "AWS rejects your credentials: The config profile (unknown)"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:1", "AWS cannot be reached: Could not connect"),
        ("AWS_REGION", "a b", "AWS rejects your credentials: Provided region_name 'a b'"),
    ],
)
def test_settings_that_cannot_work_are_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    words: str,
) -> None:
    """None is a traceback."""
    monkeypatch.setenv(variable, value)
    assert preflight.main([]) == 1
    assert capsys.readouterr().err.startswith(words)


@pytest.mark.usefixtures("account")
@pytest.mark.parametrize(("region", "status"), [("us-east-1", 0), ("eu-west-1", 1)])
def test_an_image_that_is_there_needs_no_builder_but_its_region(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    region: str,
    status: int,
) -> None:
    """Workers have no way to another region's registry."""
    linked_roles.main()
    capsys.readouterr()
    monkeypatch.setenv("PATH", "")
    image = f"111122223333.dkr.ecr.{region}.amazonaws.com/tidemill:1"
    path = tmp_path / "config.toml"
    path.write_text(f'image = "{image}"\n[[models]]\nname = "m"\ngpu = "l4"\n')
    assert preflight.main(["--deploy", "--config", str(path)]) == status
    words = f"Workers in us-east-1 cannot reach {image}: copy it to that region.\n"
    assert capsys.readouterr().err == (words if status else "")


@pytest.mark.usefixtures("account")
def test_weights_that_workers_would_refuse_are_reported(
    ministack: Emulator, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their region or KMS key differs from the model's; the error gives advice."""
    s3, bucket = ministack.client("s3"), f"far-{uuid4().hex[:10]}"
    place = {"LocationConstraint": "eu-west-1"}
    s3.create_bucket(Bucket=bucket, CreateBucketConfiguration=place)
    model = {"name": "m", "gpu": "l4", "weights": f"s3://{bucket}/m"}

    def look(**changes: str) -> None:
        check_weights(make_config({"models": [model | changes]}, ""))

    with pytest.raises(NotReady, match=r"m: s3://.*/m/ is in eu-west-1, but its workers"):
        look()
    far = {"weights_region": "eu-west-1"}
    look(**far)
    assert "not uploaded yet: no objects found under s3://" in capsys.readouterr().out
    key = "arn:aws:kms:eu-west-1:000000000000:key/abc"
    encrypted = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": key}
    for name in ("config.json", "model.safetensors"):
        s3.put_object(Bucket=bucket, Key=f"m/{name}", Body=b"{}" + name.encode(), **encrypted)
    with pytest.raises(NotReady, match=f'weights_key = "{key}"'):
        look(**far)
    look(**far, weights_key=key)
    assert capsys.readouterr().out == ""


def test_a_builder_that_is_not_started_is_reported(tmp_path: Path) -> None:
    """The error contains the last line of its output."""
    with pytest.raises(NotReady) as refused:
        check_builder(script(tmp_path, "docker", "echo 'Cannot connect to it.' >&2", "exit 1"))
    assert str(refused.value) == "`docker info` failed: Cannot connect to it. Is it running?"


def test_the_hint_of_a_builder_is_not_repeated(tmp_path: Path) -> None:
    """Docker's own error ends with the question."""
    environment = script(
        tmp_path, "docker", "echo 'No connection. Is the daemon running?' >&2; exit 1"
    )
    with pytest.raises(NotReady) as refused:
        check_builder(environment)
    assert str(refused.value).count("running?") == 1


def test_the_builder_is_the_one_that_the_cdk_takes(tmp_path: Path) -> None:
    """`CDK_DOCKER` names another than Docker; only `info` is run, which changes nothing."""
    environment = script(tmp_path, "finch", '[ "$*" = info ]')
    check_builder({**environment, "CDK_DOCKER": "finch"})
    with pytest.raises(NotReady, match="`docker` is not installed"):
        check_builder(environment)


@pytest.mark.parametrize("target", ["bootstrap", "deploy", "diff", "destroy", "smoke"])
def test_make_looks_first(target: str) -> None:
    """No AWS call comes before; an image is built for `deploy` only."""
    lines = subprocess.run(
        ["make", "--dry-run", target, "CONFIG=my.toml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    asking = [line for line in lines if "-m infra." in line or ".bin/cdk" in line]
    assert "-m infra.ops.preflight --config my.toml" in asking[0]
    assert len(asking) > 1
    assert ("--deploy" in asking[0]) is (target == "deploy")


@pytest.mark.parametrize(("arguments", "approval"), [((), "broadening"), (("YES=1",), "never")])
def test_yes_skips_the_prompt(arguments: tuple[str, ...], approval: str) -> None:
    """Pipelines need it; without it the CDK prompts before broadening permissions."""
    recipe = subprocess.run(
        ["make", "--dry-run", "deploy", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f" --require-approval {approval}\n" in recipe


@pytest.mark.usefixtures("account")
@pytest.mark.parametrize("main", [retained.main, smoke.main])
def test_the_region_of_the_docs_is_enough(
    capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int]
) -> None:
    """`make destroy` and `make smoke` look in the region to which the CDK deploys."""
    assert main([]) == 1
    assert "stack tidemill-data not found" in capsys.readouterr().err
