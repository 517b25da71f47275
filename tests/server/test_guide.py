"""A server's guide: the page at its address, and the lines that it prints at the start."""

from __future__ import annotations

import ast
import re

import pytest

from tests.server.rig import MODEL, site
from tidemill.server.guide import NO_KEY, guide_text, sdk_example

URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("endpoints", "call"),
    [
        (("/v1/completions", "/v1/chat/completions"), "chat.completions.create(model="),
        (("/v1/embeddings", "/v1/score"), "embeddings.create(model="),
        (("/v1/score",), "models.list()"),
        ((), "models.list()"),
    ],
)
def test_the_sdk_example_fits_the_models_endpoints(endpoints: tuple[str, ...], call: str) -> None:
    """The lines are a valid program for any model name."""
    lines = sdk_example(URL, 'a "b"', endpoints, NO_KEY)
    assert len(lines) == 3
    ast.parse("\n".join(lines))
    assert call in lines[2]
    assert f'base_url="{URL}/v1"' in lines[1]


def test_commands_have_no_key_for_a_server_without_keys() -> None:
    """They name no key at all."""
    assert "TIDEMILL_API_KEY" not in guide_text(URL, "m", (), NO_KEY)
    assert f"TIDEMILL_BASE_URL={URL} TIDEMILL_API_KEY=k" in guide_text(URL, "m", (), "k")


async def test_the_root_is_a_page() -> None:
    """It shows the address of the request, the model and the routes."""
    async with site() as server:
        found = await server.client.get("/")
    assert found.status_code == 200
    assert found.headers["content-type"].startswith("text/plain")
    assert MODEL in found.text
    assert re.search(r'base_url="http://127.0.0.1:\d+/v1"', found.text)


async def test_clients_without_a_key_see_the_page_without_the_model() -> None:
    """The page needs no key and names no model."""
    async with site(api_keys=("sk-secret",)) as server:
        found = await server.client.get("/")
    assert found.status_code == 200
    assert MODEL not in found.text
    assert "sk-secret" not in found.text
    assert "YOUR_KEY" in found.text
