"""Results as columns: their names, types and cells, and the files that contain them."""

from __future__ import annotations

import base64
import csv
import io
import json
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import ipc

from tidemill.batch.table.errors import RecipeError
from tidemill.batch.table.recipe import parse_recipe
from tidemill.batch.table.result_columns import ResultColumns, ResultFacts
from tidemill.batch.table.writer import open_writer

SCHEMA = {
    "$defs": {"Label": {"enum": ["good", "bad"]}},
    "type": "object",
    "properties": {
        "label": {"$ref": "#/$defs/Label"},
        "stars": {"type": ["integer", "null"]},
        "score": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {"type": "object", "properties": {"x": {"type": "number"}}},
        "any": {},
    },
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "review", "schema": SCHEMA}}
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def row(body: dict[str, Any] | None, **error: Any) -> bytes:
    """Return a printed row with a body or an error."""
    response = {"status_code": 200 if body else 400, "request_id": "r", "body": body or error}
    fields = {"id": "batch_req_1", "custom_id": "1", "response": response, "error": None}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def chat(*texts: str | None, **message: Any) -> bytes:
    """Return the row of a chat with these answers."""
    choices = [
        {"index": place, "message": {"content": text, **message}, "finish_reason": "stop"}
        for place, text in enumerate(texts)
    ]
    return row({"choices": choices, "usage": USAGE})


def columns_of(rows: list[bytes], **given: Any) -> tuple[pa.Schema, list[dict[str, Any]]]:
    """Return schema and rows of a recipe's results, next to a retained column `text`."""
    recipe = parse_recipe({"prompt": "{{ text }}", **given})
    made = ResultColumns(
        recipe, pa.schema([("text", pa.string())]), ResultFacts.of_rows(rows, recipe)
    )
    batch = made.batch([pa.array(["kept"] * len(rows))], rows)
    return made.schema, batch.to_pylist()


def test_results_are_next_to_retained_columns() -> None:
    """They get other names in a conflict; a failed row contains its error."""
    schema, (good, bad) = columns_of([chat("hi"), row(None, error={"message": "no"})])
    assert schema.names == ["text", "output_text", "finish_reason", "usage", "error"]
    assert good == {
        "text": "kept",
        "output_text": "hi",
        "finish_reason": "stop",
        "usage": USAGE,
        "error": None,
    }
    assert bad == dict.fromkeys(good) | {"text": "kept", "error": "no"}


def test_responses_have_the_columns_of_chats() -> None:
    """Their schema is in `text`; reasoning, calls and truncation are those of a chat."""
    text = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    usage = {"input_tokens": 5, "output_tokens": 2, "total_tokens": 7}

    def response(*output: dict[str, Any], **more: Any) -> bytes:
        return row({"reasoning": {"effort": None}, "output": output, "usage": usage, **more})

    answer = {"type": "message", "content": [{"type": "output_text", "text": '{"stars": 3}'}]}
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    cut = {"incomplete_details": {"reason": "max_output_tokens"}}
    rows = [
        response(reasoning, answer),
        response(call),
        response(answer, **cut),
        row(None, error={}),
    ]
    given = {"url": "/v1/responses", "params": {"text": text}, "keep": []}
    schema, found = columns_of(rows, **given)
    assert str(schema.field("stars").type) == "int64"
    assert [each["output_text"] for each in found] == ['{"stars": 3}', None, '{"stars": 3}', None]
    assert [each["reasoning"] for each in found] == ["Hm.", None, None, None]
    assert [each["finish_reason"] for each in found] == ["stop", "tool_calls", "length", None]
    assert [each["stars"] for each in found] == [3, None, 3, None]
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": "c", "type": "function", "function": function}]
    assert json.loads(found[1]["tool_calls"]) == calls
    assert [each["usage"] for each in found] == [USAGE] * 3 + [None]
    plain = columns_of([response(answer)], url="/v1/responses")[0]
    assert plain.names == ["text", "output_text", "finish_reason", "usage", "error"]


