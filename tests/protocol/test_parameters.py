"""Unknown parameters are found in a body, and similar known ones are suggested."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.protocol.parameters import WITHOUT_EFFECT, find_parameters, unknown_parameters
from tidemill.protocol.requests import neutral_values, request_types
from tidemill.protocol.routes import ROUTES, Route

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_every_field_and_every_refused_or_ignored_parameter_is_known(route: Route) -> None:
    """They are fields of request types, refused parameters, and ones without effect."""
    kinds = request_types(route)
    names = [*WITHOUT_EFFECT, *(name for kind in kinds for name in kind.model_fields)]
    names += [name for kind in kinds for name in neutral_values(kind)]
    assert not unknown_parameters(route.name, dict.fromkeys(names))


@pytest.mark.parametrize(
    ("url", "body", "unknown"),
    [
        (CHAT, {"messages": [], "temprature": 1, "": 2}, ["temprature", ""]),
        ("/chat/completions", {"no_stop_trim": True, "extra_body": {}}, ["extra_body"]),
        (CHAT, {"chat_template_kwargs": {"any": 1}, "messages": [{"rôle": 1}]}, []),
        (CHAT, {"input": "x", "messages": []}, ["input"]),
        ("/v1/embeddings", {"input": "x", "max_tokens": 5}, ["max_tokens"]),
        ("/api/v1/score", {"query": "x", "documents": [], "top_n": 1}, []),
        ("/v1/audio/translations", {"timestamp_granularities[]": []}, []),
        ("/v1/nothing", {"temprature": 1}, []),
        (CHAT, {"stream_options": {"usage": True}}, ["stream_options.usage"]),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "shema": {}}}},
            ["response_format.json_schema.shema"],
        ),
        (CHAT, {"response_format": {"type": "structural_tag", "structures": []}}, []),
        (CHAT, {"response_format": "json", "stream_options": [1]}, []),
    ],
)
def test_unknown_names_come_in_the_order_of_the_body(
    url: str, body: dict[str, Any], unknown: list[str]
) -> None:
    """Aliases are known; objects for templates and unknown URLs are skipped."""
    assert list(unknown_parameters(url, body)) == unknown


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("maxTokens", "max_tokens"),
        ("max_output_tokens", "max_tokens"),
        ("response_format.jsonschema", "response_format.json_schema"),
        ("response_format.json_schema.shema", "response_format.json_schema.schema"),
        ("enable_thinking", "chat_template_kwargs"),
        ("think", "chat_template_kwargs"),
        ("extra_body", "chat_template_kwargs"),
        ("best_off", None),
        ("input", None),
        ("", None),
    ],
)
def test_a_similar_name_is_suggested(name: str, meant: str | None) -> None:
    """A parameter that would be refused is never suggested."""
    known = find_parameters(CHAT)
    assert known is not None
    assert known.nearest(name) == meant
