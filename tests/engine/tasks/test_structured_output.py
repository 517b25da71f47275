"""Structured output of the demo model, from body to body: each row satisfies its constraint."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from bench.kernels.schemas import drawn_schema
from tests.long_parameters import with_long
from tidemill.demo import MODEL_PATH
from tidemill.engine.config import EngineConfig
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.load import load_served
from tidemill.protocol.contract import Reply

pytestmark = pytest.mark.usefixtures("proved")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=with_long([0], [1]), ids=["in turn", "ahead"])
def served(request: pytest.FixtureRequest) -> Iterator[Dispatcher]:
    """Return the demo model behind its endpoints, with and without a step in flight."""
    config = EngineConfig(str(MODEL_PATH), dtype="float32", device="cpu", steps_ahead=request.param)
    engine = load_served(config, served_names=("demo",))
    yield engine
    engine.close()


def ask(served: Dispatcher, *bodies: dict[str, Any]) -> list[Reply]:
    """Return the replies to chats that run together."""

    async def together() -> list[Reply]:
        message = {"role": "user", "content": "What is the capital of France?"}
        return await asyncio.gather(
            *(
                served.respond(
                    "/v1/chat/completions", {"messages": [message], **body}, f"req_{number}", 0
                )
                for number, body in enumerate(bodies)
            )
        )

    return asyncio.run(together())


def texts(reply: Reply) -> list[str]:
    """Return the texts of all choices, each of which ended naturally."""
    assert reply.status_code == 200, reply.body
    assert {choice["finish_reason"] for choice in reply.body["choices"]} == {"stop"}
    return [choice["message"]["content"] for choice in reply.body["choices"]]


def test_constraints_of_every_kind_are_satisfied_together(served: Dispatcher) -> None:
    """Independent validators check the results."""
    schema = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    replies = ask(
        served,
        {"response_format": schema, "n": 4, "temperature": 1.5},
        {"response_format": schema, "temperature": 0},
        {"guided_regex": r"[a-c]{2,4}-\d{3}", "n": 4},
        {"guided_choice": ["Oslo", 'é 🙂 "x"\n\\'], "n": 4, "temperature": 2.0},
        {"guided_grammar": 'start: "a" tail\ntail: "(" tail ")" | "b"', "n": 4},
        {"max_tokens": 5},
    )
    for text in texts(replies[0]) + texts(replies[1]):
        Draft202012Validator(PERSON).validate(json.loads(text))
    assert all(re.fullmatch(r"[a-c]{2,4}-\d{3}", text) for text in texts(replies[2]))
    assert set(texts(replies[3])) <= {"Oslo", 'é 🙂 "x"\n\\'}
    assert all(re.fullmatch(r"a\(*b\)*", text) for text in texts(replies[4]))
    assert replies[5].status_code == 200


def test_a_row_does_not_depend_on_other_rows(served: Dispatcher) -> None:
    """It holds even next to rows with the same schema."""
    body = {"guided_json": PERSON, "temperature": 1.0, "seed": 3, "logprobs": True}
    (alone,) = ask(served, body)
    others = [{**body, "seed": seed} for seed in range(10, 30)]
    together, *_ = ask(served, body, *others)
    assert together.body["choices"] == alone.body["choices"]
    assert texts(alone) != texts(ask(served, {**body, "seed": 4})[0])


def test_json_mode_bounds_whitespace(served: Dispatcher) -> None:
    """Although whitespace tokens are most likely, at most one line of it separates other tokens."""
    space = {token: 100 for token in range(800) if served_piece(served, token).isspace()}
    body = {
        "response_format": {"type": "json_object"},
        "logit_bias": {str(token): bias for token, bias in space.items()},
        "max_tokens": 100,
        "n": 4,
    }
    (reply,) = ask(served, body)
    for choice in reply.body["choices"]:
        text = choice["message"]["content"]
        outside = re.sub(r'"(?:[^"\\]|\\.)*"?', '""', text)
        assert not re.search(r"\s{43}", outside), text


def served_piece(served: Dispatcher, token_id: int) -> str:
    """Return a token's text."""
    endpoint = served._endpoints.find("/v1/chat/completions")
    text: str = endpoint._tokenizer.text([token_id])
    return text


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"guided_json": {"type": "object", "properties": {"a": {"not": {}}}}}, None, "/a/not"),
        ({"guided_json": {"minimum": 3, "maximum": 1, "type": "integer"}}, None, "minimum"),
        ({"guided_json": {"$ref": "#"}}, None, "is not a supported constraint"),
        ({"guided_json": {"$ref": "#/$defs/x"}}, None, "x"),
        ({"guided_regex": "(a"}, None, "unclosed"),
        ({"guided_regex": "(?<=a)b"}, None, "look-behind"),
        ({"guided_grammar": "start: nothing"}, None, "nothing"),
        ({"guided_json": {"type": "object"}, "guided_whitespace_pattern": "("}, "guided_json", ""),
    ],
    ids=range(8),
)
def test_an_unsupported_constraint_is_a_400(
    served: Dispatcher, body: dict[str, Any], param: str | None, words: str
) -> None:
    """The error names the field and the reason."""
    (reply,) = ask(served, body)
    error = reply.body["error"]
    assert (reply.status_code, error["param"]) == (400, param or next(iter(body)))
    assert words in error["message"]