@pytest.mark.parametrize(
    "params", [{"top_logprobs": 1}, {"include": ["message.output_text.logprobs"]}]
)
def test_responses_have_the_log_probabilities_that_they_request(params: dict[str, Any]) -> None:
    """The cell has those of all messages; the error of a truncated response names its limit."""
    token = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": []}
    part = {"type": "output_text", "text": "Hi", "logprobs": [token]}
    output = [{"type": "message", "content": [part]}] * 2
    cut = {"incomplete_details": {"reason": "max_output_tokens"}, "output": []}
    rows = [row({"output": output}), row(cut)]
    given = {"url": "/v1/responses", "params": params, "keep": []}
    found = columns_of(rows, **given)[1]
    assert json.loads(found[0]["logprobs"]) == {"content": [token, token]}
    assert found[1]["logprobs"] is None
    assert found[1]["error"].endswith(": raise max_output_tokens.")


def test_fields_of_a_schema_are_typed_columns() -> None:
    """A truncated or unsuitable value is null, and the text still contains it."""
    whole = {"label": "good", "stars": 3, "score": 1, "tags": ["a"], "place": {"x": 1}, "any": [1]}
    odd = {"label": 5, "stars": 10**30, "score": None, "tags": "a", "place": {}, "any": None}
    texts = [json.dumps(whole), json.dumps(odd), '{"label": "go', "[]"]
    schema, found = columns_of(
        [chat(text) for text in texts], params={"response_format": FORMAT}, keep=[]
    )
    types = {field.name: str(field.type) for field in schema}
    assert (types["label"], types["stars"], types["score"]) == ("string", "int64", "double")
    assert (types["tags"], types["place"]) == ("list<item: string>", "struct<x: double>")
    assert [{name: each[name] for name in whole} for each in found] == [
        whole | {"any": "[1]"},
        dict.fromkeys(whole) | {"place": {"x": None}},
        dict.fromkeys(whole),
        dict.fromkeys(whole),
    ]
    assert [each["output_text"] for each in found] == texts


def test_confidence_has_typed_columns() -> None:
    """Few values have probabilities, null if they are not distinguished; failed rows have none."""
    fields = {
        "": {"confidence": 0.2},
        "/label": {
            "confidence": 0.7,
            "probabilities": [
                {"value": "good", "probability": 0.7},
                {"value": "bad", "probability": 0.3},
            ],
        },
        "/stars": {"confidence": 0.5},
        "/tags": {"confidence": None},
    }
    answer = {"message": {"content": '{"label": "good"}'}, "finish_reason": "stop"}
    unclear = {**fields, "/label": {**fields["/label"], "undecided": [{"values": ["bad"]}]}}
    bodies = [{"choices": [{**answer, "confidence": each}]} for each in (fields, unclear, None)]
    params = {"response_format": FORMAT}
    schema, found = columns_of([*map(row, bodies), row(None)], params=params, confidence=True)
    types = {field.name: str(field.type) for field in schema}
    assert types["label_confidence"] == types["any_confidence"] == "double"
    assert types["label_probabilities"] == "struct<good: double, bad: double>"
    assert not {"stars_probabilities", "text_confidence"} & types.keys()
    names = ("label_confidence", "label_probabilities", "stars_confidence", "tags_confidence")
    assert [[one[name] for name in names] for one in found] == [
        [0.7, {"good": 0.7, "bad": 0.3}, 0.5, None],
        [0.7, {"good": 0.7, "bad": None}, 0.5, None],
        [None] * 4,
        [None] * 4,
    ]


def test_confidence_of_tool_calls_is_json() -> None:
    """It is null for an answer without calls; without a constraint on texts they have no column."""
    calls = {"/tool_calls/0/function/arguments/city": {"confidence": 0.5}}
    answer = {"message": {"content": None}, "finish_reason": "tool_calls"}
    bodies = [{"choices": [{**answer, "confidence": each}]} for each in (calls, None)]
    params = {"tools": [{"type": "function"}], "tool_choice": "required"}
    schema, found = columns_of([*map(row, bodies), row(None)], params=params, confidence=True)
    column = [one["tool_calls_confidence"] for one in found]
    assert [one and json.loads(one) for one in column] == [calls, None, None]
    assert "text_confidence" not in schema.names


def test_confidence_without_a_schema_is_about_the_whole_answer() -> None:
    """Choices have probabilities; several answers have a list."""
    shares = [{"value": "a", "probability": 0.9}, {"value": "b", "probability": 0.1}]
    whole = {"": {"confidence": 0.9, "probabilities": shares}}
    given = row({"choices": [{"text": "a", "finish_reason": "stop", "confidence": whole}]})
    params = {"guided_choice": ["a", "b"], "confidence": True}
    _, (found,) = columns_of([given], params=params, url="/v1/completions")
    assert found["text_confidence"] == 0.9
    assert found["text_probabilities"] == {"a": 0.9, "b": 0.1}
    schema, (found,) = columns_of([given], params={**params, "n": 2})
    assert str(schema.field("text_confidence").type) == "list<item: double>"
    assert found["text_confidence"] == [0.9]


