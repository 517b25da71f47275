"""Authentication against the real table, and the errors for refused requests."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from tests.emulators import Emulator
from tests.handler.api.rig import answer_to, refusal_in, request_of, serving
from tests.handler.intake.rig import Cloud
from tests.handler.tenants.test_oidc import EC_KEY, SETTINGS, Issuer
from tests.handler.tenants.test_oidc import token as signed
from tidemill.handler.api import app
from tidemill.handler.tenants import oidc
from tidemill.handler.tenants.keys import KeyStore, key_id_of
from tidemill.handler.tenants.refusals import REFUSALS_A_MINUTE

UNKNOWN = f"tm_{'0' * 16}_{'a' * 43}"


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
def no_table(monkeypatch: pytest.MonkeyPatch, cloud: Cloud) -> None:
    """Let any look at the table fail the test."""
    del cloud

    def fail(*_: Any) -> Any:
        pytest.fail("AWS was called")

    monkeypatch.setattr(KeyStore, "get", fail)


def keys_of(cloud: Cloud) -> KeyStore:
    """Return the keys of the deployment."""
    return cloud.deployment.keys


def request_with(
    authorization: str | None, path: str = "/dashboard/view/session"
) -> dict[str, Any]:
    """Return a recorded event with another header, by default a request for the session."""
    event = request_of(path)
    del event["headers"]["authorization"]
    if authorization is not None:
        event["headers"]["authorization"] = authorization
    return event


def refused(authorization: str | None) -> str:
    """Return the code with which a header is refused, once the answer is seen to be OpenAI's."""
    status, error = refusal_in(answer_to(request_with(authorization)))
    assert (status, error["type"], error["param"]) == (401, "invalid_request_error", None)
    assert "tidemill keys create" in error["message"]
    code: str = error["code"]
    return code


@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "BEARER {}", "Bearer  {} "])
def test_a_key_lets_its_tenant_in(token: str, form: str, caplog: pytest.LogCaptureFixture) -> None:
    """The key's tenant is let in, and the log names the tenant and the key."""
    with caplog.at_level(logging.INFO, logger="tidemill"):
        answer = answer_to(request_with(form.format(token)))
    assert answer["statusCode"] == 200
    assert "search" in answer["body"] + str(answer["headers"])
    (record,) = caplog.records
    assert (record.getMessage(), vars(record)["tenant"]) == ("request", "search")
    assert vars(record)["key_id"] == key_id_of(token)


def test_a_header_is_found_however_it_is_written(token: str) -> None:
    """API Gateway sends small letters, other gateways may not."""
    event = request_with(None)
    event["headers"]["Authorization"] = f"Bearer {token}"
    assert answer_to(event)["statusCode"] == 200


def test_a_key_is_refused_that_is_unknown_or_wrong_or_revoked(cloud: Cloud, token: str) -> None:
    """The refusal starts with the next request, and does not reveal the cause."""
    assert answer_to(request_with(f"Bearer {token}"))["statusCode"] == 200
    cloud.run(keys_of(cloud).revoke(key_id_of(token), now=2))
    other = cloud.run(keys_of(cloud).create(tenant="search", name="x", now=1))
    wrong = f"tm_{key_id_of(other)}_{token[-43:]}"
    for each in (token, UNKNOWN, wrong):
        assert refused(f"Bearer {each}") == "invalid_api_key"


@pytest.mark.usefixtures("no_table")
@pytest.mark.parametrize(
    ("form", "code"),
    [
        (None, "missing_api_key"),
        ("", "missing_api_key"),
        ("Bearer", "missing_api_key"),
        ("Bearer ", "missing_api_key"),
        ("{}", "missing_api_key"),
        ("Basic {}", "missing_api_key"),
        ("Token {}", "missing_api_key"),
        ("Bearer{}", "missing_api_key"),
        ("Bearer x{}", "invalid_api_key"),
        ("Bearer {}x", "invalid_api_key"),
        ("Bearer {}, Bearer {}", "invalid_api_key"),
    ],
)
def test_a_malformed_key_is_refused_without_reading_the_table(form: str | None, code: str) -> None:
    """The refusal costs nothing, however often it is repeated."""
    assert refused(form and form.format(UNKNOWN, UNKNOWN)) == code


@pytest.mark.usefixtures("no_table")
def test_a_very_long_header_is_refused_at_once() -> None:
    """Nothing is computed over it but its form."""
    assert refused(f"Bearer tm_{'0' * 1_000_000}") == "invalid_api_key"


@pytest.mark.usefixtures("no_table")
def test_of_strangers_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """No body or parameter is read: the reply to nonsense is that the key is missing."""
    monkeypatch.setattr(app.BodyReader, "_get_body", lambda *_: pytest.fail("the body was read"))
    event = request_of("/v1/batches", "POST", "limit=none") | {"body": "{" * 100}
    del event["headers"]["authorization"]
    assert refusal_in(answer_to(event))[1]["code"] == "missing_api_key"
    event["requestContext"]["http"]["method"] = "GET"
    assert refusal_in(answer_to(event))[1]["code"] == "missing_api_key"


