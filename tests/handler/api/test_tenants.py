"""Two tenants and every route: nothing of one can be seen, changed or guessed by the other."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from tests.emulators import Emulator
from tests.handler.api.rig import URL, Gateway, serving
from tests.handler.api.routes import (
    OF_ALL,
    OF_ONE,
    TAKING_IDS,
    TENANTLESS,
    Call,
    all_routes,
    path_with,
)
from tests.handler.intake.rig import Cloud, lines_of
from tidemill.batch.progress import HistoryBucket
from tidemill.batch.states import Status
from tidemill.handler.tenants.keys import KeyStore, key_id_of

SECRET = "theirs-and-not-yours"
NEVER = {
    "batch_id": f"batch_{'0' * 32}",
    "file_id": f"file-{'0' * 32}",
    "upload_id": f"upload_{'0' * 32}",
    "part_id": f"part_{'0' * 32}",
}
# What differs between two answers that say the same.
CHANGING = {"date", "x-request-id", "server-timing", "content-length"}


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant with a thing of each kind, and a client with its key."""

    http: httpx.Client
    ids: Mapping[str, str]

    def call(self, route: str, ids: Mapping[str, str], **more: Any) -> httpx.Response:
        """Call a route with these ids."""
        method, path = path_with(route, ids)
        call = OF_ONE.get(route) or OF_ALL.get(route) or Call()
        return self.http.request(method, path, **(call.arguments(ids) | more))


@pytest.fixture(scope="module")
def cloud(ministack: Emulator) -> Iterator[Cloud]:
    """Return a deployment for all tests of this module: it grows, and nothing may leak still."""
    deployed = Cloud.on(ministack, erase_batches="1")
    with pytest.MonkeyPatch.context() as patch, serving(deployed) as cloud:
        # All wrong keys of these tests come from one address.
        for limit in ("REFUSALS_A_MINUTE", "LOOKED_UP_REFUSALS_A_MINUTE"):
            patch.setattr(f"tidemill.handler.tenants.refusals.{limit}", 10_000)
        yield cloud


def tenant_with_things(cloud: Cloud, http: httpx.Client, name: str, words: str) -> Tenant:
    """Return a tenant that has a file, an upload with a part, and a batch that runs."""
    keys = KeyStore(cloud.deployment.table.name)
    token = cloud.run(keys.create(tenant=name, name=words, now=1))
    http.headers["Authorization"] = f"Bearer {token}"

    def made(path: str, **body: Any) -> str:
        answer = http.post(path, **body)
        assert answer.status_code == 200, answer.text
        found: str = answer.json()["id"]
        return found

    form = {"files": {"file": (f"{words}.jsonl", lines_of(5))}, "data": {"purpose": "batch"}}
    file_id = made("/v1/files", **form)
    upload = {"bytes": 9, "filename": words, "purpose": "batch"}
    upload_id = made("/v1/uploads", json=upload)
    part_id = made(f"/v1/uploads/{upload_id}/parts", files={"data": ("x", b"123456789")})
    request = {"input_file_id": file_id, "endpoint": "/v1/chat/completions"}
    batch_id = made("/v1/batches", json=request | {"metadata": {"about": words}})
    batch = cloud.ingest(cloud.batch(batch_id))
    assert batch.status is Status.IN_PROGRESS
    cloud.run(cloud.deployment.ledger.add_history(batch, HistoryBucket(1020, 60, 3)))
    ids = {"file_id": file_id, "upload_id": upload_id, "part_id": part_id, "batch_id": batch_id}
    return Tenant(http, ids)


@pytest.fixture(scope="module")
def tenants(cloud: Cloud) -> Iterator[tuple[Tenant, Tenant]]:
    """Return us and them."""
    with (
        httpx.Client(transport=Gateway(), base_url=URL) as ours,
        httpx.Client(transport=Gateway(), base_url=URL) as theirs,
    ):
        yield (
            tenant_with_things(cloud, ours, "us", "ours"),
            tenant_with_things(cloud, theirs, "them", SECRET),
        )


