"""URLs and their endpoints."""

from __future__ import annotations

import pytest

from tidemill.protocol.routes import ROUTES, find_route


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/completions", "/v1/completions"),
        ("/completions", "/v1/completions"),
        ("/v1/embeddings", "/v1/embeddings"),
        ("/embeddings", "/v1/embeddings"),
        ("/score", "/v1/score"),
        ("/v1/score", "/v1/score"),
        ("/api/v1/score", "/v1/score"),
        ("/rerank", "/v1/rerank"),
        ("/v1/rerank", "/v1/rerank"),
        ("/v2/rerank", "/v1/rerank"),
        ("/classify", "/v1/classify"),
        ("/moderations", "/v1/moderations"),
        ("/pooling", "/pooling"),
        ("/v1/pooling", "/pooling"),
        ("/v1/audio/transcriptions", "/v1/audio/transcriptions"),
        ("/v1/audio/translations", "/v1/audio/translations"),
    ],
)
def test_a_url_has_one_endpoint(url: str, name: str) -> None:
    """Some match exactly, others by suffix."""
    assert [route.name for route in ROUTES if route.matches(url)] == [name]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/",
        "/v1/chat/completions/",
        "/v2/chat/completions",
        "/api/v1/completions",
        "v1/completions",
        "/v1/Completions",
        "/scorecard",
        "/score/",
        "/rerank/",
        "/audio/translations",
        "/v1/edits",
    ],
)
def test_other_urls_have_none(url: str) -> None:
    """A trailing slash or another prefix makes a different URL."""
    assert find_route(url) is None
