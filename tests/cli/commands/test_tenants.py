"""`tidemill tenants`, typed, against a table on an emulator."""

from __future__ import annotations

import base64
import time
from typing import Any

import pytest

from tests.cli.place import cells_of, table_on, typed
from tests.emulators import Emulator
from tidemill.cli.main import main
from tidemill.handler.aws.stores.usage import UsageStore
from tidemill.handler.aws.sync import Aws
from tidemill.handler.tenants.tenants import Tenant, TenantStore

URL = "https://example.com/hooks/batches"


@pytest.fixture
def table(ministack: Emulator, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a table that the environment names."""
    table = table_on(ministack, monkeypatch)
    monkeypatch.setenv("TIDEMILL_TABLE", table)
    return table


def known(emulator: Emulator, table: str, name: str = "search") -> Tenant:
    """Return a tenant as the table has it."""
    return Aws(emulator.client).run(TenantStore(table).find(name))


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """Return what `show` prints."""
    status, out, _ = typed(capsys, "tenants", "show", *arguments)
    assert status == 0
    return dict(cells_of(out))


def test_limits_are_set_and_taken_back(
    ministack: Emulator, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other settings stay; 0 means no limit, `default` the deployment's limit."""
    everything = ("--requests-per-day", "9", "--queued-lines", "0", "--bytes-per-day", "7")
    everything += ("--gpu-hours-per-day", "3")
    usage = UsageStore(table)
    Aws(ministack.client).run(usage.add_gpu_seconds("search", 1800, time.time()))
    status, out, err = typed(capsys, "tenants", "set", "search", *everything)
    assert (status, out) == (0, "")
    assert "search was changed" in err
    typed(capsys, "tenants", "set", "search", "--requests-per-day", "default")
    tenant = known(ministack, table)
    assert tenant == Tenant("search", queued_lines=0, bytes_per_day=7, gpu_hours_per_day=3)
    assert shown(capsys, "search") == {
        "webhook_url": "none",
        "webhook_secret": "none",
        "requests_per_minute": "default",
        "requests_per_day": "default",
        "queued_lines": "0",
        "bytes_per_day": "7",
        "gpu_hours_per_day": "3",
        "gpu_hours_today": "0.50",
    }
    assert known(ministack, table, "ads") == Tenant("ads")


def test_the_first_url_makes_a_secret(
    ministack: Emulator, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the secret is on standard output; `show --secret` prints the same one again."""
    _, out, err = typed(capsys, "tenants", "set", "search", "--webhook-url", URL)
    secret = out.removesuffix("\n")
    assert secret.startswith("whsec_")
    assert len(base64.b64decode(secret.removeprefix("whsec_"), validate=True)) == 32
    assert secret not in err
    assert shown(capsys, "search") | {"webhook_url": URL, "webhook_secret": "set"} == shown(
        capsys, "search"
    )
    assert shown(capsys, "search", "--secret")["webhook_secret"] == secret

    _, out, _ = typed(capsys, "tenants", "set", "search", "--webhook-url", f"{URL}/2")
    assert out == ""
    typed(capsys, "tenants", "set", "search", "--no-webhook")
    tenant = known(ministack, table)
    assert (tenant.webhook_url, tenant.webhook_secret) == (None, secret)


def test_old_and_new_secret_both_sign_for_a_day(
    ministack: Emulator, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Receivers accept all calls while they are updated."""
    now = time.time()
    _, old, _ = typed(capsys, "tenants", "set", "search", "--new-webhook-secret")
    assert known(ministack, table).secrets_at(now) == (old.strip(),)
    _, new, _ = typed(capsys, "tenants", "set", "search", "--new-webhook-secret")
    tenant = known(ministack, table)
    assert tenant.secrets_at(now) == (new.strip(), old.strip())
    assert tenant.secrets_at(now + 24 * 3600 + 60) == (new.strip(),)
    assert new.strip() not in repr(tenant)
    assert old.strip() not in repr(tenant)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no setting was given"),
        (["--webhook-url", "http://example.com"], "must start with https://"),
        (["--webhook-url", ""], "must be an https URL"),
        (["--webhook-url", "https://u:secret@example.com"], "a user name or password"),
    ],
)
def test_what_cannot_be_set_is_refused_in_a_sentence(
    ministack: Emulator,
    table: str,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    """The url is not repeated; nothing is changed."""
    status, out, err = typed(capsys, "tenants", "set", "search", *arguments)
    assert (status, out) == (2, "")
    assert words in err
    assert "secret@" not in err
    assert known(ministack, table) == Tenant("search")


@pytest.mark.parametrize(
    "arguments",
    [
        ["set", "search", "--requests-per-day", "-1"],
        ["set", "search", "--requests-per-day", "1.5"],
        ["set", "search", "--queued-lines", "many"],
        ["set", "search", "--bytes-per-day", "²"],
        ["set", "search", "--bytes-per-day", "9" * 5000],
        ["set", "search", "--webhook-url", URL, "--no-webhook"],
        ["set", "a/b", "--queued-lines", "1"],
        ["set", "-", "--queued-lines", "1"],
        ["show", "x" * 65],
        ["show"],
    ],
)
def test_wrong_arguments_are_wrong_usage(
    capsys: pytest.CaptureFixture[str], arguments: list[Any]
) -> None:
    """The exit status is 2, before any AWS call."""
    assert main(["tenants", *arguments]) == 2
    assert "see `tidemill tenants" in capsys.readouterr().err


def test_a_missing_table_is_reported_in_a_sentence(
    table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is the same as for keys."""
    del table
    for action in (["show"], ["set", "--queued-lines", "1"]):
        status, out, err = typed(capsys, "tenants", *action, "search", "--table", "none")
        assert (status, out) == (1, "")
        assert "the table none cannot be accessed" in err
