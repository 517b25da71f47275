"""Structured output with OpenAI's client, in OpenAI's, vLLM's and SGLang's documented forms."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tidemill import demo

CHAT: dict[str, Any] = {
    "model": demo.NAME,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 120,
    "temperature": 0,
}


class Town(BaseModel):
    """The schema of an answer."""

    country: Literal["France", "Norway"]
    inhabitants: int = Field(ge=0, le=999)
    is_capital: bool


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "population": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "population"],
    "additionalProperties": False,
}
EBNF = """
root ::= city | description
city ::= "London" | "Paris" | "Berlin" | "Rome"
description ::= city " is " status
status ::= "the capital of " country
country ::= "England" | "France" | "Germany" | "Italy"
"""


def is_town(text: str) -> bool:
    """Say whether a text is JSON that the schema above allows."""
    value = json.loads(text)
    return (
        set(value) == {"name", "population"}
        and re.fullmatch("[A-Z][a-z]{1,8}", value["name"]) is not None
        and 0 <= value["population"] <= 999
    )


def is_sentence(text: str) -> bool:
    """Say whether a text matches the grammar above."""
    cities, countries = "London|Paris|Berlin|Rome", "England|France|Germany|Italy"
    return re.fullmatch(f"({cities})( is the capital of ({countries}))?", text) is not None


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "town", "schema": SCHEMA}}
FORMS: list[tuple[str, dict[str, Any], Any]] = [
    ("a schema of OpenAI's", {"response_format": JSON_SCHEMA}, is_town),
    ("any object", {"response_format": {"type": "json_object"}, "max_tokens": 400}, None),
    ("SGLang's json_schema", {"json_schema": json.dumps(SCHEMA)}, is_town),
    ("SGLang's regex", {"regex": "(Paris|London)"}, re.compile("Paris|London").fullmatch),
    ("SGLang's ebnf", {"ebnf": EBNF}, is_sentence),
    ("vLLM's json", {"structured_outputs": {"json": SCHEMA}}, is_town),
    (
        "vLLM's regex",
        {"structured_outputs": {"regex": r"\w{3}\d"}},
        re.compile(r"\w{3}\d").fullmatch,
    ),
    (
        "vLLM's choice",
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"yes", "no"}.__contains__,
    ),
    ("vLLM's grammar", {"structured_outputs": {"grammar": EBNF}}, is_sentence),
    ("guided_json", {"guided_json": SCHEMA}, is_town),
    ("guided_regex", {"guided_regex": "[ab]{4}"}, re.compile("[ab]{4}").fullmatch),
    ("guided_choice", {"guided_choice": ["x", "y"]}, {"x", "y"}.__contains__),
    ("guided_grammar", {"guided_grammar": EBNF}, is_sentence),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("fields", "holds"), [form[1:] for form in FORMS], ids=[form[0] for form in FORMS]
)
def test_an_answer_has_the_requested_form(
    client: openai.OpenAI, fields: dict[str, Any], holds: Any, *, stream: bool
) -> None:
    """Whole and streamed, it has the form and then ends."""
    request = {**CHAT, "extra_body": fields}
    if stream:
        with client.chat.completions.stream(**request) as events:
            answer = events.get_final_completion()
    else:
        answer = client.chat.completions.create(**request)
    [choice] = answer.choices
    if holds is None:
        # For any object a tiny model may never reach the end: then only the beginning is valid.
        assert (choice.message.content or "").lstrip().startswith("{")
        return
    assert choice.finish_reason == "stop"
    assert holds(choice.message.content)


def test_structural_tags_leave_free_text_alone(client: openai.OpenAI) -> None:
    """SGLang's older form and XGrammar's are accepted; the content of a tag follows its schema."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
    older = {
        "type": "structural_tag",
        "structures": [{"begin": "<function=weather>", "schema": schema, "end": "</function>"}],
        "triggers": ["<function="],
    }
    tag = {
        "type": "tag",
        "begin": "<function=weather>",
        "content": {"type": "json_schema", "json_schema": schema},
        "end": "</function>",
    }
    newer = {"type": "structural_tag", "format": {**tag, "begin": "<weather>", "end": "</weather>"}}
    [free] = client.chat.completions.create(**CHAT, extra_body={"response_format": older}).choices
    assert free.message.content == "Paris"
    [held] = client.chat.completions.create(**CHAT, extra_body={"response_format": newer}).choices
    text = held.message.content or ""
    assert text.startswith("<weather>")
    assert text.endswith("</weather>")
    assert json.loads(text.removeprefix("<weather>").removesuffix("</weather>"))["city"] == "Paris"


def test_a_text_completion_has_its_form_too(client: openai.OpenAI) -> None:
    """Each prompt's answer has the form."""
    answer = client.completions.create(
        model=demo.NAME,
        prompt=["The tide", "The mill"],
        max_tokens=60,
        extra_body={"regex": "(high|low) (tide|water)"},
    )
    assert all(re.fullmatch("(high|low) (tide|water)", one.text) for one in answer.choices)


def test_an_answer_is_parsed_into_a_pydantic_model(client: openai.OpenAI) -> None:
    """Both names of `parse` work, and `stream` does."""
    for parse in (client.chat.completions.parse, client.beta.chat.completions.parse):
        parsed = parse(**CHAT, response_format=Town).choices[0].message.parsed
        assert isinstance(parsed, Town)
    with client.chat.completions.stream(**CHAT, response_format=Town) as events:
        final = events.get_final_completion()
    assert final.choices[0].message.parsed == parsed


def test_a_truncated_answer_raises_the_clients_exception(client: openai.OpenAI) -> None:
    """It is the client's own error rather than one of JSON."""
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**{**CHAT, "max_tokens": 2}, response_format=Town)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "object", "not": {}}},
                }
            },
            "response_format.json_schema.schema",
        ),
        ({"regex": "("}, "regex"),
        ({"ebnf": "root ::= missing"}, "ebnf"),
        ({"regex": "a", "ebnf": EBNF}, "ebnf"),
        ({"guided_choice": []}, "guided_choice"),
    ],
    ids=["a keyword", "a regex", "a grammar", "two of them", "no choice"],
)
def test_an_unsupported_constraint_is_a_400(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    """The error names the field and the place in it."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**CHAT, extra_body=fields)
    assert (caught.value.param or "").startswith(param)