def test_a_truncated_output_has_its_finish_reason(served: Dispatcher) -> None:
    """The causes are the length and a stop string inside the output."""
    short, stopped = ask(
        served,
        {"guided_json": PERSON, "max_tokens": 3},
        {"guided_json": PERSON, "stop": ['"age'], "temperature": 0},
    )
    assert short.body["choices"][0]["finish_reason"] == "length"
    choice = stopped.body["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", '"age')
    assert choice["message"]["content"].startswith('{"name"')
    assert "age" not in choice["message"]["content"]


def test_a_complete_output_ends_despite_other_parameters(served: Dispatcher) -> None:
    """`ignore_eos` and `min_tokens` do not extend it beyond the allowed tokens."""
    (reply,) = ask(served, {"guided_choice": ["Oslo"], "ignore_eos": True, "min_tokens": 20})
    assert texts(reply) == ["Oslo"]
    (reply,) = ask(served, {"guided_regex": "a+", "ignore_eos": True, "temperature": 1.0, "n": 3})
    assert all(re.fullmatch("a+", text) for text in texts(reply))


def test_allowed_tokens_and_bad_words_do_not_affect_other_rows(served: Dispatcher) -> None:
    """Only allowed tokens and no bad words are generated; other rows are as they would be alone."""
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "return_token_ids": True}
    [free] = ask(served, greedy)
    assert "Paris" in texts(free)[0]
    allowed = [5, 6, 7]
    held, spared, shaped, again = ask(
        served,
        {**greedy, "allowed_token_ids": allowed},
        {**greedy, "bad_words": ["Paris"]},
        {**greedy, "regex": "[A-Z][a-z]{3,8}", "bad_words": ["Paris"]},
        greedy,
    )
    assert set(held.body["choices"][0]["token_ids"]) <= set(allowed)
    assert "Paris" not in texts(spared)[0]
    assert re.fullmatch("[A-Z][a-z]{3,8}", texts(shaped)[0])
    assert again.body["choices"] == free.body["choices"]


def test_rows_have_a_verdict_on_request() -> None:
    """Each choice has it in an extra field; the rest of the body does not change."""
    config = EngineConfig(str(MODEL_PATH), dtype="float32", device="cpu", proof_rows=True)
    engine = load_served(config, served_names=("demo",))
    schema = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    try:
        held, cut, free = ask(
            engine,
            {"response_format": schema, "n": 2},
            {"response_format": schema, "max_tokens": 2},
            {"max_tokens": 2},
        )
        completion = asyncio.run(
            engine.respond(
                "/v1/completions",
                {"prompt": ["a", "b"], "guided_choice": ["x", "y"], "echo": True},
                "req_1",
                0,
            )
        )
    finally:
        engine.close()
    good = {"holds": True, "by": "jsonschema", "why": None}
    assert held.body["tidemill"] == {"proof": [good, good]}
    (bad,) = cut.body["tidemill"]["proof"]
    assert (bad["holds"], bad["why"].startswith("it is not valid JSON")) == (False, True)
    assert "tidemill" not in free.body
    assert [one["holds"] for one in completion.body["tidemill"]["proof"]] == [True, True]


@pytest.mark.long
def test_rows_of_many_schemas_match_their_schemas() -> None:
    """The schemas are random and use every supported keyword; none is refused."""
    config = EngineConfig(str(MODEL_PATH), dtype="float32", device="cpu", proof_rows=True)
    engine = load_served(config, served_names=("demo",))
    bodies = [{"guided_json": drawn_schema(seed), "seed": seed} for seed in range(300)]
    try:
        replies = ask(engine, *bodies)
    finally:
        engine.close()
    assert {reply.status_code for reply in replies} == {200}
    ended = [one.body for one in replies if one.body["choices"][0]["finish_reason"] == "stop"]
    assert len(ended) > 290
    assert [body for body in ended if not body["tidemill"]["proof"][0]["holds"]] == []
