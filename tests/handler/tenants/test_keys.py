"""Keys: shown once, kept as a hash, good until they are revoked, on each emulator."""

from __future__ import annotations

import hmac
import re
from types import SimpleNamespace
from typing import Any

import pytest

from tests.emulators import Emulator
from tests.handler.intake.rig import Cloud
from tidemill.batch.errors import InvalidOption
from tidemill.handler.aws.calls import Call, Operation, T
from tidemill.handler.errors import AwsError, ConditionFailed
from tidemill.handler.tenants.keys import ApiKey, KeyStore, key_id_of

NOW = 1_800_000_000


@pytest.fixture
def mini(ministack: Emulator) -> Cloud:
    """Return a deployment on one emulator, for what is not about AWS."""
    return Cloud.on(ministack)


def keys_of(cloud: Cloud) -> KeyStore:
    """Return the keys in the deployment's table."""
    return KeyStore(cloud.deployment.table.name)


def create(cloud: Cloud, tenant: str = "default", now: int = NOW) -> str:
    """Return the token of a new key."""
    return cloud.run(keys_of(cloud).create(tenant=tenant, name="laptop", now=now))


def check(cloud: Cloud, token: str) -> ApiKey | None:
    """Return the key that a token is."""
    return cloud.run(keys_of(cloud).check(token))


def calls_of(operation: Operation[T]) -> tuple[list[Call], T]:
    """Return the calls of an operation on an empty table, and its result."""
    calls = []
    try:
        call = next(operation)
        while True:
            calls.append(call)
            call = operation.send({})
    except StopIteration as stop:
        result: T = stop.value
        return calls, result


def all_items(cloud: Cloud) -> list[dict[str, Any]]:
    """Return everything that the table contains, unchanged."""
    found = cloud.aws.clients["dynamodb"].scan(TableName=cloud.deployment.table.name)
    items: list[dict[str, Any]] = found["Items"]
    return items


def changed(text: str, place: int) -> str:
    """Return a text with another character at a place."""
    place %= len(text)
    other = "0" if text[place] != "0" else "1"
    return text[:place] + other + text[place + 1 :]


def test_a_token_is_the_key_it_was_made_for(files: Cloud) -> None:
    """Its tenant and name come back, and each key is different."""
    ours, theirs = create(files), create(files, "others", NOW + 1)
    key, other = check(files, ours), check(files, theirs)
    assert key is not None
    assert other is not None
    assert (key.tenant, key.name, key.created_at, key.revoked_at) == (
        "default",
        "laptop",
        NOW,
        None,
    )
    assert (other.tenant, other.created_at) == ("others", NOW + 1)
    assert key.id != other.id
    assert key.secret_hash != other.secret_hash


def test_the_table_never_holds_a_secret(files: Cloud) -> None:
    """A reader of the whole table cannot construct a token."""
    token = create(files)
    found = re.fullmatch(r"tm_([0-9a-f]{16})_([\w-]{43})", token)
    assert found is not None
    stored = str(all_items(files))
    assert found[1] in stored
    assert found[2] not in stored


@pytest.mark.parametrize("place", [3, 18, 20, -1])
def test_a_token_with_one_wrong_character_is_refused(files: Cloud, place: int) -> None:
    """It may be in the ID or in the secret."""
    assert check(files, changed(create(files), place)) is None


def test_a_secret_opens_its_own_key_only(files: Cloud) -> None:
    """An ID with the secret of another key is refused."""
    first, second = create(files), create(files)
    assert check(files, f"tm_{key_id_of(first)}_{second[-43:]}") is None


@pytest.mark.parametrize(
    "token",
    [
        "",
        "tm_",
        "sk-0123456789abcdef",
        f"tm_{'0' * 16}_{'a' * 42}",
        f"tm_{'0' * 16}_{'a' * 44}",
        f"tm_{'0' * 16}_{'a' * 43}\n",
        f"tm_{'G' * 16}_{'a' * 43}",
        f"tm_{'٣' * 16}_{'a' * 43}",
        f"tm_{'0' * 16}_{'é' * 43}",
        f"tm_{'0' * 100_000}_{'a' * 43}",
    ],
)
def test_what_has_no_form_of_a_key_costs_no_request(token: str) -> None:
    """The table is not read, for any text of any length."""
    assert calls_of(KeyStore("table").check(token)) == ([], None)


