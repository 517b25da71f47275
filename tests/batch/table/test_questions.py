"""Questions of tables: their forms, their requests, the errors for invalid ones, and columns."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pytest
from pydantic_core import from_json, to_json

from tidemill.batch.table.errors import RecipeError
from tidemill.batch.table.question_counts import wording_fault
from tidemill.batch.table.questions import TABLE_LAYOUT, question_columns_at_end
from tidemill.batch.table.recipe import Recipe, load_recipe, overridden, parse_recipe
from tidemill.batch.table.request_template import RequestTemplate
from tidemill.batch.table.result_columns import ResultColumns, ResultFacts
from tidemill.batch.table.writer import open_writer
from tidemill.protocol.decisions.openai_body import DecisionRequest
from tidemill.protocol.requests import read_body

ASK = (
    "damaged: Does the customer report damage?",
    "team = billing | shipping: Which team: one?",
    "tone = calm<annoyed<furious: How upset?",
)
QUESTIONS = """
prompt = "{{ text }}"
system = "You read tickets."
question_layout = "row_first"
permutations = 2

[[questions]]
name = "damaged"
instructions = "Does the customer report damage?"

[[questions]]
name = "paid"
type = "choice"
instructions = "Is it paid?"
choices = [true, {value = false, description = "open or disputed"}]

[[questions]]
name = "tone"
instructions = "How upset?"
levels = ["calm", {label = "furious", description = "threatens"}]
"""
USAGE = {"input_tokens": 9, "output_tokens": 0, "total_tokens": 9}


def bodies(recipe: Recipe, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the bodies of the requests of rows, or their errors."""
    template = RequestTemplate(recipe, [*rows[0]])
    cells = {name: [row[name] for row in rows] for name in template.columns}
    lines = [from_json(line) for line in template.lines(cells, len(rows), 1)]
    return [line.get("body", line) for line in lines]


def row_of(*answers: dict[str, Any], mass: float = 0.5, agreement: float | None = None) -> bytes:
    """Return the row of a decision."""
    one = {"name": None, "label_mass": mass, "argmax_is_label": True}
    if agreement is not None:
        one["agreement"] = agreement
    body = {"answers": answers, "usage": USAGE, "diagnostics": [one] * len(answers)}
    response = {"status_code": 200, "request_id": "r", "body": body}
    return to_json({"id": "x", "custom_id": "1", "response": response, "error": None}) + b"\n"


def predicate(probability: float) -> dict[str, Any]:
    """Return the answer to a question for yes or no."""
    return {"type": "predicate", "name": "damaged", "probability": probability}


def choice(*shares: float) -> dict[str, Any]:
    """Return an answer with the probabilities of its options."""
    return {"type": "choice", "probabilities": [{"probability": share} for share in shares]}


FAILED = to_json(
    {"id": "x", "custom_id": "2", "response": None, "error": {"code": "c", "message": "no"}}
)


def test_requests_of_a_batch_file_need_a_prompt() -> None:
    """Their own questions are in their bodies, so asking about all columns is a mistake."""
    columns = ["custom_id", "method", "url", "body"]
    with pytest.raises(RecipeError, match="its rows are requests of a batch file"):
        RequestTemplate(parse_recipe({"ask": ["x: Is it?"]}), columns)
    given = {"ask": ["x: Is it?"], "prompt": "{{ body.input }}"}
    assert RequestTemplate(parse_recipe(given), columns).columns == ("body",)


def test_short_questions_become_a_decision() -> None:
    """Without a prompt, the input is the row without IDs and nulls; its layout is always named."""
    recipe = parse_recipe({"ask": [*ASK], "id": "id"})
    row = {"id": "a", "text": "It broke.", "stars": None, "tags": ["x"], "price": 2.5}
    [body] = bodies(recipe, [row])
    assert body == {
        "input": 'text: It broke.\ntags: ["x"]\nprice: 2.5',
        "questions": [
            {
                "type": "predicate",
                "name": "damaged",
                "instructions": "Does the customer report damage?",
            },
            {
                "type": "choice",
                "name": "team",
                "instructions": "Which team: one?",
                "choices": [{"value": "billing"}, {"value": "shipping"}],
            },
            {
                "type": "score",
                "name": "tone",
                "instructions": "How upset?",
                "levels": [{"label": "calm"}, {"label": "annoyed"}, {"label": "furious"}],
            },
        ],
        "question_layout": TABLE_LAYOUT,
    }
    read_body(DecisionRequest, body)


def test_a_recipe_file_describes_options() -> None:
    """A question's type follows from its options; `system` comes before everything else."""
    recipe = parse_recipe(load_recipe(QUESTIONS))
    [body] = bodies(recipe, [{"text": "It broke."}])
    request = read_body(DecisionRequest, body)
    assert (request.input, request.instructions) == ("It broke.", "You read tickets.")
    assert (request.question_layout, request.debias) == ("row_first", 2)
    assert [question.type for question in request.questions] == ["predicate", "choice", "score"]
    assert body["questions"][1]["choices"] == [
        {"value": True},
        {"value": False, "description": "open or disputed"},
    ]