CUT_OFF = "cut off at the token limit (finish_reason `length`): raise max_tokens."


def choices(*texts: str | None, ends: tuple[str, ...], **message: Any) -> bytes:
    """Return the row of a chat with a finish reason for each text."""
    found = [
        {"message": {"content": text, **message}, "finish_reason": end}
        for text, end in zip(texts, ends, strict=True)
    ]
    return row({"choices": found, "usage": USAGE})


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (choices("hi", ends=("stop",)), None),
        (choices("hi", ends=("length",)), f"The answer was {CUT_OFF}"),
        (choices(None, ends=("length",)), f"The answer was {CUT_OFF}"),
        (choices("hi", "ho", ends=("stop", "length")), f"1 of 2 answers were {CUT_OFF}"),
        (choices("hi", ends=("repetition",)), None),
        (row(None, error={"message": "no"}), "no"),
    ],
)
def test_a_truncated_text_has_an_error(given: bytes, error: str | None) -> None:
    """The row keeps its answer."""
    _, (found,) = columns_of([given], params={"n": 1})
    assert found["error"] == error
    assert (found["usage"] is None) == (error == "no")


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (choices('{"label": "good"}', ends=("stop",)), None),
        (choices('{"label": "good"}', ends=("length",)), None),
        (choices('{"label": "go', ends=("length",)), f"The answer was {CUT_OFF}"),
        (choices("", ends=("length",)), f"The answer was {CUT_OFF}"),
        (choices(None, ends=("length",), reasoning="Hm"), f"The answer was {CUT_OFF}"),
        (
            choices('{"label": "go', ends=("stop",)),
            "The answer is not a JSON object of the schema.",
        ),
        (choices("[]", ends=("stop",)), "The answer is not a JSON object of the schema."),
        (choices(None, ends=("tool_calls",), tool_calls=[]), None),
    ],
)
def test_an_answer_without_the_fields_of_its_schema_has_an_error(
    given: bytes, error: str | None
) -> None:
    """Columns of a schema are never null without a reason."""
    _, (found,) = columns_of([given], params={"response_format": FORMAT})
    assert found["error"] == error
    assert found["usage"] == USAGE
    if error is None and found["finish_reason"] != "tool_calls":
        assert found["label"] == "good"


def test_several_choices_are_lists() -> None:
    """Each one is a column of lists."""
    _, (found,) = columns_of([chat("a", "b")], params={"n": 2})
    assert (found["output_text"], found["finish_reason"]) == (["a", "b"], ["stop", "stop"])


def test_reasoning_and_tool_calls_have_columns_if_a_row_has_them() -> None:
    """Reasoning is text, and calls are JSON."""
    calls = [{"function": {"name": "f", "arguments": "{}"}}]
    schema, found = columns_of([chat("a"), chat(None, reasoning_content="why", tool_calls=calls)])
    assert {"reasoning", "tool_calls"} <= {*schema.names}
    assert [each["reasoning"] for each in found] == [None, "why"]
    assert json.loads(found[1]["tool_calls"]) == calls


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("float32", [0.5, -1.0]), ("float16", [0.5, -1.0]), ("int8", [64, -127])],
)
@pytest.mark.parametrize("num_failed", [0, 1])
def test_vectors_are_lists_in_parquet(
    kind: str, expected: list[float], num_failed: int, tmp_path: Path
) -> None:
    """The list has a fixed length unless a row failed, whose vector is null."""
    text = base64.b64encode(struct.pack("<2f", 0.5, -1.0)).decode()
    embedded = row({"data": [{"index": 0, "embedding": text}], "usage": USAGE})
    rows = [row(None)] * num_failed + [embedded]
    vectors = [None] * num_failed + [expected]
    schema, found = columns_of(rows, url="/v1/embeddings", vectors=kind)
    assert pa.types.is_fixed_size_list(schema.field("embedding").type) == (not num_failed)
    assert [each["embedding"] for each in found] == vectors
    pq.write_table(pa.Table.from_pylist(found, schema), tmp_path / "table.parquet")
    assert pq.read_table(tmp_path / "table.parquet")["embedding"].to_pylist() == vectors