def visible(answer: httpx.Response, ids: Mapping[str, str]) -> tuple[int, dict[str, str], str]:
    """Return everything that a client can learn from a reply, without the IDs that it sent."""
    text = answer.text
    for name, each in ids.items():
        text = text.replace(each, name)
    headers = {name: each for name, each in answer.headers.items() if name not in CHANGING}
    return answer.status_code, headers, as_it_stands(text)


def as_it_stands(text: str) -> str:
    """Return an answer without what changes as time passes."""
    return re.sub(r'"(seconds|eta_at|rows_per_second|tokens_per_second)":[^,}]+', "", text)


def things_of(tenant: Tenant) -> list[tuple[int, dict[str, str], str]]:
    """Return all that a tenant can see of what is its own."""
    shown = [
        tenant.call(route, tenant.ids)
        for route in OF_ONE
        if route.startswith("GET ") and not re.search("content|link|view|results", route)
    ]
    return [visible(answer, {}) for answer in shown]


def test_every_route_is_in_a_table() -> None:
    """A new route must be added to the tables."""
    assert all_routes() == {*OF_ONE, *OF_ALL, *TENANTLESS}


@pytest.mark.parametrize("route", sorted({*OF_ONE, *OF_ALL, *TENANTLESS}))
def test_a_route_serves_whose_things_they_are(
    tenants: tuple[Tenant, Tenant], cloud: Cloud, route: str
) -> None:
    """Otherwise all other tests here would pass for a route that always fails."""
    method, _ = path_with(route, NEVER)
    tenant = tenants[0]
    if method != "GET":
        name = f"owner{re.sub(r'[^A-Za-z]+', '-', route)}"
        with httpx.Client(transport=Gateway(), base_url=URL) as http:
            tenant = tenant_with_things(cloud, http, name, name)
            ended = "DELETE /v1/batches/<batch_id>", "POST /v1/batches/<batch_id>/retry"
            if route in ended:
                tenant.call("POST /v1/batches/<batch_id>/cancel", tenant.ids)
            answer = tenant.call(route, tenant.ids)
    else:
        answer = tenant.call(route, tenant.ids)
    assert answer.status_code in {200, 307}, answer.text


@pytest.mark.parametrize("route", sorted(OF_ONE))
def test_what_is_theirs_is_answered_like_what_never_was(
    tenants: tuple[Tenant, Tenant], route: str
) -> None:
    """404 in the same words, the same headers, and nothing of theirs has changed."""
    us, them = tenants
    before = things_of(them)
    answer = us.call(route, them.ids)
    assert answer.status_code == 404
    assert visible(answer, them.ids) == visible(us.call(route, NEVER), NEVER)
    assert SECRET not in answer.text
    assert things_of(them) == before
    assert before[0][0] == 200


@pytest.mark.parametrize("route", sorted(OF_ALL))
def test_what_is_theirs_is_in_no_answer_of_ours(tenants: tuple[Tenant, Tenant], route: str) -> None:
    """No list, count or form shows it."""
    us, them = tenants
    answer = us.call(route, us.ids)
    assert answer.status_code == 200
    assert SECRET not in answer.text
    for each in them.ids.values():
        assert each not in answer.text


@pytest.mark.parametrize("route", sorted(TAKING_IDS))
def test_another_tenants_id_outside_the_path_is_unknown(
    tenants: tuple[Tenant, Tenant], route: str
) -> None:
    """In `after`, or as the file of a new batch, it gets the same error as an unknown ID."""
    us, them = tenants
    name = TAKING_IDS[route]

    def reply_for(ids: Mapping[str, str]) -> tuple[int, dict[str, str], str]:
        query = {} if route.startswith("POST") else {"params": {"after": ids[name]}}
        return visible(us.call(route, ids, **query), ids)

    assert reply_for(them.ids) == reply_for(NEVER)
    assert reply_for(them.ids)[0] in {400, 404}


def test_parts_of_theirs_are_none_of_ours(tenants: tuple[Tenant, Tenant]) -> None:
    """Our completable upload refuses another tenant's part like an unknown one."""
    us, them = tenants
    route = "POST /v1/uploads/<upload_id>/complete"
    wanted = {"upload_id": us.ids["upload_id"]}
    answers = [
        visible(us.call(route, wanted | {"part_id": ids["part_id"]}), ids)
        for ids in (them.ids, NEVER)
    ]
    assert answers[0] == answers[1]
    assert answers[0][0] in {400, 404}


