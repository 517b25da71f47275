"""Bodies of `/v1/decisions` and `/v1/systemone`: an invalid one is named before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.protocol.decisions.openai_body import DecisionRequest
from tidemill.protocol.decisions.systemone_body import SystemOneRequest
from tidemill.protocol.errors import RequestError
from tidemill.protocol.requests import check_request, num_sequences

PREDICATE: dict[str, Any] = {"type": "predicate", "instructions": "Torn?"}
NOUL: dict[str, Any] = {"type": "noul", "instructions": "Torn?"}


def choice(*values: object) -> dict[str, Any]:
    """Return a choice question."""
    return {"type": "choice", "instructions": "x", "choices": [{"value": one} for one in values]}


def score(*labels: object) -> dict[str, Any]:
    """Return a score question."""
    return {"type": "score", "instructions": "x", "levels": [{"label": one} for one in labels]}


def user(*parts: object) -> dict[str, Any]:
    """Return the input of one user message."""
    return {"input": [{"role": "user", "content": [*parts]}]}


def decision(**fields: Any) -> DecisionRequest:
    """Return a checked request to `/v1/decisions`."""
    body = {"input": "It is torn.", "questions": [PREDICATE], **fields}
    request = check_request("/v1/decisions", body, None)
    assert isinstance(request, DecisionRequest)
    return request


def system_one(*, question: Any = NOUL, **fields: Any) -> SystemOneRequest:
    """Return a checked request to `/v1/systemone`."""
    body = {"state": "It is torn.", "questions": {"q": question}, **fields}
    request = check_request("/v1/systemone", body, None)
    assert isinstance(request, SystemOneRequest)
    return request


def deep(depth: int) -> list[Any]:
    """Return nested lists."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


DECISIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"questions": []}, "questions", "must not be empty"),
    ({"questions": {"a": PREDICATE}}, "questions", "must be a list"),
    ({"questions": [PREDICATE] * 401}, "questions", "more than 400 items"),
    ({"questions": ["x"]}, "questions.0", "must be an object"),
    ({"questions": [{"instructions": "x"}]}, "questions.0.type", "is required"),
    ({"questions": [PREDICATE | {"type": "rank"}]}, "questions.0.type", "'choice' or 'score'"),
    ({"questions": [{"type": "predicate"}]}, "questions.0.instructions", "is required"),
    ({"questions": [PREDICATE | {"instructions": " "}]}, "questions.0.instructions", "empty"),
    ({"questions": [PREDICATE | {"choices": []}]}, "questions.0.choices", "unknown parameter"),
    ({"questions": [choice("a", "b") | {"seed": 1}]}, "questions.0.seed", "unknown parameter"),
    ({"questions": [choice()]}, "questions.0.choices", "at least 2"),
    ({"questions": [choice("a")]}, "questions.0.choices", "at least 2"),
    ({"questions": [choice("a", "b", "a")]}, "questions.0.choices", "'a' occurs twice."),
    ({"questions": [choice(*[True] * 2)]}, "questions.0.choices", "true occurs twice"),
    ({"questions": [choice("a", "")]}, "questions.0.choices.1.value", "must not be empty"),
    ({"questions": [choice("a", " ")]}, "questions.0.choices.1.value", "must not be blank"),
    ({"questions": [choice("a", 1)]}, "questions.0.choices.1.value", "string"),
    ({"questions": [choice(*map(str, range(10_000)))]}, "questions.0.choices", "items; got 10,000"),
    ({"questions": [choice("a", "\ud800")]}, "questions.0.choices.1.value", "surrogates"),
    ({"questions": [score("a")]}, "questions.0.levels", "at least 2"),
    ({"questions": [score("a", "a")]}, "questions.0.levels", "occurs twice"),
    ({"input": ""}, "input", "must not be empty"),
    ({"input": []}, "input", "must not be empty"),
    ({"input": [{"role": "user", "content": []}]}, "input", "must not be empty"),
    ({"input": {"a": 1}}, "input", "a string or a list of items"),
    ({"input": "\ud800"}, "input", "surrogates"),
    ({"input": [{"type": "reasoning"}]}, "input.0.type", "'message'"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "'assistant'"),
    (
        {"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]},
        "input.0.call_id",
        "not the ID of an earlier call",
    ),
    (
        {"input": [{"type": "custom_tool_call", "call_id": "a", "name": "f"}]},
        "input.0.input",
        "is required",
    ),
    (user({"type": "input_file"}), "input.0.content.0.type", "'input_image'"),
    (user({"type": "input_json", "data": 1}), "input.0.content.0.data", "an object or a list"),
    (user({"type": "input_json", "data": ["\ud800"]}), "input.0.content.0.data", "surrogates"),
    (
        user({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}),
        "input.0.content.0.type",
        "recordings and files are not supported; got 'input_audio'.",
    ),
    (
        user({"type": "input_image", "image_url": "ftp://x"}),
        "input.0.content.0.image_url",
        "http",
    ),
    ({"debias": 0}, "debias", "greater than or equal to 1"),
    ({"debias": 65}, "debias", "less than or equal to 64"),
    ({"debias": 1.5}, "debias", "integer"),
    ({"questions": [choice(*map(str, range(255)))] * 40, "debias": 64}, "questions", "options"),
    ({"question_layout": "x"}, "question_layout", "'questions_first'"),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs", "thinking"),
    ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs", "thinking"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "reserved"),
    ({"temperature": 0.5}, "temperature", "not supported"),
    ({"images": ["data:image/png;base64,AAAA"]}, "images", "not supported"),
]
SYSTEM_ONE: list[tuple[dict[str, Any], str, str]] = [
    ({"state": ""}, "state", "must not be empty"),
    ({"state": {"a": "\ud800"}}, "state", "surrogates"),
    ({"state": deep(200)}, "state", "nested too deeply: the limit is 200 levels"),
    ({"questions": {}}, "questions", "must not be empty"),
    ({"questions": [NOUL]}, "questions", "must be an object"),
    ({"questions": {"": NOUL}}, "questions", "an empty name"),
    ({"questions": {str(i): NOUL for i in range(401)}}, "questions", "more than 400 items"),
    ({"question": {"type": "noul"}}, "questions.q.instructions", "is required"),
    ({"question": NOUL | {"instructions": None}}, "questions.q.instructions", "is required"),
    ({"question": NOUL | {"type": "predicate"}}, "questions.q.type", "'noul'"),
    ({"question": NOUL | {"seed": 1}}, "questions.q.seed", "unknown parameter"),
    ({"question": NOUL | {"criteria": {"maybe": "x"}}}, "questions.q.criteria", "`true`"),
    ({"question": NOUL | {"criteria": ["x"]}}, "questions.q.criteria", "`true`"),
    ({"question": NOUL | {"type": "choice"}}, "questions.q.criteria", "an object"),
    ({"question": NOUL | {"type": "choice", "criteria": ["a"]}}, "questions.q.criteria", "object"),
    (
        {"question": NOUL | {"type": "choice", "criteria": dict.fromkeys(map(str, range(256)))}},
        "questions.q.criteria",
        "1 to 255 options; got 256",
    ),
    (
        {"question": NOUL | {"type": "choice", "criteria": {"a": "\ud800"}}},
        "questions.q.criteria",
        "surrogates",
    ),
    ({"question": NOUL | {"type": "score", "criteria": ["a"]}}, "questions.q.criteria", "got 1"),
    ({"question": NOUL | {"type": "score", "criteria": [[], {}]}}, "questions.q.criteria", "list"),
    ({"question": NOUL | {"type": "score", "criteria": ["a", " "]}}, "questions.q.criteria", "emp"),
    ({"question": NOUL | {"type": "score", "criteria": ["a", "a"]}}, "questions.q.criteria", "dis"),
    ({"images": ["x"]}, "images.0", "http"),
    ({"joint": True}, "joint", "not supported"),
    ({"chat_template_kwargs": {"thinking_budget": 9}}, "chat_template_kwargs", "thinking"),
]


