"""`tidemill keys`, typed, against a table on an emulator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import place
from tests.cli.place import cells_of, table_on
from tests.emulators import Emulator
from tidemill.cli.main import main
from tidemill.handler.aws.sync import Aws
from tidemill.handler.tenants.keys import ApiKey, KeyStore

ROOT = Path(__file__).parents[3]
TEMPLATE = """{
  "Resources": {"Table": {"Type": "AWS::DynamoDB::Table", "Properties": {
    "BillingMode": "PAY_PER_REQUEST",
    "AttributeDefinitions": [
      {"AttributeName": "pk", "AttributeType": "S"}, {"AttributeName": "sk", "AttributeType": "S"}],
    "KeySchema": [
      {"AttributeName": "pk", "KeyType": "HASH"}, {"AttributeName": "sk", "KeyType": "RANGE"}]}}},
  "Outputs": {"TableName": {"Value": {"Ref": "Table"}}}
}"""


@pytest.fixture
def table(ministack: Emulator, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a table in the account that this process has credentials of."""
    return table_on(ministack, monkeypatch)


def known(emulator: Emulator, table: str, token: str) -> ApiKey | None:
    """Return the key that a token is."""
    return Aws(emulator.client).run(KeyStore(table).check(token))


def typed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run a keys command; return its exit status and output."""
    return place.typed(capsys, "keys", *arguments)


def test_a_key_is_made_listed_and_revoked(
    ministack: Emulator, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its token alone is printed on standard output, once; the list never shows it."""
    status, out, err = typed(capsys, "create", "--name", "my laptop", "--table", table)
    assert status == 0
    token = out.removesuffix("\n")
    key = known(ministack, table, token)
    assert key is not None
    assert (key.tenant, key.name) == ("default", "my laptop")
    assert "cannot be shown again" in err
    assert token not in err

    status, out, _ = typed(capsys, "list", "--table", table)
    assert status == 0
    heads, (key_id, tenant, _, state, name) = cells_of(out)
    assert heads == ["ID", "TENANT", "CREATED", "STATE", "NAME"]
    assert (key_id, tenant, state, name) == (key.id, "default", "valid", "my laptop")

    status, out, err = typed(capsys, "revoke", key_id, "--table", table)
    assert (status, out) == (0, "")
    assert key_id in err
    assert known(ministack, table, token) is None
    assert "  revoked 20" in typed(capsys, "list", "--table", table)[1]


