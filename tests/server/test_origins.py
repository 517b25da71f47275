"""Cross-site requests and DNS rebinding: refused by a server without keys."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.rig import MODEL, HeldEngine, site
from tidemill.server.app import make_context
from tidemill.server.origins import OriginCheck
from tidemill.server.settings import ServerSettings

CHAT = "/v1/chat/completions"
EVERYWHERE = "0.0.0.0"  # noqa: S104 - nothing listens there


def code(called: str | None = "localhost:8000", origin: str | None = None, **settings: Any) -> str:
    """Return the code of the refusal of a request with these headers; empty where there is none."""
    given = {b"host": called, b"origin": origin}
    headers = [
        (name, value.encode("latin-1")) for name, value in given.items() if value is not None
    ]
    refused = OriginCheck(ServerSettings(**settings)).check({"headers": headers})
    return "" if refused is None else str(refused.code)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "app.localhost:8000",
        "127.0.0.1:8000",
        "127.8.8.8",
        "[::1]:8000",
        "0.0.0.0:8000",
        "192.168.1.5:8000",
        "tidemill",
        "mybox.local:8000",
        "host.docker.internal:8000",
        "localhost.:8000",
        None,
    ],
)
def test_names_that_no_stranger_can_have_are_let_in(host: str | None) -> None:
    """Addresses among them: no DNS is asked for those."""
    assert not code(host)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example:80"],
)
def test_a_name_that_anybody_may_point_here_is_refused(host: str) -> None:
    """DNS rebinding: the page and the server are then one for the browser."""
    assert code(host) == code(host, f"http://{host}") == "host_not_allowed"
    assert code(host, host="::1") == code(host, host="localhost") == "host_not_allowed"


def test_a_name_that_was_given_is_known() -> None:
    """So is any where all were; then also at an address that others reach."""
    assert not code("llm.example:8000", "https://llm.example", allowed_hosts=("LLM.example",))
    assert not code("b.example", allowed_hosts=("*",))
    assert not code("me.example", "http://me.example", host="me.example")
    assert code("b.example", allowed_hosts=("a.example",), host=EVERYWHERE) == "host_not_allowed"


@pytest.mark.parametrize("settings", [{"host": EVERYWHERE}, {"host": "::"}, {"uds": "/s"}])
def test_who_is_reached_by_others_has_any_name(settings: dict[str, Any]) -> None:
    """Containers, SageMaker, and what stands behind a proxy; but no page of a stranger asks it."""
    assert not code("models.example.com", **settings)
    assert code("llm.example", "https://llm.example", **settings) == "origin_not_allowed"
    assert not code("10.0.0.7", "http://10.0.0.7:3000", **settings)


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://203.0.113.5", "null", "", "file://", "http://[x"],
)
def test_a_page_of_a_stranger_is_refused(origin: str) -> None:
    """So is one that hides whose it is."""
    assert code("localhost:8000", origin) == "origin_not_allowed"


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "http://127.0.0.1", "http://[::1]:9", "http://a.localhost"]
)
def test_a_page_of_this_machine_may_ask(origin: str) -> None:
    """On whatever port it is."""
    assert not code("localhost:8000", origin)


def test_origins_that_were_named_may_ask() -> None:
    """Also the one of files, if somebody wants that."""
    assert not code(origin="https://a.example", allowed_origins=("https://A.example/",))
    assert not code(origin="null", allowed_origins=("null",))
    assert not code(origin="https://b.example", allowed_origins=("*",))
    assert code(origin="https://b.example", allowed_origins=("https://a.example",))


def test_with_keys_nothing_is_looked_at() -> None:
    """A page does not know them."""
    assert not code("evil.example", "https://evil.example", api_keys=("k",))


async def test_a_page_of_a_stranger_reaches_no_route_but_the_open_ones() -> None:
    """The refusal says what lets it in; balancers ask under any name."""
    async with site() as place:
        foreign = {"Origin": "https://evil.example"}
        for path in (CHAT, "/v1/files", "/invocations"):
            refused = await place.client.post(path, json={}, headers=foreign)
            assert refused.status_code == 403
            assert "--allowed-origins" in refused.json()["error"]["message"]
        refused = await place.client.get("/metrics", headers={"Host": "evil.example"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed")
        for path in ("/health", "/ping"):
            told = await place.client.get(path, headers={"Host": "balancer.example", **foreign})
            assert told.status_code == 200
        assert not place.engine.asked


def test_what_a_stranger_calls_itself_is_shown_as_text() -> None:
    """Of bounded length, whatever it is."""
    context = make_context(HeldEngine(), (MODEL,), ServerSettings())
    headers = [(b"host", b"x"), (b"origin", b"http://" + b"\xff" * 9_000)]
    refused = OriginCheck(context.settings).check({"headers": headers})
    assert refused is not None
    assert len(refused.message) < 500
