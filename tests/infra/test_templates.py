"""Templates for other tools than the CDK: whole, and free of its bootstrap."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from infra import bundle
from infra.bundle import Bundle
from infra.config import ConfigRefused, make_config
from tests.infra.reading import lint

ROOT = Path(__file__).parents[2]
MODULE = ROOT / "infra" / "terraform"
IMAGE = "111122223333.dkr.ecr.eu-west-1.amazonaws.com/tidemill:1"


@pytest.fixture(scope="module")
def written(
    default_config: dict[str, Any],
    stub_bundle: Callable[[], Bundle],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Return a folder with the templates of infra/config.toml and an image; it had another file."""
    from infra.templates import write_templates

    folder = tmp_path_factory.mktemp("templates")
    (folder / "old.template.json").touch()
    config = make_config(default_config | {"image": IMAGE}, "test")
    made = write_templates(config, stub_bundle(), folder)
    assert made == [folder / f"{name}.template.json" for name in ("data", "api", "compute")]
    assert sorted(path.name for path in folder.iterdir()) == [
        "api.template.json",
        "assets",
        "compute.template.json",
        "data.template.json",
    ]
    return folder


def test_they_need_no_bootstrap(written: Path) -> None:
    """Only the Lambdas' template has assets, and parameters that locate them."""
    for path in written.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert "cdk-hnb659fds" not in text
        parameters = {"AssetsBucket", "AssetsPrefix"} if path.name.startswith("api.") else set()
        assert "BootstrapVersion" not in text
        assert parameters <= set(json.loads(text).get("Parameters", {}))
        assert ("AssetsBucket" in text) == bool(parameters)
        # Of the others tests/infra/test_modes.py lints enough.
        found = {match.rule.id for match in lint(text, "us-east-1")} if parameters else set()
        assert found <= {"W3005"}


def test_the_code_of_each_lambda_is_among_the_assets(written: Path) -> None:
    """It has the key that its template names, and permissions with which Lambda can read it."""
    found = json.loads((written / "api.template.json").read_text(encoding="utf-8"))["Resources"]
    codes = [
        resource["Properties"]["Code"]
        for resource in found.values()
        if resource["Type"] == "AWS::Lambda::Function"
    ]
    assert codes
    assert [path.suffix for path in (written / "assets").iterdir()] == [".zip"]
    for code in codes:
        assert code["S3Bucket"] == {"Fn::Sub": "${AssetsBucket}"}
        prefix, _, name = code["S3Key"]["Fn::Sub"].rpartition("}")
        assert prefix == "${AssetsPrefix"
        with ZipFile(written / "assets" / name) as archive:
            assert archive.namelist() == ["empty.py"]
            assert archive.infolist()[0].external_attr >> 16 == 0o100644


@pytest.fixture
def without_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Build bundles in which each package is an empty module."""

    def install(folder: Path, _processor: str, _python: str, wanted: Sequence[str]) -> None:
        (folder / "botocore" / "data").mkdir(parents=True)
        for requirement in wanted:
            name = requirement.partition(">")[0]
            (folder / f"{name}.py").touch()

    monkeypatch.setattr(bundle, "install", install)
    monkeypatch.setattr(bundle, "find_python", lambda _: None)
    monkeypatch.setattr(bundle, "build", partial(bundle.build, bundles=tmp_path / "bundles"))
    (layer := tmp_path / "layer").mkdir()
    monkeypatch.setattr(bundle, "build_tables_layer", lambda *_: layer)


def modules_in(output: Path) -> set[str]:
    """Return the names of the files in the assets of written templates."""
    return {name for path in output.glob("assets/*.zip") for name in ZipFile(path).namelist()}


@pytest.mark.usefixtures("without_pip")
def test_the_code_verifies_tokens_if_the_configuration_takes_them(tmp_path: Path) -> None:
    """The functions have the packages of `[oidc]`."""
    from infra import templates

    table = '[oidc]\nissuer = "https://login.example.com"\naudience = "tidemill"\n'
    table += 'tenant_claim = "department"\n'
    (config := tmp_path / "config.toml").write_text(
        f'image = "{IMAGE}"\n{table}[[models]]\nname = "m"\ngpu = "l4"\n'
    )
    output = tmp_path / "out"
    assert templates.main(["--config", str(config), "--output", str(output)]) == 0
    assert {"boto3.py", "pyjwt.py", "cryptography.py"} <= modules_in(output)


def test_an_image_that_is_to_be_built_is_refused(
    default_config: dict[str, Any], stub_bundle: Callable[[], Bundle], tmp_path: Path
) -> None:
    """No command would build it; earlier output stays."""
    from infra.templates import write_templates

    (tmp_path / "kept").touch()
    with pytest.raises(ConfigRefused, match="set `image`"):
        write_templates(make_config(default_config, "test"), stub_bundle(), tmp_path)
    assert (tmp_path / "kept").exists()


def test_the_command_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is the configuration's own, with its path, before anything is bundled."""
    from infra import templates

    monkeypatch.delattr(templates, "make_bundle")
    path = tmp_path / "config.toml"
    for text, words in (
        ("name = 1\n", "name must be"),
        ('[[models]]\nname="m"\ngpu="l4"', "image"),
    ):
        path.write_text(text)
        assert templates.main(["--config", str(path), "--output", str(tmp_path / "out")]) == 1
        stderr = capsys.readouterr().err
        assert stderr.startswith(f"{path}: ")
        assert words in stderr


@pytest.mark.usefixtures("without_pip")
def test_a_review_needs_no_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The templates name a placeholder, which the command states; keys need no packages."""
    from infra import templates

    path = tmp_path / "config.toml"
    path.write_text('[[models]]\nname="m"\ngpu="l4"')
    output = tmp_path / "out"
    assert templates.main(["--config", str(path), "--output", str(output), "--review"]) == 0
    assert f"The image is a placeholder ({templates.PLACEHOLDER})" in capsys.readouterr().err
    name, tag = templates.PLACEHOLDER.rpartition("/")[2].split(":")
    written = (output / "compute.template.json").read_text(encoding="utf-8")
    assert name in written
    assert f":{tag}" in written
    modules = modules_in(output)
    assert "boto3.py" in modules
    assert not {"pyjwt.py", "cryptography.py"} & modules


@pytest.mark.long
def test_terraform_takes_the_module(tmp_path: Path) -> None:
    """`terraform validate` with its provider, where both are to be had (TF_CLI_ARGS_init)."""
    if shutil.which("terraform") is None:
        pytest.skip("there is no terraform here")
    shutil.copy(MODULE / "main.tf", tmp_path)

    def terraform(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["terraform", *words],
            cwd=tmp_path,
            env=os.environ | {"TF_DATA_DIR": str(tmp_path / "data")},
            capture_output=True,
            text=True,
            check=False,
        )

    assert terraform("fmt", "-check").returncode == 0
    if terraform("init", "-backend=false", "-input=false").returncode:
        pytest.skip("its provider for AWS cannot be had")
    result = terraform("validate", "-json")
    assert json.loads(result.stdout)["diagnostics"] == []