def test_a_key_is_revoked_by_itself(
    ministack: Emulator, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token found in a log can be revoked without its ID, and is not printed again."""
    token = typed(capsys, "create", "--name", "a", "--table", table)[1].strip()
    status, out, err = typed(capsys, "revoke", token, "--table", table)
    assert status == 0
    assert token not in out + err
    assert known(ministack, table, token) is None


def test_keys_of_one_tenant_are_listed(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without keys, nothing is printed on standard output."""
    for tenant in ("search", "ads"):
        typed(capsys, "create", "--name", "x", "--tenant", tenant, "--table", table)
    _, out, _ = typed(capsys, "list", "--tenant", "ads", "--table", table)
    assert [cells[1] for cells in cells_of(out)] == ["TENANT", "ads"]
    typed(capsys, "create", "--name", "boss", "--tenant", "it", "--admin", "--table", table)
    assert "valid, admin" in typed(capsys, "list", "--tenant", "it", "--table", table)[1]
    status, out, err = typed(capsys, "list", "--tenant", "empty", "--table", table)
    assert (status, out) == (0, "")
    assert "no keys" in err


def test_the_environment_names_the_table(
    table: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable works as for the other commands of a deployment."""
    monkeypatch.setenv("TIDEMILL_TABLE", table)
    assert typed(capsys, "create", "--name", "x")[0] == 0
    assert len(typed(capsys, "list", "--table", table)[1].splitlines()) == 2


def test_the_deployment_names_the_table(
    ministack: Emulator,
    table: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its stack's output is read; a name that is typed counts more than the environment."""
    monkeypatch.setenv("TIDEMILL_TABLE", table)
    cloud = ministack.client("cloudformation")
    cloud.create_stack(StackName="ours-data", TemplateBody=TEMPLATE)
    cloud.get_waiter("stack_create_complete").wait(
        StackName="ours-data", WaiterConfig={"Delay": 1, "MaxAttempts": 60}
    )
    status, out, _ = typed(capsys, "create", "--name", "x", "--deployment", "ours")
    assert status == 0
    outputs = cloud.describe_stacks(StackName="ours-data")["Stacks"][0]["Outputs"]
    assert known(ministack, outputs[0]["OutputValue"], out.strip()) is not None
    assert typed(capsys, "list", "--table", table)[1] == ""


def test_another_program_s_stack_is_refused(
    ministack: Emulator, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the name, but no table."""
    del table
    template = json.loads(TEMPLATE) | {"Outputs": {}}
    ministack.client("cloudformation").create_stack(
        StackName="theirs-data", TemplateBody=json.dumps(template)
    )
    status, out, err = typed(capsys, "list", "--deployment", "theirs")
    assert (status, out) == (2, "")
    assert "theirs-data is not a Tidemill stack" in err


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["list"], 2, "reading the stack tidemill-data failed"),
        (["list", "--deployment", "none"], 2, "reading the stack none-data failed"),
        (["create", "--name", "x", "--table", "none"], 1, "the table none cannot be accessed"),
        (["list", "--table", "none"], 1, "the table none cannot be accessed"),
        (["revoke", "x", "--table", "none"], 1, "the table none cannot be accessed"),
    ],
)
def test_missing_resources_are_reported_in_one_sentence(
    table: str,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    words: str,
) -> None:
    """No traceback, nothing on standard output."""
    del table
    found, out, err = typed(capsys, *arguments)
    assert (found, out) == (status, "")
    assert words in err
    assert ("pass --deployment with the deployment's name" in err) is ("stack" in words)
    assert "Traceback" not in err


def test_an_unknown_key_is_refused(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error does not repeat the argument, which may be most of a secret."""
    status, out, err = typed(capsys, "revoke", "tm_0123_half-a-secret", "--table", table)
    assert (status, out) == (2, "")
    assert "key not found" in err
    assert "half-a-secret" not in err


@pytest.mark.parametrize("arguments", [["list"], ["list", "--table", "t"]])
def test_missing_credentials_are_reported(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
) -> None:
    """Neither the environment nor a file has any."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "TIDEMILL_TABLE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    # boto3's own session remembers the credentials of other tests.
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    status, out, err = typed(capsys, *arguments)
    assert status in {1, 8}
    assert out == ""
    assert "credentials" in err
    assert "--deployment" not in err


def test_the_region_of_the_docs_is_enough(
    table: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After `export AWS_REGION=…`, which boto3 alone does not read."""
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)
    assert typed(capsys, "list", "--table", table)[0] == 0


def test_without_a_region_it_says_what_to_set(
    table: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """AWS is not called, because the region would be wrong."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)
    status, _, err = typed(capsys, "list", "--table", table)
    assert (status, "no AWS region is set: export AWS_REGION" in err) == (2, True)


def test_without_the_libraries_of_the_cloud_it_says_what_to_install() -> None:
    """The plain installation has none of them."""
    code = """
import sys
sys.modules["boto3"] = None
from tidemill.cli.main import main
print([main(["keys", *typed]) for typed in (["list"], ["create", "--name", "x"], ["revoke", "x"])])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[1, 1, 1]\n"
    assert done.stderr.count(f" -e '{ROOT}[cloud]'\n") == 3
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["", " ", "a ", "x" * 101, "a\nb", "a\tb", "\x1b[31m"])
@pytest.mark.parametrize("flag", ["--name", "--tenant"])
def test_a_name_that_cannot_be_listed_is_refused(
    capsys: pytest.CaptureFixture[str], flag: str, name: str
) -> None:
    """The exit status is 2, and the error one sentence."""
    assert main(["keys", "create", "--name", "good", "--table", "t", flag, name]) == 2
    assert capsys.readouterr().err.startswith(f"tidemill: {flag}: ")