def test_labels_are_one_choice_over_the_prompt() -> None:
    """Its column is `label`."""
    recipe = parse_recipe({"prompt": "Which team? {{ text }}", "labels": ["billing", "shipping"]})
    [body] = bodies(recipe, [{"text": "It broke."}])
    assert body["input"] == "Which team? It broke."
    [question] = body["questions"]
    assert (question["name"], len(question["choices"])) == ("label", 2)


def test_an_empty_row_is_an_error_of_its_row() -> None:
    """The questions would be about nothing."""
    first, second = bodies(parse_recipe({"ask": ASK[0]}), [{"text": "x"}, {"text": None}])
    assert first["input"] == "text: x"
    assert "all cells of the row are empty" in str(second)


def test_flags_replace_the_questions_of_a_file() -> None:
    """Their other forms go, too; the prompt stays."""
    keys = overridden(load_recipe(QUESTIONS), {"ask": ["x: y?"]})
    assert keys["ask"] == ["x: y?"]
    assert "questions" not in keys
    assert keys["prompt"] == "{{ text }}"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ask": ["damaged Is it?"]}, "has no colon: write 'damaged: Is it?'"),
        ({"ask": ["Is it?"]}, "has no colon: write 'answer: Is it?'"),
        ({"ask": ["team = a|b Which?"]}, "has no colon: put one between the options and"),
        ({"ask": [": Is it?"]}, "has no name: write 'answer: Is it?'"),
        ({"ask": ["x:"]}, "has no instructions"),
        ({"ask": ["x a|b: Which?"]}, "choices without `=` before them: write 'x = a|b: Which?'"),
        ({"ask": ["x = a: Which?"]}, "has one option, but needs two or more: write 'x = a|other:"),
        ({"ask": ["x = a, b: Which?"]}, "to separate several, write 'x = a|b: Which?'"),
        ({"ask": ["x = : Which?"]}, "has no options after `=`"),
        ({"ask": ["x = a|b<c: Which?"]}, "mixes `|` and `<`"),
        ({"ask": ["x = a||b: Which?"]}, "has an empty text in its choices"),
        ({"ask": ["x = a|a: Which?"]}, "has 'a' twice in its choices"),
        ({"ask": [f"x = {'|'.join(map(str, range(256)))}: ?"]}, "has 256 choices: it must have"),
        ({"ask": ["x: a?", "x: b?"]}, "two questions are named `x`"),
        ({"ask": ["x: a?", "x_confidence: b?"]}, "both need a column `x_confidence`"),
        ({"ask": ["error: a?"]}, "`error` has the name of a result column"),
        ({"ask": ["x: Is {{ y }} it?"]}, "contains a template, but all rows have the same"),
        ({"ask": [f"q{number}: a?" for number in range(401)]}, "it has 401 questions"),
        ({"ask": 1}, "`ask` must be a list"),
        ({"ask": ASK[0], "url": "/v1/embeddings"}, "but questions need /v1/decisions: remove it"),
        ({"ask": ASK[0], "messages": []}, "`messages` cannot be used with questions"),
        ({"ask": ASK[0], "params": {"debias": 2}}, "use the recipe's key `permutations` instead"),
        ({"ask": ASK[0], "permutations": 65}, "it must be a whole number from 1 to 64"),
        ({"ask": ASK[0], "question_layout": "x"}, "it must be one of row_first, questions_first"),
        ({"prompt": "x", "permutations": 2}, "`permutations` needs questions: add --ask"),
        ({"prompt": "x", "url": "/v1/decisions"}, "/v1/decisions needs questions"),
        ({"ask": [f"q{n}: a?" for n in range(400)], "permutations": 64}, "a row has 25,600 reads"),
        ({"ask": "  "}, "`ask` has an empty question: write one, such as 'damaged: Is"),
        ({"ask": []}, "`ask` is empty: remove it, or write ask = ['damaged: Is"),
        ({"ask": "x: a\udcff?"}, r"it contains 'x: a\udcff', which is not valid Unicode"),
        ({"labels": ["a"]}, "`labels` has 1 choice: it must have from 2 to 255"),
        ({"questions": [{"instructions": "x"}]}, "`questions` 1 has no name"),
        ({"questions": [{"name": "x"}]}, "the question `x` has no instructions"),
        ({"questions": [{"name": "x", "choises": []}]}, "has `choises`, which is not a key"),
        (
            {"questions": [{"name": "x", "instructions": "y", "type": "score", "choices": ["a"]}]},
            "has type score and `choices` of `choices`, `levels`: it must have only `levels`",
        ),
        (
            {"questions": [{"name": "x", "instructions": "y", "choices": "ab"}]},
            "must have a list in `choices`, such as",
        ),
        (
            {"questions": [{"name": "x", "instructions": "y", "levels": 5}]},
            "must have a list in `levels`, such as",
        ),
        (
            {"questions": [{"name": "x", "instructions": "y", "choices": [True, "true"]}]},
            "has 'true' both as a text and as a boolean",
        ),
        (
            {"questions": [{"name": "x", "instructions": "y", "levels": ["a", 1]}]},
            "has 1 in `levels`: each must be a text, or {label = '…', description = '…'}",
        ),
    ],
)
def test_invalid_questions_are_rejected_with_advice(given: dict[str, Any], words: str) -> None:
    """Advice can be pasted."""
    with pytest.raises(RecipeError) as info:
        parse_recipe(given)
    assert words in str(info.value)