@pytest.mark.parametrize(
    ("check", "fields", "param", "words"),
    [(decision, *case) for case in DECISIONS] + [(system_one, *case) for case in SYSTEM_ONE],
)
def test_an_invalid_body_is_named_in_one_sentence(
    check: Any, fields: dict[str, Any], param: str, words: str
) -> None:
    """The error has the place of the fault, as `check` and intake report it."""
    with pytest.raises(RequestError) as raised:
        check(**fields)
    assert raised.value.param == param
    assert f"`{param}`" in raised.value.message or param == "questions"
    assert words in raised.value.message
    assert "\n" not in raised.value.message


def test_a_boolean_is_distinct_from_its_text() -> None:
    """The model reads the text in quotes; all limits are inclusive."""
    [question] = decision(questions=[choice(*[True, "true", "other"])]).parsed_questions
    assert [option.text for option in question.options] == ["true", '"true"', "other"]
    values = [choice(*map(str, range(255)))] * 400
    assert len(decision(questions=values).parsed_questions) == 400


@pytest.mark.parametrize("state", [None, False, 0, 1.5, [], {}, "x", {"a": [1]}, deep(199)])
def test_a_state_is_any_json(state: object) -> None:
    """The model reads a string as it is and all other values as JSON."""
    [text] = system_one(state=state).state_parts
    assert text == state if isinstance(state, str) else isinstance(text, str)


def test_a_large_state_is_the_same_json() -> None:
    """It is printed in pieces, so that other threads run in the meantime."""
    [text] = system_one(state={"a": list(range(20_000)), "é": None}).state_parts
    assert isinstance(text, str)
    assert text.startswith('{"a": [0, 1, ')
    assert text.endswith('19999], "é": null}')


def test_a_choice_of_system_one_may_have_one_option() -> None:
    """Its confidence is the probability of its label, which is how vLLM answers."""
    request = system_one(question=NOUL | {"type": "choice", "criteria": {"heads": None}})
    assert [option.text for option in request.parsed_questions[0].options] == ["heads"]


def test_a_transcript_shows_roles_calls_and_outputs() -> None:
    """The order is that of the items; a lone user message is shown without its role."""
    items = [
        {"role": "user", "content": "Where is it?"},
        {"type": "function_call", "call_id": "a", "name": "track", "arguments": '{"id": 7}'},
        {
            "type": "function_call_output",
            "call_id": "a",
            "output": [{"type": "input_text", "text": "Lost."}],
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    assert decision(input=items).state_parts == [
        'User: Where is it?\n\nCall of track: {"id": 7}\n\nOutput of track: Lost.\n\nAssistant: No.'
    ]
    assert decision(input=items[:1]).state_parts == ["Where is it?"]


def test_every_read_counts_as_a_sequence() -> None:
    """A request of many questions waits for others like many requests."""
    assert num_sequences({"input": "x", "questions": [PREDICATE] * 40, "debias": 4}) == 160
    assert num_sequences({"state": "x", "questions": {"a": NOUL, "b": NOUL}}) == 2
    assert num_sequences({"questions": "x", "debias": 10**9}) == 1