def test_an_unknown_key_costs_one_request() -> None:
    """The id is looked up and nothing else is done."""
    calls, found = calls_of(KeyStore("table").check(f"tm_{'0' * 16}_{'a' * 43}"))
    assert found is None
    assert [call.method for call in calls] == ["get_item"]


@pytest.mark.parametrize("case", ["right", "wrong", "unknown", "revoked", "revoked and wrong"])
def test_every_key_costs_the_same_comparison(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Each costs one read and one comparison in constant time: timing does not reveal IDs."""
    compared: list[tuple[int, int]] = []

    def compare(known: str, given: str) -> bool:
        compared.append((len(known), len(given)))
        return hmac.compare_digest(known, given)

    monkeypatch.setattr(
        "tidemill.handler.tenants.keys.hmac", SimpleNamespace(compare_digest=compare)
    )
    token = create(mini)
    if "revoked" in case:
        mini.run(keys_of(mini).revoke(key_id_of(token), NOW))
    if "wrong" in case:
        token = changed(token, -1)
    if case == "unknown":
        token = f"tm_{'0' * 16}_{'a' * 43}"
    calls: list[str] = []
    send = mini.aws._send
    monkeypatch.setattr(mini.aws, "_send", lambda call: calls.append(call.method) or send(call))
    assert (check(mini, token) is not None) is (case == "right")
    assert (calls, compared) == (["get_item"], [(64, 64)])


def test_a_revoked_key_is_worthless_and_others_are_not(files: Cloud) -> None:
    """It keeps the time of the first revocation, however often that is repeated."""
    token, other = create(files), create(files)
    for now in (NOW + 5, NOW + 9):
        key = files.run(keys_of(files).revoke(key_id_of(token), now))
        assert key is not None
        assert key.revoked_at == NOW + 5
    assert check(files, token) is None
    assert check(files, other) is not None


def test_revoking_a_key_that_is_not_there_makes_none(files: Cloud) -> None:
    """Nothing is written."""
    assert files.run(keys_of(files).revoke("0123456789abcdef", NOW)) is None
    assert all_items(files) == []


def test_keys_are_listed_oldest_first_and_revoked_ones_too(files: Cloud) -> None:
    """The list has all keys, or one tenant's."""
    tokens = [create(files, tenant, NOW - age) for age, tenant in enumerate("aba")]
    files.run(keys_of(files).revoke(key_id_of(tokens[0]), NOW))
    ids = [key_id_of(token) for token in reversed(tokens)]
    assert [key.id for key in files.run(keys_of(files).list_keys())] == ids
    of_a = files.run(keys_of(files).list_keys("a"))
    assert [(key.id, key.revoked_at) for key in of_a] == [(ids[0], None), (ids[2], NOW)]
    assert files.run(keys_of(files).list_keys("c")) == []


@pytest.mark.parametrize("tenant", ["", "a/b", "..", "x" * 65])
def test_a_key_is_for_a_tenant_that_can_have_files(files: Cloud, tenant: str) -> None:
    """Nothing is recorded of any other."""
    with pytest.raises(InvalidOption, match="tenant"):
        create(files, tenant)
    assert files.run(keys_of(files).list_keys()) == []


def test_a_key_is_not_listed_as_a_batch(files: Cloud) -> None:
    """They share a table, but the listing of batches does not see keys."""
    create(files)
    assert files.run(files.deployment.table.list_batches("default", limit=10)) == ([], False)


def test_no_key_takes_the_place_of_another(files: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should an id ever come twice, the second key is not made."""
    monkeypatch.setattr(
        "tidemill.handler.tenants.keys.secrets.token_hex", lambda _: "0123456789abcdef"
    )
    token = create(files)
    with pytest.raises(ConditionFailed):
        create(files, "others")
    key = check(files, token)
    assert key is not None
    assert key.tenant == "default"


def test_a_failing_table_is_an_error(ministack: Emulator) -> None:
    """A key is not treated as unknown when the table could not be read."""
    cloud = Cloud.on(ministack)
    with pytest.raises(AwsError):
        cloud.run(KeyStore("no-such-table").check(f"tm_{'0' * 16}_{'a' * 43}"))


def test_the_id_is_found_in_a_token() -> None:
    """Any other text is treated as an ID."""
    assert key_id_of(f"tm_{'1' * 16}_{'a' * 43}") == "1" * 16
    assert key_id_of("1" * 16) == "1" * 16
