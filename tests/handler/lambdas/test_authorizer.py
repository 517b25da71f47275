"""The authorizer, with a recorded request."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from handler.aws.sync import Aws
from handler.errors import AwsError
from handler.lambdas import authorizer
from handler.tenants.keys import KeyStore, key_id_of
from tests.emulators import Emulator
from tests.handler.api.rig import event_of, judged, serving
from tests.handler.intake.rig import Cloud
from tests.handler.lambdas.logs import said_of

REFUSED = {"isAuthorized": False}


@pytest.fixture
def cloud(ministack: Emulator) -> Iterator[Cloud]:
    """Return a deployment that the environment of this process names."""
    with serving(Cloud.on(ministack)) as cloud:
        yield cloud


@pytest.fixture
def token(cloud: Cloud) -> str:
    """Return a key of the tenant `search`."""
    return cloud.run(keys_of(cloud).create(tenant="search", name="x", now=1))


@pytest.fixture
def no_table(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let any request to AWS fail the test."""
    del cloud

    def fail(*_: Any, **__: Any) -> Any:
        pytest.fail("AWS was asked")

    monkeypatch.setattr(authorizer, "_aws", lambda: Aws(fail))


def keys_of(cloud: Cloud) -> KeyStore:
    """Return the keys of the deployment."""
    return KeyStore(cloud.deployment.table.name)


def asked(authorization: str) -> dict[str, Any]:
    """Return the recorded event with another header."""
    event = event_of("aws_http_authorizer")
    event["headers"]["authorization"] = authorization
    event["identitySource"] = [authorization]
    return event


@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "BEARER {}", "Bearer  {} "])
def test_a_key_lets_its_tenant_in(token: str, form: str) -> None:
    """The API learns whose it is, and the access log which."""
    assert judged(asked(form.format(token))) == {
        "isAuthorized": True,
        "context": {"tenant": "search", "key_id": key_id_of(token)},
    }


def test_a_header_is_found_however_it_is_written(token: str) -> None:
    """API Gateway sends small letters, other gateways may not."""
    event = asked("")
    del event["headers"]["authorization"]
    event["headers"]["Authorization"] = f"Bearer {token}"
    assert judged(event)["isAuthorized"] is True


def test_a_key_is_refused_that_is_unknown_or_wrong_or_revoked(cloud: Cloud, token: str) -> None:
    """The answer does not tell which."""
    cloud.run(keys_of(cloud).revoke(key_id_of(token), now=2))
    other = cloud.run(keys_of(cloud).create(tenant="search", name="x", now=1))
    unknown = f"tm_{'0' * 16}_{'a' * 43}"
    wrong = f"tm_{key_id_of(other)}_{token[-43:]}"
    for refused in (token, unknown, wrong):
        assert judged(asked(f"Bearer {refused}")) == REFUSED


@pytest.mark.usefixtures("no_table")
@pytest.mark.parametrize(
    "form",
    ["", "Bearer", "Bearer ", "{}", "Basic {}", "Token {}", "Bearer{}", "Bearer x{}", "Bearer {}x"],
)
def test_what_is_no_key_is_refused_before_the_table_is_asked(form: str) -> None:
    """It costs nothing, however often it is tried."""
    assert judged(asked(form.format(f"tm_{'0' * 16}_{'a' * 43}"))) == REFUSED


@pytest.mark.usefixtures("no_table")
def test_a_very_long_header_is_refused_at_once() -> None:
    """Nothing is computed over it but its form."""
    assert judged(asked(f"Bearer tm_{'0' * 1_000_000}")) == REFUSED


@pytest.mark.usefixtures("no_table")
@pytest.mark.parametrize("headers", [None, {}, {"authorization": None}])
def test_a_request_without_the_header_is_refused(headers: Any) -> None:
    """API Gateway does not ask then, but may one day."""
    assert judged(event_of("aws_http_authorizer") | {"headers": headers}) == REFUSED


def test_a_table_that_fails_is_an_error_and_no_refusal(cloud: Cloud, token: str) -> None:
    """A 500 comes again; a refusal would be believed, and remembered for a minute."""
    cloud.aws.clients["dynamodb"].delete_table(TableName=cloud.deployment.table.name)
    with pytest.raises(AwsError) as caught:
        judged(asked(f"Bearer {token}"))
    assert token[-43:] not in str(caught.value)


def test_a_refusal_is_logged_without_the_key(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    """Who tries keys is seen; what was tried is not."""
    del cloud
    unknown = f"tm_{'0' * 16}_{'a' * 43}"
    with caplog.at_level(logging.INFO, logger="tidemill"):
        judged(asked(f"Bearer {unknown}"))
    assert [record.getMessage() for record in caplog.records] == ["key refused"]


@pytest.mark.parametrize("case", ["good", "refused", "failing"])
def test_the_callers_key_is_never_logged(cloud: Cloud, token: str, case: str) -> None:
    """Even where the environment asks for events in the log, and when the table fails."""
    sent = token if case == "good" else f"tm_{'0' * 16}_{'a' * 43}"
    table = "none" if case == "failing" else cloud.deployment.table.name
    said = said_of(
        "authorizer", asked(f"Bearer {sent}"), {**cloud.environment, "TIDEMILL_TABLE": table}
    )
    assert sent[-43:] not in said
    expected = {"good": "", "refused": "key refused", "failing": "as Lambda logs"}[case]
    assert expected in said