def test_a_table_that_fails_is_an_error_and_no_refusal(cloud: Cloud, token: str) -> None:
    """A 500 comes again; a refusal would be believed."""
    cloud.aws.clients["dynamodb"].delete_table(TableName=cloud.deployment.table.name)
    answer = answer_to(request_with(f"Bearer {token}"))
    assert refusal_in(answer)[0] == 500
    assert token[-43:] not in str(answer)


def test_a_refusal_is_logged_without_the_key(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    """The log shows that a key was refused, but not the key."""
    del cloud
    with caplog.at_level(logging.INFO, logger="tidemill"):
        refused(f"Bearer {UNKNOWN}")
    [record] = caplog.records
    assert record.getMessage() == "key refused"
    assert vars(record)["address"] == "192.0.2.1"


def test_a_wrong_key_costs_one_read(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated key costs one read; after many refusals its address must wait, others need not."""
    reads: list[Any] = []
    get = KeyStore.get

    def note(store: KeyStore, key: Any) -> Any:
        reads.append(key)
        return get(store, key)

    monkeypatch.setattr(KeyStore, "get", note)
    monkeypatch.setattr(app.time, "time", lambda: 60.0 * 1_000_000 + 18)
    token = cloud.run(keys_of(cloud).create(tenant="search", name="x", now=1))
    assert answer_to(request_with(f"Bearer {token}"))["statusCode"] == 200
    num_reads = len(reads)
    for _ in range(REFUSALS_A_MINUTE):
        assert refused(f"Bearer {UNKNOWN}") == "invalid_api_key"
    assert len(reads) == num_reads + 1

    # A right key that this process has not seen yet is let in, another one refused.
    unseen = cloud.run(keys_of(cloud).create(tenant="ads", name="x", now=1))
    assert answer_to(request_with(f"Bearer {unseen}"))["statusCode"] == 200
    other = f"tm_{'1' * 16}_{'a' * 43}"
    assert refused(f"Bearer {other}") == "invalid_api_key"
    num_reads = len(reads)
    answer = answer_to(request_with(f"Bearer {other}"))
    status, error = refusal_in(answer)
    assert (status, error["type"], error["code"]) == (
        429,
        "rate_limit_error",
        "rate_limit_exceeded",
    )
    assert answer["headers"]["Retry-After"] == "42"
    assert refusal_in(answer_to(request_with(f"Bearer {other}x")))[0] == 429
    assert len(reads) == num_reads

    assert answer_to(request_with(f"Bearer {token}"))["statusCode"] == 200
    elsewhere = request_with(f"Bearer tm_{'2' * 16}_{'a' * 43}")
    elsewhere["requestContext"]["http"]["sourceIp"] = "192.0.2.2"
    assert refusal_in(answer_to(elsewhere))[0] == 401


@pytest.fixture
def issuer(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Issuer:
    """Let the deployment accept tokens of an issuer in addition to keys."""
    del cloud
    issuer = Issuer(one=EC_KEY)
    monkeypatch.setenv("TIDEMILL_OIDC", json.dumps(asdict(SETTINGS)))
    monkeypatch.setattr(oidc, "fetch_json", issuer.fetch)
    return issuer


@pytest.mark.usefixtures("issuer")
def test_a_token_is_accepted_in_addition_to_keys(
    token: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The token's subject is logged; keys still work on the same paths."""
    with caplog.at_level(logging.INFO, logger="tidemill"):
        answer = answer_to(request_with(f"Bearer {signed()}"))
    assert (answer["statusCode"], "search" in answer["body"]) == (200, True)
    [record] = (it for it in caplog.records if it.getMessage() == "request")
    assert (vars(record)["tenant"], vars(record)["subject"]) == ("search", "u-1")
    assert answer_to(request_with(f"Bearer {token}"))["statusCode"] == 200
    expired = request_with(f"Bearer {signed(exp=1)}")
    status, error = refusal_in(answer_to(expired))
    assert (status, error["code"]) == (401, "invalid_api_key")
    assert error["message"] == "The token is refused: it has expired."
    status, error = refusal_in(answer_to(expired))
    assert status == 401
    assert error["message"] == "The token was refused a moment ago: send a new one."


def test_without_its_issuer_a_token_waits(issuer: Issuer, token: str) -> None:
    """The request is not refused for that, and keys need no issuer."""
    issuer.is_down = True
    answer = answer_to(request_with(f"Bearer {signed()}"))
    status, error = refusal_in(answer)
    assert (status, error["type"], error["code"]) == (503, "server_error", "issuer_unavailable")
    assert answer["headers"]["Retry-After"] == "5"
    assert answer_to(request_with(f"Bearer {token}"))["statusCode"] == 200


@pytest.mark.usefixtures("no_table")
def test_a_token_is_refused_without_a_configured_issuer() -> None:
    """Only the form of keys is accepted."""
    assert refused(f"Bearer {signed()}") == "invalid_api_key"