@pytest.mark.parametrize("key", ["files/them/{file_id}", "input/x.jsonl", "output/x.jsonl"])
def test_no_file_is_reached_by_its_place_in_the_bucket(
    tenants: tuple[Tenant, Tenant], cloud: Cloud, key: str
) -> None:
    """Neither another tenant's file nor a dropped one, also another tenant's, is reached."""
    us, them = tenants
    cloud.put(lines_of(1))
    place = f"s3://{cloud.bucket}/{key.format(**them.ids)}"
    answers = [
        us.http.post("/v1/batches", json={"input_file_id": each, "endpoint": "/v1/completions"})
        for each in (place, f"{place}-never")
    ]
    first, second = (visible(answer, {"place": place}) for answer in answers)
    assert first[0] in {400, 404}
    assert first[2] == second[2].replace("place-never", "place")


def test_an_idempotency_key_is_each_tenants_own(tenants: tuple[Tenant, Tenant]) -> None:
    """The same key of two tenants creates two batches, which do not refer to each other."""
    made = set()
    for tenant in tenants:
        answer = tenant.http.post(
            "/v1/batches",
            json={"input_file_id": tenant.ids["file_id"], "endpoint": "/v1/chat/completions"},
            headers={"Idempotency-Key": "once"},
        )
        assert answer.status_code == 200
        made.add(answer.json()["id"])
    assert len(made) == 2


# Keys

Spoil = Callable[[str], str | None]
WRONG_KEYS: Mapping[str, Spoil] = {
    "none": lambda _: None,
    "empty": lambda _: "",
    "no scheme": lambda token: token,
    "another scheme": lambda token: f"Basic {token}",
    "no token": lambda _: "Bearer ",
    "one letter less": lambda token: f"Bearer {token[:-1]}",
    "one letter more": lambda token: f"Bearer {token}A",
    "another secret": lambda token: f"Bearer {token[:-6]}{'A' * 6}",
    "another id": lambda token: f"Bearer tm_{'0' * 16}{token[19:]}",
    "only the id": lambda token: f"Bearer {token[:19]}",
    "in capitals": lambda token: f"Bearer {token.upper()}",
    "two": lambda token: f"Bearer {token}, Bearer {token}",
    "letters of no alphabet": lambda token: f"Bearer {token[:-1]}\x7f",
    "very long": lambda token: f"Bearer {token * 500}",
    "of OpenAI": lambda _: "Bearer sk-proj-0123456789",
}


@pytest.mark.parametrize("wrong", WRONG_KEYS)
def test_no_route_opens_to_a_key_that_is_none(tenants: tuple[Tenant, Tenant], wrong: str) -> None:
    """Every route refuses a wrong key, even with existing IDs, and does nothing."""
    us, _ = tenants
    before = things_of(us)
    value = WRONG_KEYS[wrong](us.http.headers["Authorization"].removeprefix("Bearer "))
    with httpx.Client(transport=Gateway(), base_url=URL) as http:
        if value is not None:
            http.headers["Authorization"] = value
        stranger = replace(us, http=http)
        for route in sorted(all_routes()):
            answer = stranger.call(route, us.ids)
            assert answer.status_code == 401, route
            assert answer.json()["error"]["code"] in {"missing_api_key", "invalid_api_key"}
    assert things_of(us) == before


def test_no_route_opens_to_a_key_that_was_revoked(cloud: Cloud) -> None:
    """It was right a moment ago."""
    with httpx.Client(transport=Gateway(), base_url=URL) as http:
        tenant = tenant_with_things(cloud, http, "leaver", "leaver")
        token = http.headers["Authorization"].removeprefix("Bearer ")
        keys = KeyStore(cloud.deployment.table.name)
        cloud.run(keys.revoke(key_id_of(token), now=int(time.time())))
        for route in sorted(all_routes()):
            assert tenant.call(route, tenant.ids).status_code == 401, route
