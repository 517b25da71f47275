"""What a server says of itself: at its address, and when it begins to listen."""

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
def test_three_lines_ask_for_what_the_model_can_do(endpoints: tuple[str, ...], call: str) -> None:
    """They are a program, whatever the model is called."""
    lines = sdk_example(URL, 'a "b"', endpoints, NO_KEY)
    assert len(lines) == 3
    ast.parse("\n".join(lines))
    assert call in lines[2]
    assert f'base_url="{URL}/v1"' in lines[1]


def test_commands_need_no_key_where_there_is_none() -> None:
    """So none is named."""
    assert "TIDEMILL_API_KEY" not in guide_text(URL, "m", (), NO_KEY)
    assert f"TIDEMILL_BASE_URL={URL} TIDEMILL_API_KEY=k" in guide_text(URL, "m", (), "k")


async def test_the_address_itself_is_a_page() -> None:
    """With the address that was asked, the model and the routes."""
    async with site() as server:
        found = await server.client.get("/")
    assert found.status_code == 200
    assert found.headers["content-type"].startswith("text/plain")
    assert MODEL in found.text
    assert re.search(r'base_url="http://127.0.0.1:\d+/v1"', found.text)


async def test_who_has_no_key_is_told_the_way_and_no_model() -> None:
    """The page needs no key, and names none."""
    async with site(api_keys=("sk-secret",)) as server:
        found = await server.client.get("/")
    assert found.status_code == 200
    assert MODEL not in found.text
    assert "sk-secret" not in found.text
    assert "YOUR_KEY" in found.text