def test_rows_of_several_texts_have_several_vectors(tmp_path: Path) -> None:
    """A failed row has none, and Parquet returns all of them."""
    texts = [base64.b64encode(struct.pack("<2f", n, n)).decode() for n in (1, 2)]
    data = [{"index": place, "embedding": text} for place, text in enumerate(texts)]
    rows = [row({"data": data}), row(None), row({"data": data[:1]})]
    schema, found = columns_of(rows, url="/v1/embeddings")
    vectors = [[[1, 1], [2, 2]], None, [[1, 1]]]
    assert [each["embedding"] for each in found] == vectors
    pq.write_table(pa.Table.from_pylist(found, schema), tmp_path / "table.parquet")
    assert pq.read_table(tmp_path / "table.parquet")["embedding"].to_pylist() == vectors


def test_scores_and_ranks_are_lists() -> None:
    """They are in the reply's order."""
    scored = row({"data": [{"index": 0, "score": 0.25}, {"index": 1, "score": 0.5}]})
    ranked = row({"results": [{"index": 1, "relevance_score": 0.5, "document": {"text": "b"}}]})
    given = {"prompt": None, "text_1": "a", "text_2": "b"}
    assert columns_of([scored], url="/v1/score", **given)[1][0]["scores"] == [0.25, 0.5]
    given = {"prompt": None, "query": "a", "documents": "{{ text }}"}
    (found,) = columns_of([ranked], url="/v1/rerank", **given)[1]
    assert found["results"] == [{"index": 1, "relevance_score": 0.5}]


def test_labels_have_their_scores() -> None:
    """A failed row has none; rows of several texts have lists."""
    probs = [0.25, 0.75]
    item = {"index": 0, "label": "joy", "probs": probs, "num_classes": 2}
    body = {"labels": ["fear", "joy"], "data": [item], "usage": USAGE}
    scores = [{"label": "fear", "score": 0.25}, {"label": "joy", "score": 0.75}]
    schema, found = columns_of([row(body), row(None)], url="/v1/classify")
    assert schema.names[-5:] == ["label", "score", "probs", "usage", "error"]
    cells = [[each[name] for name in ("label", "score", "probs")] for each in found]
    assert cells == [["joy", 0.75, scores], [None, None, None]]
    _, [several, _] = columns_of([row({**body, "data": [item, item]}), row(body)], url="/classify")
    assert [several[name] for name in ("label", "score", "probs")] == [
        ["joy", "joy"],
        [0.75, 0.75],
        [scores, scores],
    ]


def test_spans_of_a_token_classifier_are_a_list() -> None:
    """A text without any has an empty list, a failed row none."""
    span = {"label": "PER", "score": 0.5, "start": 0, "end": 3, "text": "Ada"}
    item, empty = {"index": 0, "spans": [span]}, {"index": 0, "spans": []}
    bodies = [row({"data": [item], "usage": USAGE}), row({"data": [empty], "usage": USAGE})]
    schema, found = columns_of([*bodies, row(None)], url="/v1/classify")
    assert schema.names[-3:] == ["spans", "usage", "error"]
    assert [each["spans"] for each in found] == [[span], [], None]
    several = row({"data": [item, empty], "usage": USAGE})
    _, [both] = columns_of([several], url="/v1/classify")
    assert both["spans"] == [[span], []]


def test_failed_rows_of_a_token_classifier_have_its_columns() -> None:
    """A recipe that states how tokens are joined is for a token classifier, and a model may be."""
    bad = row(None, error={"message": "no"})
    joined = {"aggregation_strategy": "max"}
    schema, found = columns_of([bad], url="/v1/classify", keep=[], params=joined)
    assert schema.names == ["text", "spans", "usage", "error"]
    assert found == [{"text": "kept", "spans": None, "usage": None, "error": "no"}]
    recipe = parse_recipe({"url": "/v1/classify", "prompt": "{{ text }}"})
    for is_known in (False, True):
        assert ResultFacts.of_rows([bad], recipe, labels_spans=is_known).has_spans is is_known


