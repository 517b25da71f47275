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
    """Return the error code of a request with these headers; empty if it is accepted."""
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
def test_names_that_no_stranger_can_have_are_accepted(host: str | None) -> None:
    """Addresses are accepted too, because they need no DNS."""
    assert not code(host)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example:80"],
)
def test_a_name_that_anyone_may_point_here_is_refused(host: str) -> None:
    """With DNS rebinding the browser considers the page and the server same-origin."""
    assert code(host) == code(host, f"http://{host}") == "host_not_allowed"
    assert code(host, host="::1") == code(host, host="localhost") == "host_not_allowed"


def test_an_allowed_host_is_accepted() -> None:
    """Any host is accepted if all are allowed, also at a public address."""
    assert not code("llm.example:8000", "https://llm.example", allowed_hosts=("LLM.example",))
    assert not code("b.example", allowed_hosts=("*",))
    assert not code("me.example", "http://me.example", host="me.example")
    assert code("b.example", allowed_hosts=("a.example",), host=EVERYWHERE) == "host_not_allowed"


@pytest.mark.parametrize("settings", [{"host": EVERYWHERE}, {"host": "::"}, {"uds": "/s"}])
def test_a_publicly_reachable_server_accepts_any_host(settings: dict[str, Any]) -> None:
    """Containers, SageMaker and proxies need it; a stranger's page is still refused."""
    assert not code("models.example.com", **settings)
    assert code("llm.example", "https://llm.example", **settings) == "origin_not_allowed"
    assert not code("10.0.0.7", "http://10.0.0.7:3000", **settings)


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://203.0.113.5", "null", "", "file://", "http://[x"],
)
def test_a_strangers_page_is_refused(origin: str) -> None:
    """A page with a hidden origin is refused too."""
    assert code("localhost:8000", origin) == "origin_not_allowed"


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "http://127.0.0.1", "http://[::1]:9", "http://a.localhost"]
)
def test_a_page_of_this_machine_is_accepted(origin: str) -> None:
    """Its port does not matter."""
    assert not code("localhost:8000", origin)


def test_allowed_origins_are_accepted() -> None:
    """Even `null`, the origin of local files, can be allowed."""
    assert not code(origin="https://a.example", allowed_origins=("https://A.example/",))
    assert not code(origin="null", allowed_origins=("null",))
    assert not code(origin="https://b.example", allowed_origins=("*",))
    assert code(origin="https://b.example", allowed_origins=("https://a.example",))


def test_origins_are_not_checked_with_keys() -> None:
    """A foreign page does not know the key."""
    assert not code("evil.example", "https://evil.example", api_keys=("k",))


async def test_a_strangers_page_reaches_only_the_open_routes() -> None:
    """The error names the option that allows it; load balancers may use any host name."""
    async with site() as place:
        foreign = {"Origin": "https://evil.example"}
        for path in (CHAT, "/v1/files", "/invocations"):
            refused = await place.client.post(path, json={}, headers=foreign)
            assert refused.status_code == 403
            assert "--allowed-origins" in refused.json()["error"]["message"]
        refused = await place.client.get("/metrics", headers={"Host": "evil.example"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed")
        for path in ("/health", "/ping"):
            answer = await place.client.get(path, headers={"Host": "balancer.example", **foreign})
            assert answer.status_code == 200
        assert not place.engine.requests


def test_a_strangers_headers_are_shown_safely() -> None:
    """They are truncated and escaped."""
    context = make_context(HeldEngine(), (MODEL,), ServerSettings())
    headers = [(b"host", b"x"), (b"origin", b"http://" + b"\xff" * 9_000)]
    refused = OriginCheck(context.settings).check({"headers": headers})
    assert refused is not None
    assert len(refused.message) < 500
