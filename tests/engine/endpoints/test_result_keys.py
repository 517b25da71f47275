"""Result keys against the engine: equal keys mean equal prompts, constraints and parameters.

Bodies are rendered by the demo model's chat template and tokenizer, and their constraints compiled.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.batch.result_key import ResultKeys
from tidemill.demo import MODEL_PATH, NAME
from tidemill.engine.config import EngineConfig
from tidemill.engine.endpoints.endpoint import Endpoint, RequestMetadata
from tidemill.engine.tasks.generation import endpoints_without_weights
from tidemill.protocol.errors import RequestError
from tidemill.protocol.json_bodies import load_json
from tidemill.protocol.names import name_of_model

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEYS = ResultKeys([NAME, "other"])
DIGEST = "a" * 24

NAMES = st.sampled_from(["city", "day", "e\u0301", "\u00e9", "type"])
TEXTS = st.sampled_from(["", "Hi", "na\u00efve", "nai\u0308ve", "1", "true"])
LEAVES = st.none() | st.booleans() | st.sampled_from([0, 1, 1.0, -0.0, 1e16]) | TEXTS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=4,
)
TYPES = st.sampled_from(["string", "integer", "boolean", "null"])
PROPERTIES = st.dictionaries(
    NAMES,
    st.fixed_dictionaries({"type": TYPES}, optional={"description": TEXTS}),
    min_size=1,
    max_size=3,
)
SCHEMAS = st.fixed_dictionaries(
    {"type": st.just("object"), "properties": PROPERTIES},
    optional={"additionalProperties": st.booleans(), "title": TEXTS, "examples": VALUES},
)
TOOLS = st.builds(
    lambda name, schema, more: {
        "type": "function",
        "function": {"name": name, "parameters": schema, **more},
    },
    st.sampled_from(["weather", "now"]),
    SCHEMAS,
    st.dictionaries(st.sampled_from(["description", "strict", "example"]), LEAVES, max_size=2),
)
ANSWERS = st.fixed_dictionaries(
    {
        "role": st.just("assistant"),
        "content": TEXTS,
        "tool_calls": st.builds(
            lambda arguments: [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "now", "arguments": arguments},
                }
            ],
            st.dictionaries(NAMES, VALUES, max_size=3),
        ),
    }
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": TEXTS})
    | ANSWERS,
    min_size=1,
    max_size=3,
)
SHARED: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from([None, NAME, "other"]),
    "max_tokens": st.sampled_from([None, 1, 5, 5.0, True]),
    "seed": st.sampled_from([None, 0, 0.0, 1]),
    "n": st.sampled_from([None, 1, 2, 1.0]),
    "stop": st.sampled_from([None, "a", ["a"], ["a", "b"], ["b", "a"]]),
    "logit_bias": st.dictionaries(st.sampled_from(["5", "6"]), st.sampled_from([1, 2]), max_size=2),
    "user": TEXTS,
    "metadata": VALUES,
    "guided_json": SCHEMAS,
}
CHATS = st.fixed_dictionaries(
    {"messages": MESSAGES, "temperature": st.sampled_from([0, 0.0])},
    optional=SHARED
    | {
        "tools": st.lists(TOOLS, max_size=2),
        "response_format": SCHEMAS.map(
            lambda schema: {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        ),
        "chat_template_kwargs": st.dictionaries(NAMES, VALUES, max_size=2),
    },
)
PROMPTS = st.fixed_dictionaries(
    {"prompt": TEXTS | st.lists(TEXTS, min_size=1, max_size=2), "temperature": st.just(0)},
    optional=SHARED,
)


@cache
def endpoints() -> Mapping[str, Endpoint[Any, Any, Any]]:
    """Return the endpoints of the demo model by name; only its vocabulary is loaded."""
    loaded = endpoints_without_weights(EngineConfig(str(MODEL_PATH)), None)
    return {endpoint.route.name: endpoint for endpoint in loaded}


def prepared(url: str, body: dict[str, Any]) -> object:
    """Return everything that affects the results of a body, or the error of an invalid one."""
    try:
        model = name_of_model(body, KEYS.served_names)
        prepared_body = endpoints()[url].prepare(body, RequestMetadata(model, f"req_{DIGEST}", 0))
    except RequestError as exc:
        return type(exc)
    return model, [
        (
            sequence.prompt_ids,
            sequence.constraint,
            sequence.sampling,
            sequence.max_tokens,
            sequence.stop_token_ids,
        )
        for sequence in prepared_body.requests
    ]


def reworded(value: Any, draw: Callable[[st.SearchStrategy[Any]], Any], *, nested: bool) -> str:
    """Return JSON of nearly the same value: with another order, type, format or repeated names."""
    if isinstance(value, dict):
        order = draw(st.permutations(sorted(value)))
        pairs = [
            f"{json.dumps(name)}: {reworded(value[name], draw, nested=True)}" for name in order
        ]
        if nested and pairs and draw(st.integers(0, 9)) == 0:
            pairs = [f"{json.dumps(order[-1])}: null", *pairs]  # the last one counts
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(reworded(each, draw, nested=True) for each in value)}]"
    if not nested or draw(st.integers(0, 3)):
        return json.dumps(value)
    if isinstance(value, str):
        form = draw(st.sampled_from(["NFC", "NFD"]))
        return json.dumps(unicodedata.normalize(form, value), ensure_ascii=draw(st.booleans()))
    if value in (0, 1):
        return str(draw(st.sampled_from([f"{value:.0f}", f"{value:.1f}", json.dumps(bool(value))])))
    return json.dumps(value)


@pytest.mark.parametrize(("url", "bodies"), [(CHAT, CHATS), (COMPLETIONS, PROMPTS)])
@given(data=st.data())
def test_equal_keys_mean_equal_prompts_and_constraints(
    url: str, bodies: st.SearchStrategy[dict[str, Any]], data: st.DataObject
) -> None:
    """The bodies differ in order, in types and in nulls."""
    body = data.draw(bodies)
    twin = load_json(reworded(body, data.draw, nested=False).encode())
    twin |= dict.fromkeys(data.draw(st.sets(st.sampled_from(["top_p", "stop", "tools"]))))
    first, second = (KEYS.key_of(url, each, DIGEST) for each in (body, twin))
    assert first is not None
    if first == second:
        assert prepared(url, body) == prepared(url, twin)


@pytest.mark.parametrize(("url", "bodies"), [(CHAT, CHATS), (COMPLETIONS, PROMPTS)])
@given(data=st.data())
def test_the_order_of_parameters_and_fields_without_effect_change_neither_key_nor_prompt(
    url: str, bodies: st.SearchStrategy[dict[str, Any]], data: st.DataObject
) -> None:
    """The default model's name does not change them either."""
    body = data.draw(bodies)
    twin = {name: body[name] for name in data.draw(st.permutations(sorted(body)))}
    twin |= {"user": "another", "metadata": {"a": "b"}, "safety_identifier": "c"}
    if body.get("model") in (None, NAME):
        twin["model"] = data.draw(st.sampled_from([None, NAME]))
    assert KEYS.key_of(url, body, DIGEST) == KEYS.key_of(url, twin, "b" * 24)
    assert prepared(url, body) == prepared(url, twin)


AB = {"a": {"type": "string"}, "b": {"type": "integer"}}
BA = dict(reversed(AB.items()))


@pytest.mark.parametrize(
    "fields",
    [
        lambda properties: {
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "parameters": {"type": "object", "properties": properties},
                    },
                }
            ]
        },
        lambda properties: {
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "f",
                    "schema": {"type": "object", "properties": properties},
                },
            }
        },
    ],
    ids=["tools", "response_format"],
)
def test_schemas_that_differ_in_the_order_of_their_properties_share_no_answer(
    fields: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    """The model gets another prompt, or writes the properties in another order."""
    common = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
    first, second = ({**common, **fields(properties)} for properties in (AB, BA))
    assert prepared(CHAT, first) != prepared(CHAT, second)
    assert KEYS.key_of(CHAT, first, DIGEST) != KEYS.key_of(CHAT, second, DIGEST)