def test_a_question_with_the_name_of_a_column_is_rejected() -> None:
    """Unless the column is not kept."""
    kept = pa.schema([("damaged_confidence", pa.string())])
    recipe = parse_recipe({"ask": ASK[0]})
    with pytest.raises(RecipeError, match=r"`damaged` needs a column `damaged_confidence`"):
        ResultColumns(recipe, kept, ResultFacts())
    ResultColumns(recipe, pa.schema([]), ResultFacts())


ROWS = [
    row_of(predicate(0.25), choice(0.25, 0.75), choice(0.25, 0.25, 0.5), mass=0.05, agreement=0.5),
    FAILED,
    row_of(predicate(0.5), choice(0.75, 0.25), choice(0.75, 0.25, 0), agreement=1.0),
    row_of(predicate(0.75), {"type": "refusal"}, choice(0, 1, 0), mass=0.05, agreement=1.0),
]


def test_answers_are_typed_columns() -> None:
    """A failed row has nulls and its error."""
    columns = ResultColumns(parse_recipe({"ask": [*ASK]}), pa.schema([]), ResultFacts())
    batch = columns.batch([], ROWS)
    assert [(field.name, str(field.type)) for field in batch.schema][:10] == [
        ("damaged", "bool"),
        ("damaged_confidence", "double"),
        ("damaged_probabilities", "struct<true: double, false: double>"),
        ("team", "string"),
        ("team_confidence", "double"),
        ("team_probabilities", "struct<billing: double, shipping: double>"),
        ("tone", "string"),
        ("tone_score", "double"),
        ("tone_confidence", "double"),
        ("tone_probabilities", "struct<calm: double, annoyed: double, furious: double>"),
    ]
    first, failed, second, refused = batch.to_pylist()
    assert {name: first[name] for name in ("damaged", "team", "tone", "tone_score")} == {
        "damaged": False,
        "team": "shipping",
        "tone": "furious",
        "tone_score": 1.25,
    }
    assert first["damaged_probabilities"] == {"true": 0.25, "false": 0.75}
    assert first["damaged_confidence"] == 0.75
    assert first["usage"] == {"prompt_tokens": 9, "completion_tokens": 0, "total_tokens": 9}
    assert failed == dict.fromkeys(failed) | {"error": "no"}
    assert (second["damaged"], refused["team"], refused["damaged"]) == (True, None, True)
    written = io.BytesIO()
    open_writer(written, batch.schema, "csv").write(batch)
    assert (
        written.getvalue()
        .splitlines()[1]
        .startswith(b'false,0.75,"{""true"":0.25,""false"":0.75}",shipping,0.75,')
    )
    assert question_columns_at_end(["id", *batch.schema.names[:10]]) == [
        question.columns for question in parse_recipe({"ask": [*ASK]}).questions
    ]


def test_booleans_are_a_column_of_booleans() -> None:
    """Texts next to a boolean make it a column of texts."""
    for choices, expected in (([True, False], False), ([True, False, "unknown"], "false")):
        entry = {"name": "paid", "instructions": "Is it paid?", "choices": choices}
        recipe = parse_recipe({"questions": [entry]})
        columns = ResultColumns(recipe, pa.schema([]), ResultFacts())
        batch = columns.batch([], [row_of(choice(0.25, 0.75, *[0] * (len(choices) - 2)))])
        assert batch.to_pylist()[0]["paid"] == expected


def test_answers_are_counted() -> None:
    """Failed rows and refusals are not; a question with little on its labels is named."""
    columns = ResultColumns(parse_recipe({"ask": [*ASK]}), pa.schema([]), ResultFacts())
    columns.batch([], ROWS[:2])
    columns.batch([], ROWS[2:])
    damaged, team, tone = [counts.summary() for counts in columns.counts]
    assert damaged == {
        "name": "damaged",
        "type": "predicate",
        "rows": 3,
        "values": {"true": 2, "false": 1},
        "mean_entropy": 0.874185,
        "mean_label_mass": 0.2,
        "low_label_mass": 0.666667,
        "changed_winner": 0.333333,
    }
    assert (team["rows"], team["values"]) == (2, {"billing": 1, "shipping": 1})
    assert tone["mean_score"] == 0.833333
    assert "question `damaged`: 67% of rows put less than 10% on its labels" in str(
        wording_fault(damaged)
    )
    assert wording_fault(team) is None