def test_moderations_have_their_categories() -> None:
    """Several texts of a request have lists."""
    flags, scores = {"hate": True, "spam": False}, {"hate": 0.75, "spam": 0.25}
    result = {"flagged": True, "categories": flags, "category_scores": scores}
    body = {"results": [{**result, "category_applied_input_types": {"hate": ["text"]}}]}
    given = {"url": "/v1/moderations", "keep": []}
    schema, found = columns_of([row(body), row(None, error={"message": "no"})], **given)
    assert schema.names[1:] == ["flagged", "categories", "category_scores", "usage", "error"]
    pairs = [{"category": name, "score": score} for name, score in scores.items()]
    assert [*found[0].values()][1:] == [True, ["hate"], pairs, None, None]
    assert [*found[1].values()][1:] == [None, None, None, None, "no"]
    _, [both] = columns_of([row({"results": [result, result]})], **given)
    assert both["categories"] == [["hate"], ["hate"]]


def test_transcripts_have_their_times() -> None:
    """They are JSON, as long as the format has them; the usage is in seconds."""
    words, usage = [{"word": "Hi", "start": 0.0}], {"type": "duration", "seconds": 3}
    whole = {"text": "Hi", "language": "english", "segments": [], "words": words, "usage": usage}
    rows = [row(whole), row(None)]
    given: dict[str, Any] = {"url": "/v1/audio/transcriptions", "keep": []}
    schema, found = columns_of(rows, **given)
    assert schema.names[1:] == ["output_text", "usage", "error"]
    assert [found[0]["output_text"], found[0]["usage"]] == ["Hi", {"seconds": 3}]
    for times, names in (
        ({}, ["segments"]),
        ({"timestamp_granularities[]": "word"}, ["words"]),
        ({"timestamp_granularities": ["word", "segment"]}, ["segments", "words"]),
    ):
        given["params"] = {"response_format": "verbose_json", **times}
        schema, [first, failed] = columns_of(rows, **given)
        assert schema.names[2:-2] == ["language", *names]
        assert [json.loads(first[name]) for name in names] == [whole[name] for name in names]
        assert failed["language"] is None
    translation = {"url": "/v1/audio/translations", "keep": []}
    _, [found] = columns_of([row({"text": "Hi"})], **translation)
    assert (found["output_text"], found["usage"]) == ("Hi", None)


def test_ambiguous_names_are_refused() -> None:
    """The error comes before anything runs."""
    kept = pa.schema([("error", pa.string()), ("output_error", pa.string())])
    with pytest.raises(RecipeError, match="`error` or `output_error`"):
        ResultColumns(parse_recipe({"prompt": "x"}), kept, ResultFacts())


BATCH = pa.RecordBatch.from_pydict(
    {
        "n": [1, None],
        "text": ['a "b"\n', None],
        "tags": [["x"], None],
        "ok": [True, False],
        "kind": pa.array(["k", "k"]).dictionary_encode(),
    }
)


def written(form: Any) -> bytes:
    """Return the table of that batch twice."""
    file = io.BytesIO()
    writer = open_writer(file, BATCH.schema, form)
    writer.write(BATCH)
    writer.write(BATCH)
    writer.close()
    return file.getvalue()


def test_tables_are_written_in_every_format() -> None:
    """Types are preserved in Parquet and Arrow; nested cells of CSV are JSON."""
    rows = BATCH.to_pylist() * 2
    parquet = pq.read_table(io.BytesIO(written("parquet")))
    assert parquet.to_pylist() == rows
    assert parquet.schema == BATCH.schema
    assert ipc.open_file(written("arrow")).read_all().to_pylist() == rows
    assert [json.loads(line) for line in written("jsonl").splitlines()] == rows
    for form, delimiter in (("csv", ","), ("tsv", "\t")):
        header, *found = csv.reader(io.StringIO(written(form).decode()), delimiter=delimiter)
        assert header == BATCH.schema.names
        assert (
            found
            == [
                ["1", 'a "b"\n', '["x"]', "true", "k"],
                ["", "", "", "false", "k"],
            ]
            * 2
        )


def test_a_property_may_have_the_name_of_a_result_column() -> None:
    """It gets the prefixed name."""
    schema = {"type": "object", "properties": {"error": {"type": "string"}}}
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    found, (each,) = columns_of([chat('{"error": "none"}')], params={"response_format": given})
    assert (each["error"], each["output_error"]) == (None, "none")
    assert found.names[-2:] == ["error", "output_error"]
