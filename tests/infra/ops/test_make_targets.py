"""make's targets for AWS: what they run, for the configuration that they get."""

from __future__ import annotations

import os
import subprocess
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from infra.ops import retained, smoke
from infra.ops.client import Api, ApiFailed
from tests.emulators import Emulator

ROOT = Path(__file__).parents[3]


def recipe(*arguments: str) -> str:
    """Return the commands that make would run."""
    return subprocess.run(
        ["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def test_stacks_can_be_deployed_alone() -> None:
    """They get the same context as all stacks, which removing a model requires."""
    alone = recipe("deploy", "CONFIG=my.toml", "STACKS=Compute Api")
    everything = recipe("deploy", "CONFIG=my.toml")
    assert " deploy Compute Api --exclusively -c config=my.toml " in alone
    assert alone.replace("Compute Api --exclusively", "--all") == everything


def test_the_smoke_test_is_of_the_configured_deployment() -> None:
    """NAME tests another one."""
    assert "infra.ops.smoke --config my.toml" in recipe("smoke", "CONFIG=my.toml")
    assert "infra.ops.smoke --deployment mill" in recipe("smoke", "CONFIG=my.toml", "NAME=mill")


def test_the_smoke_test_reads_the_name(
    ministack: Emulator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The configuration contains it."""
    for name, value in ministack.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)
    path = tmp_path / "config.toml"
    path.write_text('name = "mill"\n[[models]]\nname = "m"\ngpu = "l4"\n')
    assert smoke.main(["--config", str(path)]) == 1
    assert "stack mill-data not found" in capsys.readouterr().err


def test_an_unreachable_api_is_named() -> None:
    """The deployment's stacks may be in another region or partly deleted."""
    with closing(Api("http://127.0.0.1:9", "key")) as api, pytest.raises(ApiFailed) as failed:
        api.batch("batch_1")
    assert str(failed.value).startswith("the API at 127.0.0.1 cannot be reached (GET batches/")


@pytest.mark.parametrize(
    ("builder", "build"), [("docker", "docker buildx build"), ("finch", "finch build")]
)
def test_the_image_is_built_by_the_builder_of_the_cdk(builder: str, build: str) -> None:
    """Builders without buildx push the image in a second step."""
    image = "111122223333.dkr.ecr.eu-west-1.amazonaws.com/tidemill:1"
    lines = recipe("image", f"CDK_DOCKER={builder}", f"IMAGE={image}", "AUDIT=no")
    assert f"\n{build} --platform linux/amd64 " in lines
    assert (f"\nfinch push {image}\n" in lines) is (builder == "finch")


@pytest.mark.parametrize(
    ("builder", "words"),
    [
        ("no-such-builder", "'no-such-builder' was not found: install it, or name another"),
        ("false", "'false' does not support 'build --platform': install a newer version of it, or"),
    ],
)
def test_a_builder_that_cannot_build_is_reported(builder: str, words: str, tmp_path: Path) -> None:
    """The error names another one."""
    result = subprocess.run(
        ["make", "image", f"CDK_DOCKER={builder}", "IMAGE=x", "AUDIT=no", f"OUT={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith(words)


@dataclass(frozen=True)
class Named:
    """The resources that a deployment retains."""

    bucket: str
    table: str


def test_the_bucket_is_deleted_by_the_printed_command(ministack: Emulator) -> None:
    """It can be pasted, and deletes all versions."""
    bucket = f"mill-{uuid4().hex}"
    s3 = ministack.client("s3")
    s3.create_bucket(Bucket=bucket)
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    for _ in range(2):
        s3.put_object(Bucket=bucket, Key="input/a", Body=b"1")
    s3.delete_object(Bucket=bucket, Key="input/a")
    lines = retained.sentences(Named(bucket, "t"), "us-east-1")  # type: ignore[arg-type]
    command = next(line for line in lines if "boto3" in line)
    subprocess.run(["/bin/sh", "-c", command], check=True, env=os.environ | ministack.environment)
    assert bucket not in {each["Name"] for each in s3.list_buckets()["Buckets"]}
