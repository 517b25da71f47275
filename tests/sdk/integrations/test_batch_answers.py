"""Batch answers: columns are declared before there is an answer, and rows keyed by their ids."""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tidemill import TidemillError
from tidemill.engine_process.frames import Row
from tidemill.protocol.contract import Usage
from tidemill.sdk.in_flight import Sent
from tidemill.sdk.integrations.batch_answers import BatchAnswers
from tidemill.sdk.integrations.options import decision_keys, split_options

ROOT = Path(__file__).parents[3]
NAMES = pa.table({"name": [f"row {number}" for number in range(2_500)]}).append_column(
    "id", pa.array([f"a{number}" for number in range(2_500)])
)


class Echo:
    """Answers each line with its number and custom id, as the text of a chat."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes]] = []

    def max_inflight(self) -> int:
        """Return some number."""
        return 7

    def send_line(self, number: int, data: bytes) -> Sent[Row]:
        """Answer at once."""
        self.sent.append((number, data))
        line = json.loads(data)
        choice = {"message": {"content": f"{number} {line['custom_id']}"}, "finish_reason": "stop"}
        body = {"choices": [choice], "usage": {"total_tokens": 1}}
        row: dict[str, Any] = {"response": {"status_code": 200, "body": body}, "error": None}
        if "body" not in line:
            error = {"message": f"Row {number}: no luck"}
            row = {"response": None, "error": error}
        future: Future[Row] = Future()
        future.set_result(Row(0, is_success=True, usage=Usage(), row=json.dumps(row).encode()))
        return Sent(future, len(data))


def answers_of(table: pa.Table, rows: int = 10_000, **recipe: Any) -> tuple[pa.Table, Echo]:
    """Return a table with its answers, and the engine that gave them."""
    engine, answers = Echo(), BatchAnswers(recipe, table.schema)
    again = pickle.loads(pickle.dumps(answers))  # noqa: S301 - as Spark sends it
    found = pa.Table.from_batches(again.answered(engine, table.to_batches(max_chunksize=rows)))
    return found, engine


def test_rows_are_the_same_in_whichever_batches_they_come() -> None:
    """Lines and seeds depend on the IDs; each row is answered once, next to its columns."""
    whole, engine = answers_of(NAMES, prompt="{{ name }}", id="id")
    parts, other = answers_of(NAMES, rows=3, prompt="{{ name }}", id="id")
    assert whole.equals(parts)
    assert engine.sent == other.sent
    assert whole.select(["name", "id"]).equals(NAMES)
    assert whole.column("text").to_pylist() == [f"0 a{number}" for number in range(2_500)]


def test_whole_numbers_as_ids_are_the_numbers_of_lines() -> None:
    """Rows numbered from 1 have the seeds of `tidemill run`; other IDs use their bytes."""
    table = pa.table({"n": [3, 0, -1, 2**70 // 2**8, None]})
    found, engine = answers_of(table, prompt="Hi", id="n")
    assert [number for number, _ in engine.sent] == [3, 0, 0, 2**62, 0]
    assert found.column("error").to_pylist() == [None] * 4 + ["no luck"]


def test_rows_without_ids_are_numbered_on_and_on() -> None:
    """Over all batches, as those of a file; empty batches have none."""
    table = pa.concat_tables([NAMES.slice(0, 2), NAMES.slice(0, 0), NAMES.slice(2, 2)])
    found, _ = answers_of(table, prompt="{{ name }}", keep=["name"], params={"temperature": 0})
    assert found.column("text").to_pylist() == ["1 1", "2 2", "3 3", "4 4"]
    assert found.column_names[0] == "name"


def test_an_event_loop_has_the_answers_alone() -> None:
    """Each row is one struct, from the columns that the recipe uses."""
    answers = BatchAnswers({"prompt": "{{ name }}", "id": "id"}, NAMES.schema)
    assert answers.columns == ("name", "id")
    batch = NAMES.slice(0, 2).to_batches()[0]
    found = asyncio.run(answers.answer_columns(Echo(), batch))
    assert found.type == pa.struct(answers.fields)
    assert [row["text"] for row in found.to_pylist()] == ["0 a0", "0 a1"]


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        (
            {"prompt": "{{ name }}", "id": "id"},
            ["text", "reasoning", "finish_reason", "usage", "error"],
        ),
        (
            {"prompt": "x", "id": "id", "params": {"tools": []}, "keep": ["id"]},
            ["text", "reasoning", "tool_calls", "finish_reason", "usage", "error"],
        ),
        (
            {"prompt": "{{ name }}", "id": "id", "url": "/v1/responses"},
            ["text", "reasoning", "finish_reason", "usage", "error"],
        ),
        (
            {"prompt": "{{ name }}", "id": "id", "url": "/v1/completions"},
            ["text", "finish_reason", "usage", "error"],
        ),
        (
            {"input": "{{ name }}", "url": "/v1/embeddings"},
            ["embedding: list<item: float>", "usage", "error"],
        ),
        (
            {"input": ["{{ name }}", "x"], "url": "/v1/embeddings", "vectors": "int8"},
            ["embedding: list<item: list<item: int8>>", "usage", "error"],
        ),
        (
            {"input": "{{ names }}", "url": "/v1/embeddings"},
            ["embedding: list<item: list<item: float>>", "usage", "error"],
        ),
        (
            {"input": "{{ names }}", "url": "/v1/moderations"},
            [
                *("flagged: list<item: bool>", "categories: list<item: list<item: string>>"),
                *("category_scores", "usage", "error"),
            ],
        ),
        (
            {"prompt": "{{ name }}", "id": "id", "url": "/v1/audio/transcriptions"},
            ["text: string", "usage: struct<seconds: int64>", "error"],
        ),
        (
            {"ask": ["tone = calm<angry: How upset?"]},
            [
                *("tone: string", "tone_score: double", "tone_confidence: double"),
                "tone_probabilities: struct<calm: double, angry: double>",
                *("usage", "error"),
            ],
        ),
    ],
)
def test_the_columns_of_answers_are_known_beforehand(
    recipe: dict[str, Any], names: list[str]
) -> None:
    """They do not depend on the rows."""
    schema = NAMES.schema.append(pa.field("names", pa.list_(pa.string())))
    fields = BatchAnswers(recipe, schema).fields
    assert [field.name for field in fields] == [name.partition(":")[0] for name in names]
    shown = {f"{field.name}: {field.type}" for field in fields}
    assert shown >= {name for name in names if ":" in name}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prompt": "{{ nam }}"}, "did you mean `name`"),
        ({"prompt": "x", "id": "key"}, "names `key`, which is not a column"),
        ({"prompt": "x", "keep": ["nothing"]}, "names `nothing`, which is not a column"),
        ({"promt": "x"}, "`promt` is neither a recipe key nor an engine option"),
        ({}, "it has no template"),
        ({"prompt": "x", "max_num_seqs": "many"}, "--max-num-seqs"),
    ],
)
def test_invalid_options_are_reported_before_a_model_loads(
    given: dict[str, Any], words: str
) -> None:
    """Each error is one sentence."""
    with pytest.raises(TidemillError, match=words):
        BatchAnswers(split_options(given)[1], NAMES.schema)


def test_questions_about_a_column_are_a_recipe() -> None:
    """Both forms keep their order, and the columns are those of tables."""
    schema = pa.schema([("the text", pa.string())])
    given = [{"name": "b", "instructions": "Is it?"}, "a = x|y: Which?"]
    names = [field.name for field in BatchAnswers(decision_keys("the text", given), schema).fields]
    assert names[::3] == ["b", "a", "usage"]
    recipe = decision_keys("the text", "b: Is it?")
    assert [field.name for field in BatchAnswers(recipe, schema).fields][:3] == names[:3]


@pytest.mark.parametrize(
    ("column", "questions", "words"),
    [
        ("text", ["a: Is it?"], r"names `text`, .*: write \{\{ row\[.the text.\] \}\}"),
        (3, ["a: Is it?"], "`input` must be the name of a column; got a int"),
        ("the text", [], "`questions` is empty: add one"),
        ("the text", None, "`questions` is empty: add one"),
        ("the text", 3, "`questions` must be a list"),
        ("the text", ["Is it?"], "has no colon: write 'answer: "),
        ("the text", {"instructions": "Is it?"}, "`questions` 1 has no name"),
    ],
)
def test_invalid_questions_about_a_column_are_refused(
    column: Any, questions: Any, words: str
) -> None:
    """Each error is one sentence."""
    schema = pa.schema([("the text", pa.string())])
    with pytest.raises(TidemillError, match=words):
        BatchAnswers(decision_keys(column, questions), schema)


@pytest.mark.parametrize(
    ("recipe", "is_refused"),
    [
        ({}, True),
        ({"url": "/v1/completions"}, True),
        ({"params": {"temperature": 0.7}}, True),
        ({"params": {"seed": None}}, True),
        ({"params": {"temperature": 0}}, False),
        ({"params": {"temperature": 0.0}}, False),
        ({"params": {"seed": 0}}, False),
        ({"id": "id"}, False),
        ({"id": "id", "params": {"temperature": 0.7}}, False),
    ],
)
def test_sampled_requests_without_ids_are_refused(recipe: dict[str, Any], is_refused: bool) -> None:  # noqa: FBT001
    """Rows in equal places of two partitions would draw equal samples."""
    keys = split_options({"prompt": "{{ name }}", **recipe})[1]
    if is_refused:
        with pytest.raises(
            TidemillError, match=r'such as "review_id", or set params=\{'
        ) as refused:
            BatchAnswers(keys, NAMES.schema)
        advice = str(refused.value)
        assert "sampled requests need an ID per row" in advice
    else:
        assert BatchAnswers(keys, NAMES.schema).fields


@pytest.mark.parametrize("url", ["/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/classify"])
def test_requests_that_are_not_sampled_need_no_ids(url: str) -> None:
    """Vectors and scores do not depend on a seed."""
    fields = {
        "/v1/embeddings": {"input": "{{ name }}"},
        "/v1/classify": {"prompt": "{{ name }}"},
        "/v1/score": {"text_1": "{{ name }}", "text_2": "x"},
        "/v1/rerank": {"query": "{{ name }}", "documents": ["x"]},
    }
    assert BatchAnswers({"url": url, **fields[url]}, NAMES.schema).fields


def test_two_columns_of_one_name_are_refused() -> None:
    """A template could mean either of them."""
    twice = pa.schema([("a", pa.string()), ("a", pa.int64())])
    with pytest.raises(TidemillError, match="more than one column named `a`"):
        BatchAnswers({"prompt": "x"}, twice)


def test_types_without_a_value_are_refused() -> None:
    """Columns with types are checked at once, and those of Spark when their rows come."""
    kind = pa.timestamp("us", "Mars/Phobos")
    table = pa.table({"at": pa.array([1], pa.int64()).view(kind)})
    words = "column `at` is timestamp.us, tz=Mars/Phobos., and this machine does not know"
    with pytest.raises(TidemillError, match=words):
        BatchAnswers({"prompt": "{{ at }}", "params": {"temperature": 0}}, table.schema)
    fixed = {"prompt": "{{ at }}", "params": {"temperature": 0}}
    untyped = BatchAnswers(fixed, pa.schema([("at", pa.null())]))
    with pytest.raises(TidemillError, match=words):
        list(untyped.answered(Echo(), table.to_batches()))
    found, _ = answers_of(table, prompt="x", params={"temperature": 0})
    assert found.column("at").type == kind


@pytest.mark.parametrize("name", ["daft", "spark"])
def test_a_package_that_is_missing_is_named(name: str) -> None:
    """The error contains the command that installs it."""
    package = {"daft": "daft", "spark": "pyspark"}[name]
    program = f"import sys; sys.modules[{package!r}] = None; import tidemill.{name}"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "TidemillError" in done.stderr.splitlines()[-1]
    assert f"tidemill.{name} needs " in done.stderr
    assert "pip install" in done.stderr.splitlines()[-1]


class Spans(Echo):
    """Answers each line as a token classifier."""

    def send_line(self, number: int, data: bytes) -> Sent[Row]:
        """Answer at once, with one span."""
        self.sent.append((number, data))
        span = {"label": "PER", "score": 0.5, "start": 0, "end": 3, "text": "row"}
        body = {"data": [{"index": 0, "spans": [span]}], "usage": {"total_tokens": 1}}
        row = json.dumps(
            {"response": {"status_code": 200, "body": body}, "error": None}, indent=None
        )
        future: Future[Row] = Future()
        compact = row.replace(": ", ":").encode()
        future.set_result(Row(0, is_success=True, usage=Usage(), row=compact))
        return Sent(future, len(data))


def test_the_column_of_spans_is_declared_by_the_strategy() -> None:
    """Without it the error names the parameter: a schema precedes the first answer."""
    recipe: dict[str, Any] = {"url": "/v1/classify", "prompt": "{{ name }}"}
    declared = BatchAnswers({**recipe, "params": {"aggregation_strategy": "max"}}, NAMES.schema)
    assert [field.name for field in declared.fields] == ["spans", "usage", "error"]
    some = NAMES.slice(0, 3).to_batches()
    [found] = declared.answered(Spans(), some)
    assert [spans[0]["text"] for spans in found.column("spans").to_pylist()] == ["row"] * 3
    with pytest.raises(TidemillError, match="aggregation_strategy"):
        list(BatchAnswers(recipe, NAMES.schema).answered(Spans(), some))
